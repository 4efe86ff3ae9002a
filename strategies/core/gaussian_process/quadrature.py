"""The logistic function of a Gaussian variable, on average."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_NUM_NODES = 20
_SMALLEST_VARIANCE = 1e-12


def _gauss_hermite() -> tuple[Tensor, Tensor]:
    """Return nodes and logarithms of weights for a standard Gaussian variable."""
    nodes, weights = np.polynomial.hermite.hermgauss(_NUM_NODES)
    scaled = torch.from_numpy(math.sqrt(2) * nodes)
    return scaled, torch.from_numpy(np.log(weights / math.sqrt(math.pi)))


_NODES, _LOG_WEIGHTS = _gauss_hermite()


def log_expected_sigmoid(mean: Tensor, variance: Tensor) -> Tensor:
    """Return log E σ(f) of f ~ N(mean, variance), of the shape of both.

    Gauss-Hermite quadrature with 20 nodes, as logarithms, so that what is far on the
    wrong side keeps a finite loss.
    """
    # At variance 0 the square root would have no gradient.
    deviation = variance.clamp_min(_SMALLEST_VARIANCE).sqrt()
    nodes, log_weights = _NODES.to(mean.device), _LOG_WEIGHTS.to(mean.device)
    values = mean[..., None] + deviation[..., None] * nodes
    return torch.logsumexp(functional.logsigmoid(values) + log_weights, dim=-1)

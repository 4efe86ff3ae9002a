"""Dirichlet draws that stay finite however small the concentration is."""

import numpy as np
from numpy.typing import NDArray

_LARGEST_DROP = 1e300


def draw_log_dirichlet(
    concentration: float, shape: tuple[int, ...], generator: np.random.Generator
) -> NDArray[np.float64]:
    """Draw log-weights of symmetric Dirichlet vectors along the last axis.

    Parameters
    ----------
    concentration
        α > 0. Small values put nearly all weight on one entry.
    shape
        Of the result.

    Returns
    -------
    Finite; exp of it is proportional to the Dirichlet vector, see `normalise`.

    Notes
    -----
    A Dirichlet vector is a vector of Gamma(α) draws divided by its sum. For small α
    these are all 0 in floating point; their logarithms are not: Gamma(α) is
    Gamma(α + 1) * U^(1/α), and -log U is a standard exponential draw.
    """
    log_gammas = np.log(generator.standard_gamma(concentration + 1.0, shape))
    exponentials = generator.standard_exponential(shape)
    above_least = exponentials - exponentials.min(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        drops = np.minimum(above_least / concentration, _LARGEST_DROP)
    log_weights: NDArray[np.float64] = log_gammas - drops
    return log_weights


def normalise(log_weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights, which sum to 1 along the last axis.

    Parameters
    ----------
    log_weights
        Entries of -inf get weight 0; each vector needs a finite entry.
    """
    weights = np.exp(log_weights - log_weights.max(axis=-1, keepdims=True))
    normalised: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return normalised

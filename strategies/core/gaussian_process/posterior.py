"""Binary classification with a Gaussian process, by Pólya-Gamma augmentation.

Polson, Scott, Windle, "Bayesian Inference for Logistic Models Using Pólya-Gamma Latent
Variables", 2013, Theorem 1: with signs y = ±1 and κ = y/2,

    σ(y f) = ½ exp(κ f) E_ω exp(-ω f²/2),   ω ~ PG(1, 0)

so that given ω the latent function f is Gaussian at the examples, with covariance
Σ = (K⁻¹ + Ω)⁻¹ and mean Σκ. Instead of drawing ω, the mean-field posterior
q(f) Π q(ω_i) is found: q(ω_i) = PG(1, c_i) with c_i² = E f_i², of which only the mean
is needed (Wenzel, Galy-Fajou, Donner, Kloft, Opper, "Efficient Gaussian Process
Classification Using Pólya-Gamma Data Augmentation", AAAI 2019, section 3).

An example with the sign 0 takes no part: ω = 0 observes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_SMALL_TILT = 1e-3


def expected_polya_gamma(tilt: Tensor) -> Tensor:
    """Return E ω = tanh(c/2) / (2c) of ω ~ PG(1, c), of the shape of c ≥ 0.

    Polson et al. 2013, section 2.3; 1/4 in the limit c = 0.
    """
    near_zero = 0.25 - tilt.square() / 48
    elsewhere = torch.tanh(tilt / 2) / (2 * tilt.clamp_min(_SMALL_TILT))
    return torch.where(tilt < _SMALL_TILT, near_zero, elsewhere)


@dataclass(frozen=True)
class Posterior:
    """q(f) at n examples; a batch of problems where there are more axes.

    Attributes
    ----------
    signs
        y, ±1 or 0, shape (..., n).
    precision
        E ω, shape (..., n); 0 where the sign is.
    factor
        Lower triangular L with L Lᵀ = I + Ω^½ K Ω^½, shape (..., n, n).
    mean, variance
        Of f: Σκ and the diagonal of Σ, shape (..., n).
    """

    signs: Tensor
    precision: Tensor
    factor: Tensor
    mean: Tensor
    variance: Tensor

    def elsewhere(self, covariance: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of f, shape (m,) each, at m other points.

        Rasmussen, Williams, "Gaussian Processes for Machine Learning", 2006,
        Eq. 3.21 and 3.24, with the observations Ω⁻¹κ of precision Ω.

        Parameters
        ----------
        covariance
            Between the examples and the points, shape (n, m).
        prior
            Variance of f at the points, shape (m,).
        """
        coefficients = self.signs / 2 - self.precision * self.mean  # K⁻¹ Σκ
        explained = _whitened(self.factor, self.precision, covariance)
        return coefficients @ covariance, prior - explained.square().sum(dim=0)

    def left_out(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of f at each example given the others, (..., n).

        The example's own observation is divided out of its marginal: Rasmussen,
        Williams 2006, Eq. 5.12, with ω as all examples determine it.
        """
        kept = 1 - self.precision * self.variance
        return (self.mean - self.signs / 2 * self.variance) / kept, self.variance / kept


def posterior(covariance: Tensor, signs: Tensor, num_iterations: int) -> Posterior:
    """Return the mean-field posterior.

    Gradients flow through the covariance, with ω as constants.

    Parameters
    ----------
    covariance
        K, float64 of shape (..., n, n).
    signs
        y, ±1 or 0, float64 of shape (..., n).
    num_iterations
        Rounds of coordinate ascent, each one Cholesky factorisation: O(n³).
    """
    with torch.no_grad():
        precision = signs.abs() / 4
        for _ in range(num_iterations):
            found = posterior_given(covariance, signs, precision)
            tilt = (found.mean.square() + found.variance.clamp_min(0)).sqrt()
            precision = signs.abs() * expected_polya_gamma(tilt)
    return posterior_given(covariance, signs, precision)


def posterior_given(covariance: Tensor, signs: Tensor, precision: Tensor) -> Posterior:
    """Return p(f | y, ω), with all of its arguments as in `posterior`."""
    root = precision.sqrt()
    identity = torch.eye(signs.shape[-1], dtype=signs.dtype, device=signs.device)
    factor = _cholesky(identity + root[..., None] * covariance * root[..., None, :])
    explained = _whitened(factor, precision, covariance)
    target = signs[..., None] / 2
    mean = covariance @ target - explained.mT @ (explained @ target)
    variance = covariance.diagonal(dim1=-2, dim2=-1) - explained.square().sum(dim=-2)
    return Posterior(signs, precision, factor, mean.squeeze(-1), variance)


def _whitened(factor: Tensor, precision: Tensor, covariance: Tensor) -> Tensor:
    """Return L⁻¹ Ω^½ K, of the shape of K: its square is what was learnt of f."""
    scaled = precision.sqrt()[..., None] * covariance
    whitened: Tensor = torch.linalg.solve_triangular(factor, scaled, upper=False)
    return whitened


def _cholesky(matrix: Tensor) -> Tensor:
    """Return the factor; NaN where the matrix is not finite.

    Its eigenvalues are 1 at least, so nothing else can go wrong.
    """
    found: tuple[Tensor, Tensor] = torch.linalg.cholesky_ex(matrix)
    factor, failed = found
    return factor.where(failed[..., None, None] == 0, torch.nan)

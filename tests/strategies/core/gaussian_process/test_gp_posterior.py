import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.seeding import RandomKey
from knnper.strategies.core.gaussian_process import (
    Kernel,
    Posterior,
    expected_polya_gamma,
    log_expected_sigmoid,
    posterior,
    posterior_given,
)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def covariance_of(num_examples: int, seed: int = 0) -> Tensor:
    generator = RandomKey(seed).numpy()
    points = torch.from_numpy(generator.normal(size=(num_examples, 3)))
    return Kernel("rbf", 4.0, 1.0).matrix(points, points)


@pytest.mark.parametrize("tilt", [0.0, 1e-4, 0.9e-3, 1.1e-3, 0.5, 3.0, 40.0])
def test_the_mean_of_polya_gamma_is_that_of_its_series(tilt: float) -> None:
    # Polson et al. 2013, Eq. 1: with g_k ~ Exp(1),
    # PG(1, c) = Σ_k g_k / (2π² ((k - ½)² + c² / (4π²))).
    k = np.arange(1, 200_000)
    terms = 1 / ((k - 0.5) ** 2 + tilt**2 / (4 * np.pi**2))
    tail = 1 / k[-1]  # Σ_{k>N} 1/k²
    series = (terms.sum() + tail) / (2 * np.pi**2)
    found = float(expected_polya_gamma(tensor(tilt)))
    assert found == pytest.approx(series, rel=1e-9)


def test_the_mean_of_polya_gamma_at_zero_is_a_quarter() -> None:
    assert expected_polya_gamma(tensor(0.0)).tolist() == [0.25]


def test_opposite_points_by_hand() -> None:
    # f = ±u with u ~ N(0, s): two observations of one number. Given ω, the precision
    # of u is 1/s + 2ω, and Σ κ_i z_i = ½ + ½ = 1, so that its mean equals its variance.
    s, omega = 3.0, 0.25
    for _ in range(200):
        v = 1 / (1 / s + 2 * omega)
        c = math.sqrt(v * v + v)
        omega = math.tanh(c / 2) / (2 * c)
    points = torch.tensor([[1.0], [-1.0]])
    covariance = Kernel("linear", s, 1.0).matrix(points, points)

    found = posterior(covariance, tensor(1.0, -1.0), num_iterations=200)

    v = 1 / (1 / s + 2 * omega)
    assert found.precision.tolist() == pytest.approx([omega, omega])
    assert found.mean.tolist() == pytest.approx([v, -v])
    assert found.variance.tolist() == pytest.approx([v, v])
    # Elsewhere, at z = 2, f = 2u.
    query = torch.tensor([[2.0]])
    kernel = Kernel("linear", s, 1.0)
    mean, variance = found.elsewhere(kernel.matrix(points, query), tensor(4 * s))
    assert float(mean) == pytest.approx(2 * v)
    assert float(variance) == pytest.approx(4 * v)


def brute_force(covariance: Tensor, signs: Tensor, precision: Tensor) -> Posterior:
    """Return mean and variance with inverse matrices, as the formulas are written."""
    inverse = np.linalg.inv(covariance.numpy()) + np.diag(precision.numpy())
    sigma = np.linalg.inv(inverse)
    mean = torch.from_numpy(sigma @ signs.numpy() / 2)
    variance = torch.from_numpy(np.diag(sigma).copy())
    return Posterior(signs, precision, covariance, mean, variance)


def test_the_posterior_is_that_of_the_inverse_matrices() -> None:
    covariance, signs = covariance_of(6), tensor(1, -1, 1, 1, 0, -1)
    precision = tensor(0.25, 0.1, 0.2, 0.05, 0, 0.15)
    expected = brute_force(covariance, signs, precision)
    found = posterior_given(covariance, signs, precision)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.variance, expected.variance)


def test_elsewhere_at_the_examples_is_the_posterior() -> None:
    covariance, signs = covariance_of(5), tensor(1, -1, 1, 0, -1)
    found = posterior(covariance, signs, num_iterations=5)
    mean, variance = found.elsewhere(covariance, covariance.diagonal())
    torch.testing.assert_close(mean, found.mean)
    torch.testing.assert_close(variance, found.variance)


def test_left_out_is_the_posterior_without_the_example() -> None:
    covariance, signs = covariance_of(5), tensor(1, -1, 1, -1, -1)
    found = posterior(covariance, signs, num_iterations=5)
    mean, variance = found.left_out()
    for place in range(5):
        kept = torch.arange(5) != place
        rest = posterior_given(covariance, signs * kept, found.precision * kept)
        assert float(mean[place]) == pytest.approx(float(rest.mean[place]))
        assert float(variance[place]) == pytest.approx(float(rest.variance[place]))


def test_more_iterations_change_nothing_once_it_has_converged() -> None:
    covariance, signs = covariance_of(12), tensor(*([1.0, -1.0, -1.0] * 4))
    expected = posterior(covariance, signs, num_iterations=100)
    found = posterior(covariance, signs, num_iterations=10)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-3, atol=1e-3)
    tilt = (expected.mean.square() + expected.variance).sqrt()
    torch.testing.assert_close(expected.precision, expected_polya_gamma(tilt))


@settings(max_examples=25, deadline=None)
@given(num_examples=st.integers(1, 8), copies=st.integers(1, 3), seed=st.integers(0, 9))
def test_repeated_examples_leave_it_defined(
    num_examples: int, copies: int, seed: int
) -> None:
    covariance = covariance_of(num_examples, seed).repeat(copies, copies)
    signs = torch.sign(torch.arange(num_examples * copies).double() % 3 - 1)
    found = posterior(covariance, signs, num_iterations=10)
    assert bool((found.variance > 0).all())
    assert bool((found.variance <= covariance.diagonal() + 1e-9).all())
    assert bool((found.precision <= 0.25).all())
    assert bool(torch.isfinite(found.mean).all())


def test_a_batch_is_its_problems() -> None:
    covariances = torch.stack([covariance_of(4, seed) for seed in (1, 2)])
    signs = torch.stack([tensor(1, -1, 0, 1), tensor(-1, 1, 1, 0)])
    together = posterior(covariances, signs, num_iterations=4)
    for place in range(2):
        alone = posterior(covariances[place], signs[place], num_iterations=4)
        torch.testing.assert_close(together.mean[place], alone.mean)
        torch.testing.assert_close(together.variance[place], alone.variance)


def test_what_is_not_finite_stays_so() -> None:
    covariance = covariance_of(3).clone()
    covariance[0, 0] = torch.nan
    assert bool(posterior(covariance, tensor(1, -1, 1), 2).mean.isnan().any())


@pytest.mark.parametrize(("mean", "variance"), [(0.7, 2.0), (-3.0, 0.5), (1.0, 9.0)])
def test_the_quadrature_is_the_integral(mean: float, variance: float) -> None:
    f = np.linspace(mean - 12 * variance**0.5, mean + 12 * variance**0.5, 200_001)
    density = (
        np.exp(-((f - mean) ** 2) / (2 * variance)) / (2 * np.pi * variance) ** 0.5
    )
    integral = np.trapezoid(density / (1 + np.exp(-f)), f)
    found = float(log_expected_sigmoid(tensor(mean), tensor(variance)))
    assert found == pytest.approx(math.log(integral), abs=3e-4)


def test_the_quadrature_at_its_limits() -> None:
    # Symmetric about 0: ½. Without variance: log σ. Far off: finite.
    found = log_expected_sigmoid(tensor(0, 1, -1e6), tensor(5, 0, 1))
    one = -math.log1p(math.exp(-1))
    assert found.tolist() == pytest.approx([math.log(0.5), one, -1e6], rel=1e-5)

"""ε of releases against `dp_accounting` itself, closed forms and bounds."""

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from knnper.privacy import (
    LOSS_INTERVAL,
    AccountantName,
    Release,
    default_delta,
    epsilon_of,
    noise_multiplier_for,
)

DELTA = 1e-5
# The example of Abadi et al. 2016 (q = 0.01, σ = 4, 10^4 steps), a short training with
# a large sample, and one without sampling.
TEXTBOOK = [Release(4.0, 0.01, 10_000), Release(1.0, 0.1, 200), Release(5.0, 1.0, 100)]


def of_the_package(
    release: Release, accountant: AccountantName, loss_interval: float = LOSS_INTERVAL
) -> float:
    event = dp_accounting.GaussianDpEvent(release.noise_multiplier)
    if release.sampling < 1:
        event = dp_accounting.PoissonSampledDpEvent(release.sampling, event)
    counter = (
        PLDAccountant(value_discretization_interval=loss_interval)
        if accountant == "pld"
        else RdpAccountant()
    )
    return float(counter.compose(event, release.count).get_epsilon(DELTA))


def delta_of_gaussian(noise_multiplier: float, epsilon: float) -> float:
    """Return δ of one release, Balle and Wang 2018, Theorem 5."""
    half, times = 1 / (2 * noise_multiplier), epsilon * noise_multiplier
    return float(norm.cdf(half - times) - math.exp(epsilon) * norm.cdf(-half - times))


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("release", TEXTBOOK)
def test_epsilon_is_that_of_the_package(
    release: Release, accountant: AccountantName
) -> None:
    expected = of_the_package(release, accountant)
    assert epsilon_of([release], DELTA, accountant) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("release", TEXTBOOK[:2])
def test_wider_steps_of_the_loss_keep_epsilon_an_upper_bound(release: Release) -> None:
    narrow = of_the_package(release, "pld", loss_interval=1e-4)
    assert narrow <= epsilon_of([release], DELTA) <= 1.03 * narrow


def test_the_example_of_abadi_et_al() -> None:
    # Section 5.1 of the paper: ε is about 1.26 by the moments accountant.
    assert epsilon_of([Release(4.0, 0.01, 10_000)], DELTA, "rdp") < 1.26


@pytest.mark.parametrize("noise_multiplier", [0.7, 1.0, 4.0])
def test_one_release_has_the_epsilon_of_the_closed_form(
    noise_multiplier: float,
) -> None:
    epsilon = epsilon_of([Release(noise_multiplier)], DELTA)
    assert delta_of_gaussian(noise_multiplier, epsilon) == pytest.approx(
        DELTA, rel=0.02
    )


def test_releases_of_different_kinds_are_composed() -> None:
    # Gaussian releases compose like one with the precisions added.
    together = [Release(5.0, count=3), Release(2.0)]
    as_one = Release((3 / 5.0**2 + 1 / 2.0**2) ** -0.5)
    expected = epsilon_of([as_one], DELTA)
    assert epsilon_of(together, DELTA) == pytest.approx(expected, abs=1e-9)
    of_distributions = of_the_package(as_one, "pld")
    assert expected <= of_distributions == pytest.approx(expected, abs=5e-3)


def test_without_noise_epsilon_is_infinite_and_without_releases_zero() -> None:
    assert epsilon_of([Release(0.0)], DELTA) == math.inf
    assert epsilon_of([], DELTA) == 0.0
    assert epsilon_of([Release(0.0, count=0)], DELTA) == 0.0


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0])
@pytest.mark.parametrize(("sampling", "count"), [(1.0, 1), (0.1, 100)])
def test_the_noise_spends_epsilon_and_no_more(
    epsilon: float, sampling: float, count: int
) -> None:
    noise_multiplier = noise_multiplier_for(
        epsilon, DELTA, sampling=sampling, count=count
    )
    spent = epsilon_of([Release(noise_multiplier, sampling, count)], DELTA)
    assert 0.97 * epsilon < spent <= epsilon


@pytest.mark.parametrize("num_units", [1, 10, 1000])
def test_delta_is_less_than_one_in_the_number_of_units(num_units: int) -> None:
    assert 0 < default_delta(num_units) < 1 / num_units

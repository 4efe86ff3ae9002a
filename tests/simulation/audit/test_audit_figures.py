import math

import numpy as np
import pytest
from scipy.stats import binom

from knnper.seeding import RandomKey
from knnper.simulation.audit.figures import (
    area_under_curve,
    median,
    membership_result,
    proportion,
    true_positive_rate,
)


def test_proportion_has_the_exact_interval() -> None:
    interval = proportion(3, 10)
    assert interval.value == 0.3
    # At the ends of the interval, 3 or more and 3 or fewer have a probability of 2.5 %.
    assert binom.sf(2, 10, interval.low) == pytest.approx(0.025)
    assert binom.cdf(3, 10, interval.high) == pytest.approx(0.025)


def test_proportion_at_an_extreme_has_an_interval_with_a_width() -> None:
    interval = proportion(0, 10)
    assert interval.low == 0
    assert interval.high == pytest.approx(1 - 0.025 ** (1 / 10))
    assert proportion(10, 10).low == pytest.approx(1 - interval.high)


def test_median_has_the_interval_of_order_statistics() -> None:
    # P[Binomial(16, 1/2) <= 3] = 1.1 %, and <= 4 it is 3.8 %.
    interval = median(np.arange(16.0)[::-1])
    assert (interval.value, interval.low, interval.high) == (7.5, 3, 12)
    assert median(np.array([5.0])).high == 5


def test_area_counts_ties_half() -> None:
    # Pairs: 3 > 1, 3 > 2, 2 > 1, and the tie 2 = 2.
    area = area_under_curve(np.array([3.0, 2.0]), np.array([1.0, 2.0]))
    assert area.value == pytest.approx(3.5 / 4)


def test_area_without_errors_has_an_interval_with_a_width() -> None:
    area = area_under_curve(np.arange(20.0, 40.0), np.arange(20.0))
    assert area.value == 1
    assert area.high == pytest.approx(1)
    assert 0.8 < area.low < 0.99
    mirrored = area_under_curve(np.arange(20.0), np.arange(20.0, 40.0))
    assert mirrored.high == pytest.approx(1 - area.low)


@pytest.mark.parametrize("shift", [0.0, 1.0, 2.5])
def test_area_interval_covers_the_true_area(shift: float) -> None:
    generator = RandomKey(0, ("coverage",)).numpy()
    # P[N(shift, 1) > N(0, 1)]
    true_area = 0.5 * (1 + math.erf(shift / 2))
    covered = 0
    for _ in range(400):
        members = generator.normal(shift, 1, 60)
        area = area_under_curve(members, generator.normal(0, 1, 40))
        covered += area.low <= true_area <= area.high
    assert covered >= 0.92 * 400


def test_true_positive_rate_allows_the_false_positives_of_the_rate() -> None:
    others = np.arange(200.0)  # at 1 %, two may lie above the threshold: 198 and 199
    members = np.array([197.0, 197.5, 199.0, 50.0])
    assert true_positive_rate(members, others, 0.01).value == 0.5
    # At 0.1 % of 200, none may.
    assert true_positive_rate(members, others, 0.001).value == 0


def test_membership_result_of_noise_is_chance() -> None:
    generator = RandomKey(1, ("noise",)).numpy()
    scores, is_member = generator.normal(size=1000), np.arange(1000) < 500
    result = membership_result("lira", "model", scores, is_member)
    area = result.figures["auc"]
    assert area.low < 0.5 < area.high
    assert result.samples == {"members": 500, "others": 500}

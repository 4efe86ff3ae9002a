import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.simulation.reports.runs import Estimate, estimate


def test_three_values_by_hand() -> None:
    # s = 0.1, and Student's table has 4.3027 for 2 degrees of freedom.
    found = estimate([0.8, 0.9, 0.7])
    assert found.mean == pytest.approx(0.8)
    assert found.std == pytest.approx(0.1)
    assert found.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert found.count == 3


def test_two_values_by_hand() -> None:
    # s = √2, s / √2 = 1, and Student's table has 12.706 for 1 degree of freedom.
    assert estimate([1.0, 3.0]).half_width == pytest.approx(12.7062, rel=1e-5)


def test_one_value_has_no_interval() -> None:
    assert estimate([None, 0.5]) == Estimate(0.5, None, None, 1)
    assert estimate([None]) == Estimate(None, None, None, 0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9))
def test_a_shift_moves_the_mean_alone(values: list[float]) -> None:
    found, moved = estimate(values), estimate(value + 1 for value in values)
    assert moved.mean == pytest.approx((found.mean or 0.0) + 1)
    assert moved.half_width == pytest.approx(found.half_width, abs=1e-9)

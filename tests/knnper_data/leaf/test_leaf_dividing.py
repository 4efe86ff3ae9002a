import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.data.dividing import DividingSettings, mark_tested


@pytest.mark.parametrize(
    ("count", "fraction", "expected"),
    [
        (0, 0.2, 0),
        (1, 0.2, 0),
        (1, 0.9, 0),
        (2, 0.2, 0),
        (2, 0.99, 1),
        (3, 0.2, 1),
        (10, 0.2, 2),
        (10, 0.0, 0),
        (10, 0.99, 9),
    ],
)
@pytest.mark.parametrize("split", ["random", "time"])
def test_how_many_are_tested_on(
    count: int, fraction: float, expected: int, split: str
) -> None:
    chosen = DividingSettings(test_fraction=fraction, split=split)  # type: ignore[arg-type]
    mask = mark_tested(count, "someone", chosen)
    assert mask.shape == (count,)
    assert mask.sum() == expected


def test_with_time_the_last_are_tested_on() -> None:
    mask = mark_tested(5, "someone", DividingSettings(test_fraction=0.4, split="time"))
    assert mask.tolist() == [False, False, False, True, True]


def test_the_choice_depends_on_seed_and_user_alone() -> None:
    first = mark_tested(50, "someone", DividingSettings())
    np.testing.assert_array_equal(mark_tested(50, "someone", DividingSettings()), first)
    assert (mark_tested(50, "another", DividingSettings()) != first).any()
    assert (mark_tested(50, "someone", DividingSettings(seed=1)) != first).any()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200), st.floats(0, 0.999))
def test_one_is_left_to_train_on(count: int, fraction: float) -> None:
    mask = mark_tested(count, "someone", DividingSettings(test_fraction=fraction))
    assert (~mask).sum() >= 1
    assert abs(mask.sum() - fraction * count) <= 1

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.experiment import TrainingSettings
from knnper.strategies.core.records import ModelState
from knnper.strategies.fedtrimmedavg import (
    FedTrimmedAvg,
    FedTrimmedAvgSettings,
    trimmed_at_each_end,
)
from tests.strategies.small_updates import random_updates, updates
from tests.strategies.trained_methods import MakeTask

BEFORE = ModelState(torch.zeros(2))
FIVE = updates(
    [1.0, 9.0],
    [2.0, 8.0],
    [3.0, -99.0],
    [6.0, 1.0],
    [99.0, 0.0],
    examples=[9, 1, 1, 1, 1],
)


def test_the_extremes_of_each_weight_are_left_out(linear_task: MakeTask) -> None:
    task = linear_task(TrainingSettings())
    # ⌊0.2 · 5⌋ = 1 at each end: (2 + 3 + 6) / 3 and (0 + 1 + 8) / 3.
    one = FedTrimmedAvg(task, FedTrimmedAvgSettings(0.2))
    assert one.aggregate(BEFORE, iter(FIVE)).weights.tolist() == pytest.approx(
        [11 / 3, 3]
    )
    # ⌊0.4 · 5⌋ = 2: the medians.
    two = FedTrimmedAvg(task, FedTrimmedAvgSettings(0.4))
    assert two.aggregate(BEFORE, iter(FIVE)).weights.tolist() == [3, 1]


def test_nothing_trimmed_is_the_plain_mean(normed_task: MakeTask) -> None:
    task = normed_task(TrainingSettings())
    held = random_updates(6, task.model.num_weights, seed=2)
    mean = torch.stack([one.weights for _, one in held]).double().mean(dim=0).float()
    # ⌊0.1 · 6⌋ = 0 too.
    for fraction in (0.0, 0.1):
        method = FedTrimmedAvg(task, FedTrimmedAvgSettings(fraction))
        after = method.aggregate(ModelState(task.initial_weights), iter(held))
        torch.testing.assert_close(after.weights, mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("fraction", "num_values", "expected"),
    # As floats 0.29 · 100 is 28.999... and 0.28 · 25 is 7.000...1.
    [(0.29, 100, 29), (0.28, 25, 7), (0.2, 4, 0), (0.25, 4, 1), (0.4999999999, 2, 0)],
)
def test_how_many_are_trimmed(fraction: float, num_values: int, expected: int) -> None:
    assert trimmed_at_each_end(fraction, num_values) == expected


def test_flower_trims_as_many(linear_task: MakeTask) -> None:
    method = FedTrimmedAvg(linear_task(TrainingSettings()), FedTrimmedAvgSettings(0.29))
    # 29 attackers of 100: with 28 left out one of 10^6 would show.
    attacked = updates(*([1e6, 1.0] if i < 29 else [1.0, 1.0] for i in range(100)))
    assert method.aggregate(BEFORE, iter(attacked)).weights.tolist() == [1, 1]


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 0.4999999), st.integers(1, 60))
def test_something_is_always_left(fraction: float, num_values: int) -> None:
    num_trimmed = trimmed_at_each_end(fraction, num_values)
    assert 0 <= 2 * num_trimmed < num_values
    # What Flower makes of the fraction that it is given.
    assert int((num_trimmed + 0.25) / num_values * num_values) == num_trimmed
    assert (num_trimmed + 0.25) / num_values < 0.5

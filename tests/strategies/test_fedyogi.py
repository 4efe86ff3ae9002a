import pytest

from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.fedyogi import FedYogi, FedYogiSettings
from tests.strategies.small_updates import updates
from tests.strategies.trained_methods import MakeTask


def test_two_rounds_by_hand(linear_task: MakeTask, key: RandomKey) -> None:
    settings = FedYogiSettings(
        server_learning_rate=2.0,
        first_moment_decay=0.5,
        second_moment_decay=0.5,
        adaptivity=1.0,
    )
    method = FedYogi(linear_task(TrainingSettings()), settings)
    state = method.init(("a",), key)
    assert state.second_moment.tolist() == [1, 1]
    # Δ = (4, ½): m = (2, ¼). Δ² = 16 is above v = 1, which grows: 1 + ½ · 16 = 9.
    # Δ² = ¼ is below: 1 - ½ · ¼ = 0.875. x = 2 (2, ¼) / ((3, √0.875) + 1).
    state = method.aggregate(state, iter(updates([4.0, 0.5])))
    assert state.momentum.tolist() == [2, 0.25]
    assert state.second_moment.tolist() == [9, 0.875]
    assert state.weights.tolist() == pytest.approx([1, 0.5 / (0.875**0.5 + 1)])
    # Δ = (1, 0): m = (1½, ⅛), v = (9 - ½, 0.875).
    second = updates([2.0, float(state.weights[1])])
    state = method.aggregate(state, iter(second))
    assert state.momentum.tolist() == [1.5, 0.125]
    assert state.second_moment.tolist() == [8.5, 0.875]
    assert float(state.weights[0]) == pytest.approx(1 + 3 / (8.5**0.5 + 1))


def test_the_second_moment_begins_with_the_square(
    linear_task: MakeTask, key: RandomKey
) -> None:
    method = FedYogi(linear_task(TrainingSettings()), FedYogiSettings(adaptivity=0.5))
    assert method.init(("a",), key).second_moment.tolist() == [0.25, 0.25]

import pytest

from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.fedadagrad import FedAdagrad, FedAdagradSettings
from tests.strategies.small_updates import updates
from tests.strategies.trained_methods import MakeTask


def test_two_rounds_by_hand(linear_task: MakeTask, key: RandomKey) -> None:
    settings = FedAdagradSettings(server_learning_rate=2.0, adaptivity=3.0)
    method = FedAdagrad(linear_task(TrainingSettings()), settings)
    state = method.init(("a",), key)
    assert state.second_moment.tolist() == [9, 9]
    # The mean is (¼ · 16, 0) = (4, 0); v = 9 + (16, 0), x = 2 · 4 / (5 + 3) = 1.
    first = updates([16.0, 0.0], [0.0, 0.0], examples=[1, 3])
    state = method.aggregate(state, iter(first))
    assert state.second_moment.tolist() == [25, 9]
    assert state.weights.tolist() == [1, 0]
    # Δ = (-12, 4): v = (25 + 144, 9 + 16), x += 2 (-12, 4) / ((13, 5) + 3).
    state = method.aggregate(state, iter(updates([-11.0, 4.0])))
    assert state.second_moment.tolist() == [169, 25]
    assert state.weights.tolist() == pytest.approx([1 - 1.5, 1])

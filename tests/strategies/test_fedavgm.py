import pytest
import torch

from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import NoSettings
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.fedavgm import FedAvgM, FedAvgMSettings, FedAvgMState
from tests.strategies.small_updates import updates
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds


def test_two_rounds_by_hand(linear_task: MakeTask, key: RandomKey) -> None:
    method = FedAvgM(linear_task(TrainingSettings()), FedAvgMSettings(1.0, 0.5))
    state = method.init(("a",), key)
    # The mean by examples is (¼ · 4 + 0, ¼ · 8 + 0) = (1, 2); Δ = (0, 0) - (1, 2).
    first = updates([4.0, 8.0], [0.0, 0.0], examples=[1, 3])
    state = method.aggregate(state, iter(first))
    assert state.momentum.tolist() == [-1, -2]
    assert state.weights.tolist() == [1, 2]
    # Δ = (1, 2) - (2, 2); v = ½ (-1, -2) + (-1, 0) = (-1½, -1); w = (1, 2) - v.
    state = method.aggregate(state, iter(updates([2.0, 2.0])))
    assert state.momentum.tolist() == [-1.5, -1]
    assert state.weights.tolist() == [2.5, 3]


def test_the_rate_scales_the_step(linear_task: MakeTask) -> None:
    method = FedAvgM(linear_task(TrainingSettings()), FedAvgMSettings(0.25, 0.0))
    state = FedAvgMState(torch.tensor([4.0, 0.0]), torch.zeros(2))
    # 4 + ¼ (8 - 4) = 5 and 0 + ¼ (-8 - 0) = -2.
    stepped = method.aggregate(state, iter(updates([8.0, -8.0])))
    assert stepped.weights.tolist() == [5, -2]


def test_without_momentum_at_rate_1_it_is_fedavg(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
) -> None:
    task = normed_task(TrainingSettings(batch_size=3, learning_rate=0.1))
    clients = {name: noisy(5 + i, 0, seed=i) for i, name in enumerate("abc")}
    plain, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds=3)
    found, _ = run_rounds(FedAvgM(task, FedAvgMSettings(1.0, 0.0)), clients, 3)
    assert torch.equal(found.weights, plain.weights)
    moving, _ = run_rounds(FedAvgM(task, FedAvgMSettings(1.0, 0.5)), clients, 3)
    assert not torch.equal(moving.weights, plain.weights)


@pytest.mark.parametrize("rate", [0.5, 10.0])
def test_buffers_take_the_mean(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds, rate: float
) -> None:
    task = normed_task(TrainingSettings(learning_rate=0.1))
    clients = {name: noisy(5 + i, 0, seed=i) for i, name in enumerate("abc")}
    plain, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds=1)
    found, _ = run_rounds(FedAvgM(task, FedAvgMSettings(rate, 0.9)), clients, 1)
    num_parameters = task.model.num_parameters
    buffers, expected = found.weights[num_parameters:], plain.weights[num_parameters:]
    assert len(buffers) == 8
    assert torch.equal(buffers, expected)
    assert not torch.equal(found.weights, plain.weights)

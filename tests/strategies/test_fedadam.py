from collections.abc import Callable

import pytest
import torch

from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, NoSettings
from knnper.strategies.core.task import Task
from knnper.strategies.fedadagrad import FedAdagrad, FedAdagradSettings
from knnper.strategies.fedadam import FedAdam, FedAdamSettings, MomentState
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.fedyogi import FedYogi, FedYogiSettings
from tests.strategies.small_updates import updates
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds

Build = Callable[[Task], Method]

SETTINGS = FedAdamSettings(
    server_learning_rate=2.0,
    first_moment_decay=0.5,
    second_moment_decay=0.5,
    adaptivity=1.0,
)


def test_two_rounds_by_hand(linear_task: MakeTask, key: RandomKey) -> None:
    method = FedAdam(linear_task(TrainingSettings()), SETTINGS)
    state = method.init(("a",), key)
    # The mean, and Δ, are (½ · 2 + 0, ½ · -14 + 0) = (1, -7). m = ½ Δ = (½, -3½),
    # v = ½ τ² + ½ (1, 49) = (1, 25), x = 2 m / (√v + 1) = (1 / 2, -7 / 6).
    first = updates([2.0, -14.0], [0.0, 0.0], examples=[2, 2])
    state = method.aggregate(state, iter(first))
    assert state.momentum.tolist() == [0.5, -3.5]
    assert state.second_moment.tolist() == [1, 25]
    assert state.weights.tolist() == pytest.approx([0.5, -7 / 6])
    # Δ = (1½ - ½, 0) = (1, 0); m = (¼ + ½, -1¾), v = (½ + ½, 12½);
    # x += 2 (¾, -1¾) / ((1, 3.53553) + 1) = (¾, -3½ / 4.53553).
    second = updates([1.5, float(state.weights[1])])
    state = method.aggregate(state, iter(second))
    assert state.momentum.tolist() == [0.75, -1.75]
    assert state.second_moment.tolist() == pytest.approx([1, 12.5])
    assert state.weights.tolist() == pytest.approx([1.25, -7 / 6 - 3.5 / 4.535534])


def test_every_rate_is_without_flowers_correction(linear_task: MakeTask) -> None:
    nearly_one = FedAdamSettings(second_moment_decay=1 - 1e-15)
    method = FedAdam(linear_task(TrainingSettings()), nearly_one)
    state = MomentState(torch.zeros(2), torch.zeros(2), torch.ones(2))
    # m = 0.1 · 10, v = 1 but for 10^-13: x = 0.1 · 1 / (1 + 10^-3).
    stepped = method.aggregate(state, iter(updates([10.0, 0.0])))
    assert stepped.weights.tolist() == pytest.approx([0.1 / 1.001, 0])


@pytest.mark.parametrize(
    "build",
    [
        lambda task: FedAdam(task, FedAdamSettings()),
        lambda task: FedYogi(task, FedYogiSettings()),
        lambda task: FedAdagrad(task, FedAdagradSettings()),
    ],
)
def test_buffers_take_the_mean(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds, build: Build
) -> None:
    task = normed_task(TrainingSettings(learning_rate=0.1))
    clients = {name: noisy(5 + i, 0, seed=i) for i, name in enumerate("abc")}
    plain, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds=1)
    found, _ = run_rounds(build(task), clients, num_rounds=1)
    num_parameters = task.model.num_parameters
    assert torch.equal(found.weights[num_parameters:], plain.weights[num_parameters:])
    moved = found.weights[:num_parameters] != task.initial_weights[:num_parameters]
    assert moved.float().mean() > 0.9
    assert not torch.equal(found.weights, plain.weights)


def test_the_second_moment_begins_with_the_square(
    linear_task: MakeTask, key: RandomKey
) -> None:
    method = FedAdam(linear_task(TrainingSettings()), FedAdamSettings(adaptivity=0.5))
    assert method.init(("a",), key).second_moment.tolist() == [0.25, 0.25]

"""FedAdagrad, FedAdam, FedAvgM and FedYogi: server steps by hand."""

import pytest
import torch

from knnper.strategies.fedadam import (
    FedAdagrad,
    FedAdagradSettings,
    FedAdam,
    FedAdamSettings,
    FedYogi,
    FedYogiSettings,
    MomentState,
)
from knnper.strategies.fedavgm import FedAvgM, FedAvgMSettings, FedAvgMState
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    of_name,
    run_rounds,
    updates,
)


def test_fedadagrad_two_rounds_by_hand() -> None:
    settings = FedAdagradSettings(server_learning_rate=2.0, adaptivity=3.0)
    method = FedAdagrad(linear_task(), settings)
    state = method.init(("a",), KEY)
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


SETTINGS = FedAdamSettings(
    server_learning_rate=2.0,
    first_moment_decay=0.5,
    second_moment_decay=0.5,
    adaptivity=1.0,
)


def test_fedadam_two_rounds_by_hand() -> None:
    method = FedAdam(linear_task(), SETTINGS)
    state = method.init(("a",), KEY)
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


def test_every_rate_is_without_flowers_correction() -> None:
    nearly_one = FedAdamSettings(second_moment_decay=1 - 1e-15)
    method = FedAdam(linear_task(), nearly_one)
    state = MomentState(torch.zeros(2), torch.zeros(2), torch.ones(2))
    # m = 0.1 · 10, v = 1 but for 10^-13: x = 0.1 · 1 / (1 + 10^-3).
    stepped = method.aggregate(state, iter(updates([10.0, 0.0])))
    assert stepped.weights.tolist() == pytest.approx([0.1 / 1.001, 0])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedadagrad", {}),
        ("fedadam", {}),
        ("fedavgm", {"server_learning_rate": 0.5}),
        ("fedavgm", {"server_learning_rate": 10.0}),
        ("fedyogi", {}),
    ],
)
def test_buffers_take_the_mean(name: str, settings: dict[str, float]) -> None:
    task = normed_task(learning_rate=0.1)
    clients = {client: noisy(5 + i, 0, seed=i) for i, client in enumerate("abc")}
    plain, _ = run_rounds(of_name("fedavg", task), clients, 1)
    method = of_name(name, task, **settings)
    found, _ = run_rounds(method, clients, num_rounds=1)
    number = task.model.num_parameters
    assert len(found.weights[number:]) == 8
    assert torch.equal(found.weights[number:], plain.weights[number:])
    moved = found.weights[:number] != task.initial_weights[:number]
    assert moved.float().mean() > 0.9
    assert not torch.equal(found.weights, plain.weights)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_the_second_moment_begins_with_the_square(name: str) -> None:
    method = of_name(name, linear_task(), adaptivity=0.5)
    assert method.init(("a",), KEY).second_moment.tolist() == [0.25, 0.25]


def test_fedavgm_two_rounds_by_hand() -> None:
    method = FedAvgM(linear_task(), FedAvgMSettings(1.0, 0.5))
    state = method.init(("a",), KEY)
    # The mean by examples is (¼ · 4 + 0, ¼ · 8 + 0) = (1, 2); Δ = (0, 0) - (1, 2).
    first = updates([4.0, 8.0], [0.0, 0.0], examples=[1, 3])
    state = method.aggregate(state, iter(first))
    assert state.momentum.tolist() == [-1, -2]
    assert state.weights.tolist() == [1, 2]
    # Δ = (1, 2) - (2, 2); v = ½ (-1, -2) + (-1, 0) = (-1½, -1); w = (1, 2) - v.
    state = method.aggregate(state, iter(updates([2.0, 2.0])))
    assert state.momentum.tolist() == [-1.5, -1]
    assert state.weights.tolist() == [2.5, 3]


def test_the_rate_scales_the_step() -> None:
    method = FedAvgM(linear_task(), FedAvgMSettings(0.25, 0.0))
    state = FedAvgMState(torch.tensor([4.0, 0.0]), torch.zeros(2))
    # 4 + ¼ (8 - 4) = 5 and 0 + ¼ (-8 - 0) = -2.
    stepped = method.aggregate(state, iter(updates([8.0, -8.0])))
    assert stepped.weights.tolist() == [5, -2]


def test_fedyogi_two_rounds_by_hand() -> None:
    settings = FedYogiSettings(
        server_learning_rate=2.0,
        first_moment_decay=0.5,
        second_moment_decay=0.5,
        adaptivity=1.0,
    )
    method = FedYogi(linear_task(), settings)
    state = method.init(("a",), KEY)
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

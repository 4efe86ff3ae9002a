"""Server steps by hand, and server halves against Flower's strategies."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    ArrayRecord,
    Message,
    MessageType,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.app.message import make_message
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy.fedopt import FedOpt
from torch import Tensor

from knnper.seeding import RandomKey
from knnper.strategies.core import averaging
from knnper.strategies.core.averaging import (
    mean_around_median,
    median,
    squared_distances,
    trimmed_mean,
)
from knnper.strategies.core.method import Method
from knnper.strategies.core.records import ModelState, ModelUpdate
from knnper.strategies.fedadam import MomentState
from knnper.strategies.fedavgm import FedAvgMState
from knnper.strategies.qfedavg import fair_terms
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    of_name,
    on_a_line,
    random_updates,
    run_rounds,
    updates,
)


def test_fedadagrad_two_rounds_by_hand() -> None:
    settings = {"server_learning_rate": 2.0, "adaptivity": 3.0}
    method = of_name("fedadagrad", linear_task(), **settings)
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


SETTINGS = {
    "server_learning_rate": 2.0,
    "first_moment_decay": 0.5,
    "second_moment_decay": 0.5,
    "adaptivity": 1.0,
}


def test_fedadam_two_rounds_by_hand() -> None:
    method = of_name("fedadam", linear_task(), **SETTINGS)
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
    method = of_name("fedadam", linear_task(), second_moment_decay=1 - 1e-15)
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
    method = of_name("fedavgm", linear_task(), server_momentum=0.5)
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
    method = of_name(
        "fedavgm", linear_task(), server_learning_rate=0.25, server_momentum=0.0
    )
    state = FedAvgMState(torch.tensor([4.0, 0.0]), torch.zeros(2))
    # 4 + ¼ (8 - 4) = 5 and 0 + ¼ (-8 - 0) = -2.
    stepped = method.aggregate(state, iter(updates([8.0, -8.0])))
    assert stepped.weights.tolist() == [5, -2]


def test_fedyogi_two_rounds_by_hand() -> None:
    method = of_name("fedyogi", linear_task(), **SETTINGS)
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


HELD = random_updates(9, 50, seed=1)

WEIGHTS = torch.linspace(-1, 1, 50)


def replies(updates: list[ModelUpdate], losses: list[float]) -> list[Message]:
    """Return updates as Flower's own clients send them: float32, in several arrays."""
    metadata = Metadata(1, "", 2, 1, "", "", 0.0, 9.0, MessageType.TRAIN)
    messages = []
    for update, loss in zip(updates, losses, strict=True):
        metrics = MetricRecord(
            {"num-examples": update.num_examples, "train_loss": loss}
        )
        content = RecordDict({"model": arrays_of(update.weights), "metrics": metrics})
        messages.append(make_message(metadata, content))
    return messages


def arrays_of(weights: Tensor) -> ArrayRecord:
    return ArrayRecord([part.numpy() for part in torch.split(weights, 20)])


def put_together(arrays: ArrayRecord | None) -> Tensor:
    assert arrays is not None
    parts = [array.astype(np.float32) for array in arrays.to_numpy_ndarrays()]
    return torch.from_numpy(np.concatenate(parts))


def assert_close(found: Tensor, arrays: ArrayRecord | None) -> None:
    """Assert that Flower came to the same in float32."""
    torch.testing.assert_close(found, put_together(arrays), rtol=2e-5, atol=2e-6)


def plain(updates: list[ModelUpdate]) -> list[Message]:
    return replies(updates, [0.5] * len(updates))


@pytest.mark.parametrize(
    ("name", "settings", "flowers"),
    [
        ("fedmedian", {}, flower.FedMedian()),
        ("fedtrimmedavg", {"trimmed_fraction": 0.2}, flower.FedTrimmedAvg(beta=0.2)),
        ("krum", {"num_malicious": 2}, flower.Krum(num_malicious_nodes=2)),
        (
            "multikrum",
            {"num_malicious": 2, "num_selected": 4},
            flower.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=4),
        ),
    ],
)
def test_robust_rules_are_flowers(
    name: str,
    settings: dict[str, Any],
    flowers: flower.FedMedian | flower.FedTrimmedAvg | flower.MultiKrum,
) -> None:
    arrays, _ = flowers.aggregate_train(1, plain([update for _, update in HELD]))
    method = of_name(name, linear_task(), **settings)
    assert_close(method.aggregate(ModelState(WEIGHTS), iter(HELD)).weights, arrays)


def test_the_second_phase_of_bulyan_is_flowers() -> None:
    def best(contents: list[RecordDict], _: int, num_selected: int) -> list[RecordDict]:
        return contents[:num_selected]

    held = [update for _, update in HELD]
    flowers = flower.Bulyan(num_malicious_nodes=1, selection_rule=best)
    arrays, _ = flowers.aggregate_train(1, plain(held))
    # n = 9, θ = 7, β = 5.
    assert_close(mean_around_median(held[:7], 5), arrays)


def states(
    method: Method, key: RandomKey, num_rounds: int, **start: Tensor
) -> Iterator[tuple[ModelUpdate, Any]]:
    """Yield a round's only update, and the server's state after it."""
    state = replace(method.init(("a",), key), **start)
    for name, update in random_updates(num_rounds, 2, seed=2):
        state = method.aggregate(state, iter([(name, update)]))
        yield update, state


def test_three_rounds_of_momentum_are_flowers() -> None:
    settings = {"server_learning_rate": 0.7, "server_momentum": 0.9}
    method = of_name("fedavgm", linear_task(), **settings)
    strategy = flower.FedAvgM(server_learning_rate=0.7, server_momentum=0.9)
    strategy.current_arrays = arrays_of(method.init(("a",), KEY).weights)
    for update, state in states(method, KEY, 3):
        arrays, _ = strategy.aggregate_train(1, plain([update]))
        assert_close(state.weights, arrays)


MOMENTS = {
    "server_learning_rate": 0.3,
    "first_moment_decay": 0.9,
    "second_moment_decay": 0.7,
    "adaptivity": 0.1,
}


@pytest.mark.parametrize(
    ("name", "settings", "strategy"),
    [
        (
            "fedadagrad",
            {"server_learning_rate": 0.3, "adaptivity": 0.1},
            flower.FedAdagrad(eta=0.3, tau=0.1),
        ),
        (
            "fedyogi",
            MOMENTS,
            flower.FedYogi(eta=0.3, beta_1=0.9, beta_2=0.7, tau=0.1),
        ),
        ("fedadam", MOMENTS, flower.FedAdam(eta=0.3, beta_1=0.9, beta_2=0.7, tau=0.1)),
    ],
)
def test_three_rounds_of_an_adaptive_optimizer_are_flowers(
    name: str, settings: dict[str, float], strategy: FedOpt
) -> None:
    method = of_name(name, linear_task(), **settings)
    weights = method.init(("a",), KEY).weights
    # From v = 0, as Flower starts; in a late round, where FedAdam corrects nothing.
    for update, state in states(method, KEY, 3, second_moment=torch.zeros(2)):
        strategy.current_arrays = {"0": weights.numpy()}
        arrays, _ = strategy.aggregate_train(10**6, plain([update]))
        weights = state.weights
        assert_close(weights, arrays)


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
def test_folded_terms_are_flowers_qfedavg(q: float) -> None:
    held, losses = [update for _, update in HELD[:3]], [0.1, 0.2, 0.4]
    strategy = flower.QFedAvg(client_learning_rate=0.25, q=q)
    strategy.current_arrays = arrays_of(WEIGHTS)
    arrays, _ = strategy.aggregate_train(1, replies(held, losses))
    deltas, all_h = [], []
    for one, loss in zip(held, losses, strict=True):
        delta, h = fair_terms(WEIGHTS, one.weights, q=q, lipschitz=4.0, loss=loss)
        deltas.append(delta)
        all_h.append(h)
    found = (WEIGHTS - torch.stack(deltas).sum(dim=0) / sum(all_h)).float()
    assert_close(found, arrays)


def test_slices_are_put_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [update for _, update in HELD]

    def all_of_them() -> list[Tensor]:
        distances = torch.from_numpy(squared_distances(held)).float()
        rules = median(held), trimmed_mean(held, 3), mean_around_median(held, 4)
        return [*rules, distances]

    whole = all_of_them()
    monkeypatch.setattr(averaging, "_SLICE", 7)
    for found, expected in zip(all_of_them(), whole, strict=True):
        torch.testing.assert_close(found, expected)


def test_of_equally_close_values_the_first_counts() -> None:
    held = [update for _, update in on_a_line(0, 2, 1, 1, 9)]
    assert mean_around_median(held, 3)[0] == pytest.approx(2 / 3)


def test_flower_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, knnper.strategies.catalogue; sys.exit('flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

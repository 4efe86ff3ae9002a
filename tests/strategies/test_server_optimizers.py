"""Server steps by hand, and server halves against Flower's strategies."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
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
from tests.fresh_process import run_fresh
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
    state, _ = run_rounds(method, clients, num_rounds=1)
    number = task.model.num_parameters
    assert len(state.weights[number:]) == 8
    assert torch.equal(state.weights[number:], plain.weights[number:])
    moved = state.weights[:number] != task.initial_weights[:number]
    assert moved.float().mean() > 0.9
    assert not torch.equal(state.weights, plain.weights)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_the_second_moment_begins_with_the_square(name: str) -> None:
    method = of_name(name, linear_task(), adaptivity=0.5)
    assert method.init(("a",), KEY).second_moment.tolist() == [0.25, 0.25]


def test_fedavgm_two_rounds_by_hand() -> None:
    settings = {"server_learning_rate": 0.5, "server_momentum": 0.5}
    method = of_name("fedavgm", linear_task(), **settings)
    state = method.init(("a",), KEY)
    # The mean by examples is (¼ · 4 + 0, ¼ · 8 + 0) = (1, 2); Δ = (0, 0) - (1, 2).
    first = updates([4.0, 8.0], [0.0, 0.0], examples=[1, 3])
    state = method.aggregate(state, iter(first))
    assert state.momentum.tolist() == [-1, -2]
    assert state.weights.tolist() == [0.5, 1]
    # Δ = (½, 1) - (1½, 1); v = ½ (-1, -2) + (-1, 0) = (-1½, -1); w = (½, 1) - ½ v.
    state = method.aggregate(state, iter(updates([1.5, 1.0])))
    assert state.momentum.tolist() == [-1.5, -1]
    assert state.weights.tolist() == [1.25, 1.5]


HELD = random_updates(9, 50, seed=1)

WEIGHTS = torch.linspace(-1, 1, 50)


def replies(updates: list[ModelUpdate]) -> list[Message]:
    """Return updates as Flower's own clients send them: float32, in several arrays."""
    metadata = Metadata(1, "", 2, 1, "", "", 0.0, 9.0, MessageType.TRAIN)
    messages = []
    for update in updates:
        metrics = MetricRecord({"num-examples": update.num_examples})
        content = RecordDict({"model": arrays_of(update.weights), "metrics": metrics})
        messages.append(make_message(metadata, content))
    return messages


def arrays_of(weights: Tensor) -> ArrayRecord:
    return ArrayRecord([part.numpy() for part in torch.split(weights, 20)])


def assert_close(weights: Tensor, arrays: ArrayRecord | None) -> None:
    """Assert that Flower came to the same in float32."""
    assert arrays is not None
    parts = [array.astype(np.float32) for array in arrays.to_numpy_ndarrays()]
    flowers = torch.from_numpy(np.concatenate(parts))
    torch.testing.assert_close(weights, flowers, rtol=2e-5, atol=2e-6)


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
    arrays, _ = flowers.aggregate_train(1, replies([update for _, update in HELD]))
    method = of_name(name, linear_task(), **settings)
    assert_close(method.aggregate(ModelState(WEIGHTS), iter(HELD)).weights, arrays)


def states(
    method: Method, key: RandomKey, num_rounds: int, **start: Tensor
) -> Iterator[tuple[ModelUpdate, Any]]:
    """Yield a round's only update, and the server's state after it."""
    state = replace(method.init(("a",), key), **start)
    for name, update in random_updates(num_rounds, 2, seed=2):
        state = method.aggregate(state, iter([(name, update)]))
        yield update, state


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
    rounds = list(states(method, KEY, 3, second_moment=torch.zeros(2)))
    assert len(rounds) == 3
    for update, state in rounds:
        strategy.current_arrays = {"0": weights.numpy()}
        arrays, _ = strategy.aggregate_train(10**6, replies([update]))
        weights = state.weights
        assert_close(weights, arrays)


def test_slices_are_put_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [update for _, update in HELD]

    def all_of_them() -> list[Tensor]:
        distances = torch.from_numpy(squared_distances(held)).float()
        rules = median(held), trimmed_mean(held, 3), mean_around_median(held, 4)
        return [*rules, distances]

    whole = all_of_them()
    assert len(whole) == 4
    monkeypatch.setattr(averaging, "_SLICE", 7)
    for part, expected in zip(all_of_them(), whole, strict=True):
        torch.testing.assert_close(part, expected)


def test_of_equally_close_values_the_first_counts() -> None:
    held = [update for _, update in on_a_line(0, 2, 1, 1, 9)]
    assert mean_around_median(held, 3)[0] == pytest.approx(2 / 3)


def test_what_takes_long_is_not_imported_before_it_is_needed(tmp_path: Path) -> None:
    code = (
        "import sys, knnper.strategies.catalogue\n"
        "sys.exit(not sys.modules.keys().isdisjoint({'flwr', 'scipy.optimize'}))"
    )
    assert run_fresh(code, tmp_path).returncode == 0

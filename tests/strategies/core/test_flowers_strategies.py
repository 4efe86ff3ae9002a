"""Server halves against Flower's strategies, driven as Flower drives them."""

import subprocess
import sys
from collections.abc import Callable, Iterator
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
from knnper.strategies.core.method import Method, NoSettings
from knnper.strategies.core.records import ModelState, ModelUpdate
from knnper.strategies.core.task import Task
from knnper.strategies.fedadam import (
    FedAdagrad,
    FedAdagradSettings,
    FedAdam,
    FedAdamSettings,
    FedYogi,
    FedYogiSettings,
)
from knnper.strategies.fedavgm import FedAvgM, FedAvgMSettings
from knnper.strategies.fedtrimmedavg import (
    FedMedian,
    FedTrimmedAvg,
    FedTrimmedAvgSettings,
)
from knnper.strategies.krum import Krum, KrumSettings, MultiKrum, MultiKrumSettings
from knnper.strategies.qfedavg import fair_terms
from tests.strategies.tiny import KEY, linear_task, on_a_line, random_updates

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
    ("build", "flowers"),
    [
        (lambda task: FedMedian(task, NoSettings()), flower.FedMedian()),
        (
            lambda task: FedTrimmedAvg(task, FedTrimmedAvgSettings(0.2)),
            flower.FedTrimmedAvg(beta=0.2),
        ),
        (lambda task: Krum(task, KrumSettings(2)), flower.Krum(num_malicious_nodes=2)),
        (
            lambda task: MultiKrum(task, MultiKrumSettings(2, num_selected=4)),
            flower.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=4),
        ),
    ],
)
def test_robust_rules_are_flowers(
    build: Callable[[Task], Method],
    flowers: flower.FedMedian | flower.FedTrimmedAvg | flower.MultiKrum,
) -> None:
    arrays, _ = flowers.aggregate_train(1, plain([update for _, update in HELD]))
    method = build(linear_task())
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
    settings = FedAvgMSettings(server_learning_rate=0.7, server_momentum=0.9)
    method = FedAvgM(linear_task(), settings)
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
    ("build", "strategy"),
    [
        (
            lambda task: FedAdagrad(
                task, FedAdagradSettings(server_learning_rate=0.3, adaptivity=0.1)
            ),
            flower.FedAdagrad(eta=0.3, tau=0.1),
        ),
        (
            lambda task: FedYogi(task, FedYogiSettings(**MOMENTS)),
            flower.FedYogi(eta=0.3, beta_1=0.9, beta_2=0.7, tau=0.1),
        ),
        (
            lambda task: FedAdam(task, FedAdamSettings(**MOMENTS)),
            flower.FedAdam(eta=0.3, beta_1=0.9, beta_2=0.7, tau=0.1),
        ),
    ],
)
def test_three_rounds_of_an_adaptive_optimizer_are_flowers(
    build: Callable[[Task], Method], strategy: FedOpt
) -> None:
    method = build(linear_task())
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

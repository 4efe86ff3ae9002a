"""The adapter against Flower's strategies, driven as Flower drives them."""

import logging
import subprocess
import sys
from collections.abc import Callable

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
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
)
from flwr.serverapp.strategy.fedopt import FedOpt
from torch import Tensor

from knnper.errors import RunError
from knnper.strategies.bulyan import iterated_krum
from knnper.strategies.core import server_optimizer as flower_aggregation
from knnper.strategies.core.records import ModelUpdate
from knnper.strategies.core.server_optimizer import (
    AdaptiveStep,
    Moments,
    adagrad,
    adam,
    bulyan,
    fair_terms,
    median,
    momentum_step,
    multikrum,
    trimmed_mean,
    yogi,
)
from knnper.strategies.krum import lowest
from tests.strategies.small_updates import random_updates

HELD = [update for _, update in random_updates(9, 50, seed=1)]
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
    ("ours", "flowers"),
    [
        (lambda: median(HELD), FedMedian()),
        (lambda: trimmed_mean(HELD, 0.2), FedTrimmedAvg(beta=0.2)),
        (
            lambda: multikrum(HELD, lambda distances: lowest(distances, 2)[:1]),
            Krum(num_malicious_nodes=2),
        ),
        (
            lambda: multikrum(HELD, lambda distances: lowest(distances, 2)[:4]),
            MultiKrum(num_malicious_nodes=2, num_nodes_to_select=4),
        ),
    ],
)
def test_robust_rules_are_flowers(
    ours: Callable[[], Tensor],
    flowers: FedMedian | FedTrimmedAvg | MultiKrum,
) -> None:
    arrays, _ = flowers.aggregate_train(1, plain(HELD))
    assert_close(ours(), arrays)


def test_three_rounds_of_momentum_are_flowers() -> None:
    strategy = FedAvgM(server_learning_rate=0.7, server_momentum=0.9)
    strategy.current_arrays = arrays_of(WEIGHTS)
    weights, momentum = WEIGHTS, torch.zeros(50)
    for one in HELD[:3]:
        arrays, _ = strategy.aggregate_train(1, plain([one]))
        weights, momentum = momentum_step(
            weights, one.weights, momentum, learning_rate=0.7, decay=0.9
        )
        assert_close(weights, arrays)


@pytest.mark.parametrize(
    ("step", "strategy"),
    [
        (adagrad(eta=0.3, tau=0.1), FedAdagrad(eta=0.3, tau=0.1)),
        (
            yogi(eta=0.3, beta_1=0.9, beta_2=0.7, tau=0.1),
            FedYogi(eta=0.3, beta_1=0.9, beta_2=0.7, tau=0.1),
        ),
        (
            adam(eta=0.3, beta_1=0.9, beta_2=0.7, tau=0.1),
            FedAdam(eta=0.3, beta_1=0.9, beta_2=0.7, tau=0.1),
        ),
    ],
)
def test_three_rounds_of_an_adaptive_optimizer_are_flowers(
    step: AdaptiveStep, strategy: FedOpt
) -> None:
    # From v = 0, as Flower starts; in a late round, where FedAdam corrects nothing.
    now = Moments(WEIGHTS, torch.zeros(50), torch.zeros(50))
    for one in HELD[:3]:
        parts = torch.split(now.parameters, 20)
        strategy.current_arrays = {str(i): part.numpy() for i, part in enumerate(parts)}
        arrays, _ = strategy.aggregate_train(10**6, plain([one]))
        now = step(now, one.weights)
        assert_close(now.parameters, arrays)


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
def test_folded_terms_are_flowers_qfedavg(q: float) -> None:
    held, losses = HELD[:3], [0.1, 0.2, 0.4]
    strategy = QFedAvg(client_learning_rate=0.25, q=q)
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
    whole = median(HELD), trimmed_mean(HELD, 0.3)
    monkeypatch.setattr(flower_aggregation, "_SLICE", 7)
    assert torch.equal(median(HELD), whole[0])
    assert torch.equal(trimmed_mean(HELD, 0.3), whole[1])


def test_nothing_that_is_given_is_changed() -> None:
    trained, momentum = WEIGHTS.double() + 1, torch.ones(50)
    marks = [tensor.clone() for tensor in (WEIGHTS, trained, momentum)]
    fair_terms(WEIGHTS, trained, q=1.0, lipschitz=2.0, loss=3.0)
    momentum_step(WEIGHTS, trained, momentum, learning_rate=0.5, decay=0.5)
    step = adam(eta=0.3, beta_1=0.9, beta_2=0.7, tau=0.1)
    step(Moments(WEIGHTS, momentum, momentum), trained)
    for tensor, mark in zip((WEIGHTS, trained, momentum), marks, strict=True):
        assert torch.equal(tensor, mark)


def test_a_step_can_be_made_again() -> None:
    step = yogi(eta=0.3, beta_1=0.9, beta_2=0.7, tau=0.1)
    before = Moments(WEIGHTS, torch.ones(50), torch.ones(50))
    first, second = (step(before, HELD[0].weights) for _ in range(2))
    assert torch.equal(first.parameters, second.parameters)
    assert torch.equal(first.momentum, second.momentum)


def test_no_model_is_an_error() -> None:
    def select(distances: object) -> list[int]:
        return iterated_krum(np.zeros((3, 3)), 0)

    with pytest.raises(RunError, match="Flower's Bulyan made no model of 3 updates"):
        bulyan(HELD[:3], 1, select)


def test_flowers_count_of_replies_is_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("flwr")
    monkeypatch.setattr(log, "propagate", True)
    with caplog.at_level(logging.DEBUG, logger="flwr"):
        median(HELD)
        log.info("what others say")
        assert caplog.messages == ["what others say"]
        with pytest.raises(RunError):
            bulyan(HELD[:3], 1, lambda distances: [])
        assert "Insufficient replies" in caplog.messages[1]
    assert log.filters == []


def test_flower_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, knnper.strategies.catalogue; sys.exit('flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

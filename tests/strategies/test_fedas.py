"""FedAS on one feature: two rounds by hand, and what the Fisher traces are of."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from knnper.experiment import TrainingSettings
from knnper.strategies.core.records import ModelPayload, ModelState
from knnper.strategies.fedas import FedAS, FedASSettings, FedASUpdate
from knnper.strategies.fedper import FedPer, FedPerSettings
from tests.strategies.tiny import (
    KEY,
    noisy,
    normed_task,
    one_model_of,
    run_rounds,
    two_weights_task,
    white,
)

HALF = TrainingSettings(learning_rate=0.5)
NORMED = TrainingSettings(num_rounds=3, batch_size=3, learning_rate=0.1, momentum=0.5)
PLAIN = FedASSettings(alignment_learning_rate=0.0, client_weights="size")
CLIENTS = {"a": white([0, 0, 0]), "b": white([1, 1, 0])}


def slopes(a: float, b: float, labels: Sequence[int]) -> tuple[float, float]:
    """Return ∂/∂a and ∂/∂b of the mean loss log(1 + exp(∓2ab))."""
    signs = [1 - 2 * label for label in labels]
    shared = [-2 * sign / (1 + math.exp(2 * sign * a * b)) for sign in signs]
    mean = sum(shared) / len(shared)
    return b * mean, a * mean


def trained(a: float, b: float, labels: Sequence[int]) -> tuple[float, float, float]:
    """Return a and b after a step at the rate ½, and the squared slopes there."""
    of_a, of_b = slopes(a, b, labels)
    a, b = a - 0.5 * of_a, b - 0.5 * of_b
    return a, b, sum(slope**2 for slope in slopes(a, b, labels))


def test_two_rounds_by_hand() -> None:
    method = FedAS(two_weights_task(HALF, a=1, b=1), FedASSettings(0.1))
    first, memory = run_rounds(method, CLIENTS, num_rounds=1)
    labels = {"a": [0, 0, 0], "b": [1, 1, 0]}
    local = {name: trained(1, 1, labels[name]) for name in "ab"}
    for name, (a, b, _) in local.items():
        assert memory[name].weights.tolist() == pytest.approx([a, b], abs=1e-6)
    total = sum(fisher for *_, fisher in local.values())
    body = sum(fisher * a for a, _, fisher in local.values()) / total
    # The head of the server stays the initial one.
    assert first.weights.tolist() == pytest.approx([body, 1], abs=1e-6)
    second, memory = run_rounds(method, CLIENTS, num_rounds=2)
    # Embeddings are a. One step at the rate 0.1 along the gradient of (a - a_i)², once
    # for each class that the client has: one, and two.
    later = {
        name: trained(body - 0.1 * classes * 2 * (body - a), b, labels[name])
        for (name, (a, b, _)), classes in zip(local.items(), (1, 2), strict=True)
    }
    for name, (a, b, _) in later.items():
        assert memory[name].weights.tolist() == pytest.approx([a, b], abs=1e-6)
    total = sum(fisher for *_, fisher in later.values())
    body = sum(fisher * a for a, _, fisher in later.values()) / total
    assert second.weights.tolist() == pytest.approx([body, 1], abs=1e-6)


def test_the_trace_is_a_sum_over_mini_batches_of_what_was_not_clipped() -> None:
    training = replace(HALF, batch_size=2, clip_norm=0.01)
    method = FedAS(two_weights_task(training, a=1, b=1), FedASSettings())
    payload, data = ModelPayload(torch.ones(2)), white([0, 0, 0, 0])
    kept, update = method.client_update(payload, None, data, 1, KEY)
    # Two steps of the length ½ · 0.01 along (1, 1).
    each = 1 + 0.01 / math.sqrt(2)
    assert kept.weights.tolist() == pytest.approx([each, each])
    expected = 2 * sum(slope**2 for slope in slopes(each, each, [0]))
    assert update.fisher == pytest.approx(expected, rel=1e-5)


def test_without_its_two_parts_its_rounds_are_fedpers() -> None:
    task = normed_task(NORMED)
    clients = {name: noisy(5 + i, 2, seed=i) for i, name in enumerate("abc")}
    fedper = FedPer(task, FedPerSettings())
    expected, memory = run_rounds(fedper, clients, num_rounds=3)
    state, kept = run_rounds(FedAS(task, PLAIN), clients, num_rounds=3)
    assert torch.equal(state.weights, expected.weights)
    for name, part in memory.items():
        assert torch.equal(kept[name].weights[task.head_mask], part.personal)
    for settings in (
        replace(PLAIN, alignment_learning_rate=0.1),
        replace(PLAIN, client_weights="fisher"),
    ):
        other, _ = run_rounds(FedAS(task, settings), clients, num_rounds=3)
        assert not torch.equal(other.weights, expected.weights)
    # Who was never drawn trains a head on the last body, as with FedPer.
    payload, data = ModelPayload(state.weights), noisy(6, 2, seed=9)
    served = one_model_of(FedAS(task, PLAIN), payload, None, data)
    fedper_model = one_model_of(fedper, payload, None, data)
    assert torch.equal(served.weights, fedper_model.weights)


def test_a_client_is_served_the_model_of_its_last_round() -> None:
    method = FedAS(two_weights_task(HALF, a=1, b=1), FedASSettings())
    payload, local = ModelPayload(torch.ones(2)), ModelState(torch.tensor([3.0, 4.0]))
    seen = one_model_of(method, payload, local, white([0], [1]))
    assert torch.equal(seen.weights, local.weights)
    nobody = one_model_of(method, payload, local, white([]))
    assert torch.equal(nobody.weights, payload.weights)


def update(body: float, fisher: float, size: int = 1) -> FedASUpdate:
    return FedASUpdate(torch.tensor([body]), size, 0.5, fisher)


def test_traces_are_weights_and_must_be_finite() -> None:
    method = FedAS(two_weights_task(HALF, a=1, b=1), FedASSettings())
    state = method.init(("a", "b"), KEY)
    learnt = {"a": update(1.0, 3.0), "b": update(5.0, 1.0, size=9)}
    assert method.aggregate(state, learnt.items()).weights.tolist() == [2, 1]
    by_heart = {"a": update(1.0, 0.0), "b": update(5.0, 0.0, size=9)}
    assert method.aggregate(state, by_heart.items()).weights.tolist() == [3, 1]
    payload = method.broadcast(state, "a", KEY)
    assert method.update_problem(payload, learnt["a"]) is None
    for wrong in (-1.0, math.inf, math.nan):
        assert "finite number" in str(method.update_problem(payload, update(1, wrong)))

"""APFL: by hand, at both ends of α, and with an α that is learned."""

from typing import Any

import pytest
import torch
from torch import nn

from knnper.data.examples import ClientData
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.apfl import Apfl, ApflClientState, ApflSettings, mixed
from knnper.strategies.core.method import UNSEEN_CLIENT, Method
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    run_rounds,
    white,
)

SIGMA_1 = 0.7310586  # σ(1), p(0) where the logits are (½, -½)
SIGMA_34 = 0.6791787  # σ(¾), p(0) where the logits are (⅜, -⅜)

EVERYTHING = TrainingSettings(
    batch_size=3, learning_rate=0.1, momentum=0.9, weight_decay=0.01, num_rounds=3
)


def with_dropout(task: Task) -> Task:
    """Let the model draw random numbers in training."""
    features = task.model.module.features
    assert isinstance(features, nn.Sequential)
    features.append(nn.Dropout(0.5))
    return task


def served(method: Method, state: Any, memory: Any, data: ClientData) -> ModelPredictor:
    payload = method.broadcast(state, UNSEEN_CLIENT, RandomKey(5))
    return one_model_of(method, payload, memory, data, RandomKey(6))


def test_two_rounds_by_hand() -> None:
    task = linear_task(learning_rate=1.0)
    method = Apfl(task, ApflSettings(mixing_weight=0.5))
    clients = {"a": white([0])}
    state, memory = run_rounds(method, clients, num_rounds=1)
    # At v = w = 0 the gradient is (-½, ½): w steps by ½, v by α times that.
    assert state.weights.tolist() == [0.5, -0.5]
    assert memory["a"].personal.tolist() == [0.25, -0.25]
    # Served: ½ · ¼ + ½ · ½.
    assert served(method, state, memory["a"], clients["a"]).weights[0] == 0.375
    state, memory = run_rounds(method, clients, num_rounds=2)
    # w ← ½ + (1 - σ(1)); v̄ = ⅜, so v ← ¼ + ½ (1 - σ(¾)).
    assert float(state.weights[0]) == pytest.approx(0.5 + 1 - SIGMA_1, abs=1e-6)
    expected = 0.25 + 0.5 * (1 - SIGMA_34)
    assert float(memory["a"].personal[0]) == pytest.approx(expected, abs=1e-6)
    assert memory["a"].mixing_weight == 0.5


def test_the_mixing_weight_follows_its_gradient() -> None:
    task = linear_task(learning_rate=1.0)
    method = Apfl(task, ApflSettings(mixing_weight=0.5, adaptive=True))
    _, memory = run_rounds(method, {"a": white([0])}, num_rounds=1)
    assert memory["a"].mixing_weight == 0.5  # v - w was 0
    _, memory = run_rounds(method, {"a": white([0])}, num_rounds=2)
    # v - w = (-¼, ¼) and ∇f(v̄) = (σ(¾) - 1, 1 - σ(¾)): their product is
    # ½ (1 - σ(¾)), and the rate is 1.
    expected = 0.5 - 0.5 * (1 - SIGMA_34)
    assert memory["a"].mixing_weight == pytest.approx(expected, abs=1e-6)
    # v steps by the α from before the step, ½: v ← ¼ + ½ (1 - σ(¾)).
    personal = 0.25 + 0.5 * (1 - SIGMA_34)
    assert float(memory["a"].personal[0]) == pytest.approx(personal, abs=1e-6)


@pytest.mark.parametrize(("personal", "expected"), [(9.0, 1.0), (-9.0, 0.0)])
def test_the_mixing_weight_stays_in_the_unit_interval(
    personal: float, expected: float
) -> None:
    task = linear_task(learning_rate=50.0)
    method = Apfl(task, ApflSettings(adaptive=True))
    start = ApflClientState(torch.tensor([personal, -personal]), 0.001)
    # Label 0 pulls to where v - w points, or away from it.
    after, _ = method.client_update(
        ModelPayload(torch.zeros(2)), start, white([0]), 1, RandomKey(1)
    )
    assert after.mixing_weight == expected


def test_a_personal_model_alone_is_local() -> None:
    task, data = with_dropout(normed_task(EVERYTHING)), noisy(8, 0, seed=1)
    payload = ModelPayload(task.initial_weights)
    alone = of_name("local", task).personalize(payload, None, data, KEY)
    method = Apfl(task, ApflSettings(mixing_weight=1.0))
    memory = None
    for server_round in (1, 2, 3):
        rng = KEY.child("round", server_round)  # as Local draws its mini-batches
        memory, _ = method.client_update(payload, memory, data, server_round, rng)
        payload = ModelPayload(task.fresh_weights(rng))  # other clients' doing
    assert isinstance(alone, ModelPredictor)
    assert memory is not None
    assert torch.equal(memory.personal, alone.weights)
    predictor = one_model_of(method, payload, memory, data)
    assert torch.equal(predictor.weights, alone.weights)


@pytest.mark.parametrize("mixing_weight", [0.0, 0.1, 0.9, 1.0])
def test_buffers_are_collected_at_the_parameters_that_are_served(
    mixing_weight: float,
) -> None:
    task = normed_task(EVERYTHING)
    clients = {name: noisy(9, 0, seed=i) for i, name in enumerate("ab")}
    method = Apfl(task, ApflSettings(mixing_weight))
    state, memory = run_rounds(method, clients, num_rounds=2)
    weights = served(method, state, memory["a"], clients["a"]).weights
    shared, personal, cut = (
        state.weights,
        memory["a"].personal,
        task.model.num_parameters,
    )
    assert not torch.equal(personal[cut:], shared[cut:])
    assert torch.equal(weights[cut:], (personal if mixing_weight else shared)[cut:])
    expected = mixed(shared[:cut], personal[:cut], mixing_weight)
    assert torch.equal(weights[:cut], expected)


def test_the_shared_model_is_fixed() -> None:
    task = linear_task(learning_rate=1.0)
    method = Apfl(task, ApflSettings(mixing_weight=0.5, unseen_epochs=1))
    state = method.init(("a",), RandomKey(1))
    predictor = served(method, state, None, white([0]))
    # v = ½ · ½, and v̄ = ½ v + ½ · 0.
    assert predictor.weights.tolist() == [0.125, -0.125]
    assert predictor.describe() == {"mixing_weight": 0.5}


def test_the_mixture_is_exact_where_it_must_be() -> None:
    first, second = torch.tensor([0.1, 1e-8, 3e7]), torch.tensor([0.3, 1.0, -3e7])
    assert torch.equal(mixed(first, second, 1.0), second)
    for share in (0.1, 0.3, 0.7, 0.9):
        assert torch.equal(mixed(first, first, share), first)

"""FedBABU: a round by hand, a head that never moves, and what is fine-tuned."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from knnper.experiment import (
    MultiStepSchedule,
    TrainingSettings,
)
from knnper.flat_model import FlatModel
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.fedbabu import FedBABU, FedBABUSettings
from tests.strategies.tiny import (
    FOUR_PIXELS,
    KEY,
    NormedModel,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    run_rounds,
    sigmoid,
    topped,
    two_weights_task,
    white,
)

SIGMA_1 = 0.26894142  # σ(-1)

TRAINING = TrainingSettings(
    num_rounds=3, batch_size=3, learning_rate=0.1, momentum=0.5, weight_decay=0.01
)
CLIENTS = {name: noisy(5 + i, 2, seed=i) for i, name in enumerate("abc")}


def test_first_round_by_hand() -> None:
    training = TrainingSettings(learning_rate=0.5, local_epochs=2)
    method = of_name("fedbabu", two_weights_task(training, a=1, b=1))
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, memory = run_rounds(method, clients, num_rounds=1)
    # Logits (ab, -ab), b = 1 in both steps. Label 0: ∂loss/∂a = -2 σ(-2a), label 1: 2
    # σ(2a).
    up, down = 1 + sigmoid(-2), 1 - sigmoid(2)
    expected = 0.75 * (up + sigmoid(-2 * up)) + 0.25 * (down - sigmoid(2 * down))
    assert state.weights.tolist() == pytest.approx([expected, 1], abs=1e-6)
    assert dataclasses.asdict(memory["a"]) == {}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1 + 0.05 * SIGMA_1, 0.5 + 0.1 * SIGMA_1]),
        ({"fine_tuned": "head"}, [1, 0.5 + 0.1 * SIGMA_1]),
        ({"fine_tuned": "body"}, [1 + 0.05 * SIGMA_1, 0.5]),
        ({"fine_tuning_learning_rate": 1.0}, [1 + SIGMA_1, 0.5 + 2 * SIGMA_1]),
        ({"fine_tuning_epochs": 0}, [1, 0.5]),
    ],
)
def test_fine_tuning_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    schedule = MultiStepSchedule(milestones=(2,))  # 0.05 in the last round
    training = TrainingSettings(num_rounds=3, learning_rate=0.5, schedule=schedule)
    task = two_weights_task(training, a=1, b=1)
    chosen = FedBABUSettings(**{"fine_tuning_epochs": 1} | settings)
    payload = ModelPayload(torch.tensor([1, 0.5]))
    served = one_model_of(FedBABU(task, chosen), payload, None, white([0]))
    # ∂a = -2b σ(-2ab) = -σ(-1), ∂b = -2a σ(-2ab) = -2 σ(-1).
    assert served.weights.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_head_stays_as_it_was_drawn() -> None:
    task = normed_task(TRAINING)
    state, _ = run_rounds(of_name("fedbabu", task), CLIENTS, num_rounds=3)
    moved = state.weights != task.initial_weights
    assert not bool(moved[task.head_mask].any())
    assert bool(moved[~task.head_mask].any())


def test_served_is_what_fine_tuning_makes_of_the_same_model() -> None:
    task, payload = normed_task(TRAINING), ModelPayload(normed_task().initial_weights)
    for on_top, part in (("fine_tuning", "all"), ("linear_probe", "head")):
        method = of_name("fedbabu", task, fine_tuned=part, fine_tuning_epochs=4)
        model = one_model_of(method, payload, None, CLIENTS["a"])
        probe = topped(on_top, task, num_epochs=4)
        expected = one_model_of(probe, payload, None, CLIENTS["a"])
        assert torch.equal(model.weights, expected.weights)
        alone = model.without_validation().weights
        assert torch.equal(alone, expected.without_validation().weights)


def test_with_an_empty_head_it_is_fedavg() -> None:
    with KEY.torch():
        module = NormedModel(FOUR_PIXELS)
        module.features = nn.Sequential(module.features, nn.Conv2d(4, 3, 1))
        module.embedding_dim, module.classifier = 3, nn.Identity()
        model = FlatModel(module)
    normed = normed_task(TRAINING)
    task = dataclasses.replace(normed, model=model, initial_weights=model.read())
    expected, _ = run_rounds(of_name("fedavg", task), CLIENTS, num_rounds=3)
    state, _ = run_rounds(of_name("fedbabu", task), CLIENTS, num_rounds=3)
    assert torch.equal(state.weights, expected.weights)

"""FedProto on one feature z = a x with logits (b z, -b z): rounds by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from knnper.data.examples import ClientData, Examples
from knnper.experiment import TrainingSettings
from knnper.strategies.core.records import ModelState
from knnper.strategies.fedproto import (
    FedProto,
    FedProtoSettings,
    FedProtoUpdate,
    GlobalPrototypes,
    nearest_prototype,
)
from tests.strategies.tiny import (
    KEY,
    run_rounds,
    text_task,
    two_weights_task,
    white,
)

SIGMA_2 = 0.11920292  # σ(-2)
HALF = TrainingSettings(num_rounds=1, learning_rate=0.5)


def method_of(training: TrainingSettings = HALF, **settings: Any) -> FedProto:
    return FedProto(two_weights_task(training, a=1, b=1), FedProtoSettings(**settings))


def test_the_first_round_by_hand() -> None:
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, memory = run_rounds(method_of(), clients, num_rounds=1)
    # No class has a prototype yet. Label 0: ∂a = ∂b = -2σ(-2); label 1: 2 (1 - σ(-2)).
    # Then z = a.
    assert memory["a"].weights.tolist() == pytest.approx([1 + SIGMA_2] * 2, abs=1e-6)
    assert memory["b"].weights.tolist() == pytest.approx([SIGMA_2] * 2, abs=1e-6)
    assert state.known.tolist() == [1, 1]
    expected = [1 + SIGMA_2, SIGMA_2]
    assert state.means.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_a_later_round_by_hand() -> None:
    # Class 1 has no prototype: its examples are not pulled to the 0 that stands there.
    payload = GlobalPrototypes(torch.tensor([[2.0], [0.0]]), torch.tensor([1.0, 0.0]))
    memory = ModelState(torch.tensor([1.0, 1.0]))
    method = method_of(prototype_weight=0.25)
    after, update = method.client_update(payload, memory, white([0, 1]), 2, KEY)
    # The labels: ∂a = ∂b = ½ (-2σ(-2) + 2 (1 - σ(-2))). The prototype: ½ · 2λ (a - 2).
    of_labels = 1 - 2 * SIGMA_2
    expected = [1 - 0.5 * (of_labels - 0.25), 1 - 0.5 * of_labels]
    assert after.weights.tolist() == pytest.approx(expected, abs=1e-6)
    assert update.means.flatten().tolist() == pytest.approx([expected[0]] * 2, abs=1e-6)
    assert update.shares.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("weights", "first"), [("size", 2.0), ("equal", 3.0)])
def test_the_mean_of_prototypes_by_hand(weights: str, first: float) -> None:
    method = method_of(client_weights=weights)
    of_a = FedProtoUpdate(torch.tensor([[1.0], [0]]), torch.tensor([1.0, 0]), 6, 0.5)
    of_b = FedProtoUpdate(torch.tensor([[5.0], [7]]), torch.tensor([0.5, 0.5]), 4, 0.5)
    before = GlobalPrototypes(torch.tensor([[9.0], [8.0]]), torch.tensor([0.0, 1.0]))
    after = method.aggregate(before, iter([("a", of_a), ("b", of_b)]))
    # By size: (6 · 1 + 2 · 5) / 8.
    assert after.means.flatten().tolist() == [first, 7.0]
    assert after.known.tolist() == [1.0, 1.0]
    # A class that nobody has keeps what it had.
    alone = method.aggregate(before, iter([("a", of_a)]))
    assert alone.means.flatten().tolist() == [1.0, 8.0]
    assert alone.known.tolist() == [1.0, 1.0]


def test_the_nearest_known_prototype_is_predicted() -> None:
    means = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 1.0]])
    prototypes = GlobalPrototypes(means, torch.tensor([1.0, 1.0, 0.0]))
    probabilities = nearest_prototype(
        prototypes, torch.tensor([[1.0, 1.0], [3.0, 4.0]])
    )
    # Squared distances 2 and 13, then 25 and 0; the third class is not known.
    rows = [[1 / (1 + math.exp(-11)), 1 / (1 + math.exp(11)), 0.0], [0.0, 1.0, 0.0]]
    torch.testing.assert_close(probabilities, torch.tensor(rows), atol=1e-6, rtol=1e-5)
    assert nearest_prototype(prototypes, torch.empty(0, 2)).shape == (0, 3)


def test_what_predicts_is_chosen() -> None:
    payload = GlobalPrototypes(torch.tensor([[0.0], [2.0]]), torch.ones(2))
    memory, data = ModelState(torch.tensor([2.0, 1.0])), white([0])
    # z = 2 is class 1's prototype; the head is for class 0, with logits (2, -2).
    for prediction, right in (("prototype", 4.0), ("head", -4.0)):
        method = method_of(prediction=prediction)
        served = method.personalize(payload, memory, data, KEY)
        expected = torch.tensor(right).sigmoid().item()
        assert served(data.train.images)[0, 1].item() == pytest.approx(expected)
        assert served.without_validation() is served
    nothing = GlobalPrototypes(torch.zeros(2, 1), torch.zeros(2))
    rows = method_of().personalize(nothing, memory, data, KEY)(data.train.images)
    # Without a prototype there is the head alone.
    assert rows[0, 1].item() == pytest.approx(expected)


def test_an_unseen_client_trains_as_long_as_the_others_towards_the_prototypes() -> None:
    payload = GlobalPrototypes(torch.tensor([[2.0], [0.0]]), torch.tensor([1.0, 0.0]))
    two = replace(HALF, num_rounds=2)
    data = white([0, 0])
    for training, settings in ((two, {}), (HALF, {"unseen_rounds": 2})):
        method = method_of(training, prototype_weight=0.25, **settings)
        served = method.personalize(payload, None, data, KEY)
        memory: Any = None
        for number in (1, 2):
            rng = KEY.child("round", number)
            memory, _ = method.client_update(payload, memory, data, number, rng)
        assert torch.equal(served.weights, memory.weights)
        assert not torch.equal(served.weights, method.task.initial_weights)


def test_shares_that_are_none_are_refused() -> None:
    method = method_of()
    state = method.init(("a",), KEY)
    _, update = method.client_update(state, None, white([0, 1]), 1, KEY)
    assert method.update_problem(state, update) is None
    for wrong in ([-0.5, 1.0], [1.0, 1.0], [math.nan, 0.5]):
        changed = replace(update, shares=torch.tensor(wrong))
        problem = method.update_problem(state, changed)
        assert problem is not None
        assert problem.startswith("shares: expected parts of 1")


@pytest.mark.parametrize("all_positions", [True, False])
def test_text_is_learned_by_the_models_own_loss(all_positions: bool) -> None:
    task = text_task(all_positions=all_positions, local_steps=1, learning_rate=0.5)
    method = FedProto(task, FedProtoSettings(prototype_weight=0.0))
    windows = (torch.arange(10) % 4).to(torch.uint8).view(2, 1, 1, 5)
    data = ClientData(Examples(windows, torch.tensor([1, 2])), white([]).validation)
    state = method.init(("a",), KEY)
    memory, _ = method.client_update(state, None, data, 1, KEY)
    expected = method.train(task.initial_weights, data.train, 0.5, KEY)
    assert torch.equal(memory.weights, expected.weights)

"""FedALA on one feature: how far the global head replaces a client's own, by hand."""

from dataclasses import replace

import pytest
import torch

from knnper.data.examples import ClientData
from knnper.experiment import TrainingSettings
from knnper.strategies import fedala
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.sharing import PersonalPart
from knnper.strategies.fedala import FedALA, FedALAClientState, FedALASettings
from knnper.strategies.fedper import FedPer, FedPerSettings
from tests.strategies.tiny import (
    KEY,
    noisy,
    normed_task,
    one_model_of,
    run_rounds,
    sigmoid,
    two_weights_task,
    white,
)

HALF = TrainingSettings(learning_rate=0.5)
NORMED = TrainingSettings(num_rounds=3, batch_size=3, learning_rate=0.1, momentum=0.5)


def kept(own: float, aggregation: float | None) -> FedALAClientState:
    learnt = None if aggregation is None else torch.tensor([aggregation])
    return FedALAClientState(torch.tensor([own]), learnt)


def test_two_rounds_by_hand() -> None:
    task = two_weights_task(HALF, a=1, b=1)
    method = FedALA(task, FedALASettings(aggregation_learning_rate=0.25, max_epochs=1))
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    first, memory = run_rounds(method, clients, num_rounds=1)
    # FedAvg's: see the personal layers. The clients' a and b, 1 + σ(-2) and σ(-2), are
    # in the mean with weights ¾ and ¼.
    shared, local = 0.75 + sigmoid(-2), sigmoid(-2)
    assert first.weights.tolist() == pytest.approx([shared, shared], abs=1e-6)
    assert memory["a"].own.tolist() == pytest.approx([1 + local], abs=1e-6)
    assert memory["b"].own.tolist() == pytest.approx([local], abs=1e-6)
    assert memory["b"].aggregation is None
    second, memory = run_rounds(method, clients, num_rounds=2)
    # Logits (ab, -ab). Client a has label 0: ∂loss/∂b = -2a σ(-2ab), and b of the
    # server is lower than its own by ¼, so W falls; b starts at own - ¼ W.
    slope_a = -2 * shared * sigmoid(-2 * shared**2) * (shared - 1 - local)
    mixed_a = 1 + local + (shared - 1 - local) * (1 - 0.25 * slope_a)
    # Client b has label 1: ∂loss/∂b = 2a σ(2ab), and its own is lower by ¾.
    slope_b = 2 * shared * sigmoid(2 * shared**2) * (shared - local)
    mixed_b = local + (shared - local) * (1 - 0.25 * slope_b)
    assert memory["a"].aggregation.tolist() == pytest.approx([1 - 0.25 * slope_a])
    assert memory["b"].aggregation.tolist() == pytest.approx([1 - 0.25 * slope_b])
    # Local training: one step at the rate ½ from a = shared and the mixed b.
    pull_a, pull_b = sigmoid(-2 * shared * mixed_a), sigmoid(2 * shared * mixed_b)
    heads = mixed_a + shared * pull_a, mixed_b - shared * pull_b
    bodies = shared + mixed_a * pull_a, shared - mixed_b * pull_b
    expected = [0.75 * body + 0.25 * head for body, head in (bodies, heads)]
    assert second.weights.tolist() == pytest.approx(expected, abs=1e-6)
    assert memory["b"].own.tolist() == pytest.approx([heads[1]], abs=1e-6)


@pytest.mark.parametrize(
    ("rate", "label", "before", "expected"),
    [
        (0.025, 1, 0.5, 0.5 - 0.025 * 4 * 2 * sigmoid(2 * 2)),  # at b = 0 + 4 · ½
        (5.0, 1, 0.5, 0.0),
        (5.0, 0, 0.5, 1.0),
    ],
)
def test_a_step_on_the_aggregation_is_clipped(
    rate: float, label: int, before: float, expected: float
) -> None:
    task = two_weights_task(HALF, a=1, b=1)
    method = FedALA(task, FedALASettings(aggregation_learning_rate=rate))
    payload, data = ModelPayload(torch.tensor([1.0, 4.0])), white([label])
    after, _ = method.client_update(payload, kept(0.0, before), data, 2, KEY)
    assert after.aggregation is not None
    # ∂loss/∂b = ±2 σ(±2b) with a = 1, times the difference of 4.
    assert after.aggregation.tolist() == pytest.approx([expected], abs=1e-6)


def test_the_first_time_it_is_trained_until_the_losses_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainings: list[tuple[int, float]] = []
    task = replace(
        two_weights_task(replace(HALF, batch_size=2), a=1, b=1),
        on_trained=lambda *done: trainings.append(done),
    )

    def passes(state: FedALAClientState, max_epochs: int) -> int:
        trainings.clear()
        settings = FedALASettings(sample_fraction=0.5, max_epochs=max_epochs)
        data = white([0, 1] * 4)
        payload = ModelPayload(task.initial_weights)
        FedALA(task, settings).client_update(payload, state, data, 2, KEY)
        *learning, training = trainings
        assert training == (4, 8.0)
        assert set(learning) == {(2, 4.0)}  # half of the examples
        return len(learning)

    at_rest = kept(1.0, None)  # the server's: nothing to learn
    assert passes(at_rest, 100) == 11
    assert passes(at_rest, 3) == 3
    assert passes(kept(1.0, 1.0), 100) == 1
    monkeypatch.setattr(fedala, "TOLERANCE", 0.0)
    assert passes(at_rest, 15) == 15


def test_without_the_global_head_it_is_fedper() -> None:
    task = normed_task(NORMED)
    method = FedALA(task, FedALASettings(aggregation_learning_rate=0.0))
    local = torch.randn(15, generator=torch.Generator().manual_seed(1))
    payload, data = ModelPayload(task.initial_weights), noisy(7, 2, seed=1)
    state = FedALAClientState(local, torch.zeros(15))
    after, update = method.client_update(payload, state, data, 2, KEY)
    fedper = FedPer(task, FedPerSettings())
    part, expected = fedper.client_update(payload, PersonalPart(local), data, 2, KEY)
    assert torch.equal(after.own, part.personal)
    assert torch.equal(update.weights[~task.head_mask], expected.shared)
    served = one_model_of(method, payload, state, data)
    fedper_model = one_model_of(fedper, payload, PersonalPart(local), data)
    assert torch.equal(served.weights, fedper_model.weights)


@pytest.mark.parametrize(("num_layers", "number"), [(1, 15), (2, 43), (9, 43)])
def test_parameters_of_the_last_layers_are_mixed(num_layers: int, number: int) -> None:
    task = normed_task(NORMED)
    method = FedALA(task, FedALASettings(num_layers, max_epochs=1))
    clients = {name: noisy(6, 0, seed=i) for i, name in enumerate("ab")}
    _, memory = run_rounds(method, clients, num_rounds=2)
    # 4·4 + 4 of the convolution, 2·4 of BatchNorm without its statistics, and the head.
    assert memory["a"].own.shape == memory["a"].aggregation.shape == (number,)
    assert 0 <= memory["a"].aggregation.min() < memory["a"].aggregation.max() <= 1


def test_seen_clients_are_served_the_mixture_and_unseen_clients_the_global_model() -> (
    None
):
    settings = FedALASettings(sample_fraction=1.0, aggregation_learning_rate=0.25)
    method = FedALA(two_weights_task(HALF, a=1, b=1), settings)
    payload, state = ModelPayload(torch.tensor([1.0, 2.0])), kept(1.0, 1.0)
    data = ClientData(white([1]).train, white([0, 0]).train)
    seen = one_model_of(method, payload, state, data)
    # ∂loss/∂b is 2 σ(4) of the label 1, and -2 σ(-4) of both labels 0.
    slopes = 2 * sigmoid(4), (2 * sigmoid(4) - 2 * 2 * sigmoid(-4)) / 3
    alone, both = (pytest.approx([1.0, 2 - 0.25 * slope]) for slope in slopes)
    assert seen.weights.tolist() == both
    assert seen.without_validation().weights.tolist() == alone
    for memory, examples in ((None, data), (state, white([]))):
        served = one_model_of(method, payload, memory, examples)
        assert torch.equal(served.weights, payload.weights)

"""FedDBE on one feature z = a x with logits (b (z + m), -b (z + m)): rounds by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from knnper.errors import ConfigError
from knnper.experiment import (
    MultiStepSchedule,
    TrainingSettings,
)
from knnper.strategies.feddbe import Bias, FedDBE, FedDBESettings, ModelAndMean
from tests.strategies.tiny import (
    KEY,
    noisy,
    normed_task,
    run_rounds,
    text_task,
    two_weights_task,
    white,
)

SIGMA_1 = 0.26894142  # σ(-1)
SIGMA_2 = 0.11920292  # σ(-2)
HALF = TrainingSettings(learning_rate=0.5)


def method_of(training: TrainingSettings = HALF, **settings: Any) -> FedDBE:
    return FedDBE(two_weights_task(training, a=1, b=1), FedDBESettings(**settings))


def test_the_first_round_by_hand() -> None:
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, memory = run_rounds(method_of(), clients, num_rounds=1)
    # Label 0: the gradients of a, b and m are -2σ(-2); label 1: 2 (1 - σ(-2)). There is
    # no consensus yet. Afterwards z = a, 1 + σ(-2) and σ(-2).
    mean = 0.75 + SIGMA_2
    assert state.weights.tolist() == pytest.approx([mean, mean], abs=1e-6)
    assert state.consensus.tolist() == pytest.approx([mean], abs=1e-6)
    assert memory["a"].bias.tolist() == pytest.approx([SIGMA_2], abs=1e-6)
    assert memory["b"].bias.tolist() == pytest.approx([SIGMA_2 - 1], abs=1e-6)


def test_a_later_round_by_hand() -> None:
    payload = ModelAndMean(torch.tensor([0.75, 1.0]), torch.tensor([0.25]))
    memory = Bias(torch.tensor([0.25]))
    method = method_of(mean_weight=0.5, bias_learning_rate=0.25)
    after, update = method.client_update(payload, memory, white([0, 0]), 2, KEY)
    # z + m = 1: -2σ(-2) for a, b and m, and κ (z - 0.25) = ¼ for a; m at its own rate.
    expected = [0.75 + SIGMA_2 - 0.125, 1 + SIGMA_2]
    assert update.weights.tolist() == pytest.approx(expected, abs=1e-6)
    assert update.mean is None
    assert after.bias.tolist() == pytest.approx([0.25 + SIGMA_2 / 2], abs=1e-6)
    assert memory.bias.tolist() == [0.25]
    # What was agreed on stays.
    state = method.aggregate(payload, iter([("a", update)]))
    assert state.consensus is not None
    assert state.consensus.tolist() == [0.25]


@pytest.mark.parametrize("momentum", [1.0, 0.25])
def test_the_mean_is_kept_over_mini_batches(momentum: float) -> None:
    # With a head of 0 the label gives a no gradient: what moves it is the mean alone.
    training = replace(HALF, batch_size=1)
    method = method_of(training, mean_weight=0.5, mean_momentum=momentum)
    payload = ModelAndMean(torch.tensor([1.0, 0.0]), torch.tensor([0.0]))
    _, update = method.client_update(payload, None, white([0]), 2, KEY)
    assert update.weights[0].item() == pytest.approx(0.75)
    far = FedDBE(
        two_weights_task(replace(training, local_epochs=2), a=1, b=1), method.settings
    )
    _, update = far.client_update(payload, None, white([0]), 2, KEY)
    # From a = ¾, b = ½ and m = 0: z̄ = (1 - μ) + ¾ μ, whose gradient is κ μ z̄; and
    # -2b σ(-2 · ½ · ¾) of the label, σ(-¾) = 0.32082130.
    mean = (1 - momentum) + 0.75 * momentum
    step = 0.5 * (-0.32082130 + 0.5 * momentum * mean)
    assert update.weights[0].item() == pytest.approx(0.75 - step, abs=1e-6)


def test_unseen_clients_train_their_bias_alone_at_the_first_rate() -> None:
    schedule = MultiStepSchedule(milestones=(2,))
    training = replace(HALF, num_rounds=3, schedule=schedule)
    payload = ModelAndMean(torch.tensor([0.5, 1.0]), torch.tensor([9.0]))
    method, data = method_of(training, unseen_epochs=1), white([0], [0])
    served = method.personalize(payload, None, data, KEY)
    # ∂m = -2σ(-1) of the examples of both splits, at the rate ½: m = σ(-1).
    logit = 2 * (0.5 + SIGMA_1)
    right = torch.tensor(logit).sigmoid().item()
    assert served(data.train.images)[0, 0].item() == pytest.approx(right, abs=1e-6)
    assert served.weights is payload.weights


def test_a_seen_client_is_served_its_bias() -> None:
    payload = ModelAndMean(torch.tensor([0.5, 1.0]), torch.tensor([9.0]))
    method, data = method_of(), white([0], [1])
    served = method.personalize(payload, Bias(torch.tensor([1.5])), data, KEY)
    right = torch.tensor(4.0).sigmoid().item()
    assert served(data.train.images)[0, 0].item() == pytest.approx(right)
    assert served.without_validation() is served
    # The representation is that of the shared model.
    assert served.embed(data.train.images).tolist() == [[0.5]]


def test_a_mean_is_asked_for_once() -> None:
    method = FedDBE(normed_task(HALF), FedDBESettings())
    first = ModelAndMean(method.task.initial_weights)
    later = replace(first, consensus=torch.zeros(4))
    data = noisy(5, 0, seed=1)
    with_mean, without = (
        method.client_update(payload, None, data, 1, KEY)[1]
        for payload in (first, later)
    )
    assert method.update_problem(first, with_mean) is None
    assert method.update_problem(later, without) is None
    for payload, update in ((first, without), (later, with_mean)):
        problem = method.update_problem(payload, update)
        assert problem == "mean: expected one in the first round, and none later"


def test_a_model_whose_loss_is_not_of_embeddings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set model\.all_positions: false"):
        FedDBE(text_task(), FedDBESettings())
    FedDBE(text_task(all_positions=False), FedDBESettings())

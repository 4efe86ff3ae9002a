import pytest
import torch

from knnper.errors import ConfigError
from knnper.experiment import MultiStepSchedule, TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import NoSettings
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.sharing import PersonalPart
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.fedper import FedPer, FedPerSettings
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds
from tests.strategies.two_weights import one_model_of, two_weights_task

SIGMA_1 = 0.26894142  # σ(-1)
SIGMA_2 = 0.11920292  # σ(-2)
HALF = TrainingSettings(learning_rate=0.5)
TRAINING = TrainingSettings(num_rounds=3, batch_size=3, learning_rate=0.1)


def test_first_round_by_hand(white: MakeClient, run_rounds: RunRounds) -> None:
    method = FedPer(two_weights_task(HALF, a=1, b=1), FedPerSettings())
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, memory = run_rounds(method, clients, num_rounds=1)
    # Logits (ab, -ab). Label 0: ∂loss/∂a = -2b σ(-2ab) = -2σ(-2), and b alike: both
    # end at 1 + σ(-2). Label 1: 2b σ(2ab) = 2 (1 - σ(-2)): both end at σ(-2). The
    # mean of a by examples is ¾ (1 + σ(-2)) + ¼ σ(-2); the server's b stays.
    assert state.weights.tolist() == pytest.approx([0.75 + SIGMA_2, 1], abs=1e-6)
    assert memory["a"].personal.tolist() == pytest.approx([1 + SIGMA_2], abs=1e-6)
    assert memory["b"].personal.tolist() == pytest.approx([SIGMA_2], abs=1e-6)


def test_a_client_goes_on_with_its_own_part(white: MakeClient, key: RandomKey) -> None:
    method = FedPer(two_weights_task(HALF, a=1, b=1), FedPerSettings())
    payload, before = ModelPayload(torch.tensor([0.5, 9])), PersonalPart(torch.ones(1))
    after, update = method.client_update(payload, before, white([0]), 2, key)
    # From a = ½ and its own b = 1: ∂a = -2 σ(-1), ∂b = -2 · ½ σ(-1).
    assert update.shared.tolist() == pytest.approx([0.5 + SIGMA_1], abs=1e-6)
    assert after.personal.tolist() == pytest.approx([1 + 0.5 * SIGMA_1], abs=1e-6)
    served = one_model_of(method, payload, before, white([0]), key)
    assert served.weights.tolist() == [0.5, 1.0]
    assert served.without_validation() is served


def test_unseen_clients_train_their_part_at_the_first_rate(
    white: MakeClient, key: RandomKey
) -> None:
    schedule = MultiStepSchedule(milestones=(2,))
    training = TrainingSettings(num_rounds=3, learning_rate=0.5, schedule=schedule)
    task = two_weights_task(training, a=1, b=1)
    method = FedPer(task, FedPerSettings(unseen_epochs=1))
    payload = ModelPayload(torch.tensor([2.0, 0.0]))
    served = one_model_of(method, payload, None, white([0]), key)
    # ∂b = -2a σ(0) = -2, at the rate ½.
    assert served.weights.tolist() == [2.0, 1.0]
    again = FedPer(task, FedPerSettings(unseen_epochs=2))
    longer = one_model_of(again, payload, None, white([0]), key).weights
    # ∂b = -2a σ(-2ab) = -4 σ(-4), σ(-4) = 0.01798621.
    assert longer.tolist() == pytest.approx([2.0, 1 + 2 * 0.01798621], abs=1e-6)


def test_unseen_clients_learn_from_both_splits(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task = normed_task(TRAINING)
    method = FedPer(task, FedPerSettings())
    payload = ModelPayload(task.initial_weights)
    data, alone = noisy(6, 3, seed=1), noisy(6, 0, seed=1)
    served = one_model_of(method, payload, None, data, key)
    expected = one_model_of(method, payload, None, alone, key).weights
    assert torch.equal(served.without_validation().weights, expected)
    assert not torch.equal(served.weights, expected)
    changed = served.weights != task.initial_weights
    assert torch.equal(changed, task.head_mask)


def test_without_data_a_part_is_not_used(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task = normed_task(TRAINING)
    method, payload = FedPer(task, FedPerSettings()), ModelPayload(task.initial_weights)
    part = PersonalPart(torch.ones(int(task.head_mask.sum())))
    served = one_model_of(method, payload, part, noisy(0, 0, seed=1), key)
    assert torch.equal(served.weights, task.initial_weights)
    for num_train, num_validation in ((1, 0), (0, 1)):
        data = noisy(num_train, num_validation, seed=1)
        served = one_model_of(method, payload, part, data, key)
        assert torch.equal(served.weights[task.head_mask], part.personal)


def test_only_the_base_moves_at_the_server(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
) -> None:
    task = normed_task(TRAINING)
    clients = {name: noisy(5, 0, seed=i) for i, name in enumerate("ab")}
    state, memory = run_rounds(FedPer(task, FedPerSettings()), clients, num_rounds=2)
    head, initial = task.head_mask, task.initial_weights
    assert torch.equal(state.weights[head], initial[head])
    assert not torch.equal(state.weights[~head], initial[~head])
    parts = [memory[name].personal for name in "ab"]
    assert all(len(part) == int(head.sum()) for part in parts)
    assert all(not torch.equal(part, initial[head]) for part in parts)
    assert not torch.equal(parts[0], parts[1])


def test_without_personal_layers_it_is_fedavg(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds, key: RandomKey
) -> None:
    task = normed_task(TRAINING)
    clients = {name: noisy(5 + i, 2, seed=i) for i, name in enumerate("abc")}
    everything_shared = FedPer(task, FedPerSettings(num_personal_layers=0))
    expected, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds=3)
    found, memory = run_rounds(everything_shared, clients, num_rounds=3)
    assert torch.equal(found.weights, expected.weights)
    payload = ModelPayload(found.weights)
    for part in (None, memory["a"]):
        served = one_model_of(everything_shared, payload, part, clients["a"], key)
        assert torch.equal(served.weights, expected.weights)


def test_some_layer_must_be_shared(normed_task: MakeTask) -> None:
    with pytest.raises(ConfigError) as caught:
        FedPer(normed_task(TRAINING), FedPerSettings(num_personal_layers=2))
    (problem,) = caught.value.problems
    assert problem.place == "method.num_personal_layers"
    assert "found 2, expected at most 1: of the model's 2 layers" in problem.message

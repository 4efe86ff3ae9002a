import dataclasses

import pytest
import torch
from torch import Tensor, nn

from knnper.errors import ConfigError
from knnper.experiment import MultiStepSchedule, TrainingSettings
from knnper.models.flat import EmbeddingModel, FlatModel
from knnper.models.networks import TolerantBatchNorm2d
from knnper.seeding import RandomKey
from knnper.strategies.core.method import NoSettings
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.sharing import PersonalPart
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.fedrep import FedRep, FedRepSettings
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds
from tests.strategies.two_weights import one_model_of, two_weights_task

SIGMA_HALF = 0.37754067  # σ(-½)
SIGMA_1 = 0.26894142  # σ(-1)
SIGMA_2 = 0.11920292  # σ(-2)
HALF = TrainingSettings(learning_rate=0.5)
TRAINING = TrainingSettings(num_rounds=3, batch_size=3, learning_rate=0.1)


class HeadlessModel(EmbeddingModel):
    """2x2 images; the body's three features are the logits."""

    embedding_dim = num_classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 3, 2), TolerantBatchNorm2d(3))
        self.classifier = nn.Identity()

    def embed(self, x: Tensor) -> Tensor:
        return torch.flatten(self.features(x), start_dim=1)


def test_first_round_by_hand(white: MakeClient, run_rounds: RunRounds) -> None:
    method = FedRep(two_weights_task(HALF, a=1, b=0), FedRepSettings(head_epochs=1))
    clients = {"a": white([0, 0, 0]), "b": white([0, 1])}
    state, memory = run_rounds(method, clients, num_rounds=1)
    # Logits (ab, -ab). Client a: ∂b = -2a σ(0) = -1, so b = ½; then, with that b,
    # ∂a = -2b σ(-2ab) = -σ(-1), so a = 1 + ½ σ(-1). Client b: its labels cancel.
    # The mean of a by examples is 1 + ⅗ · ½ σ(-1).
    assert state.weights.tolist() == pytest.approx([1 + 0.3 * SIGMA_1, 0], abs=1e-6)
    assert memory["a"].personal.tolist() == [0.5]
    assert memory["b"].personal.tolist() == [0.0]


def test_the_head_has_a_rate_of_its_own(white: MakeClient, key: RandomKey) -> None:
    settings = FedRepSettings(head_epochs=1, head_learning_rate=0.25)
    method = FedRep(two_weights_task(HALF, a=1, b=0), settings)
    payload = ModelPayload(torch.tensor([1.0, 0.0]))
    part, update = method.client_update(payload, None, white([0]), 1, key)
    # b = ¼, and a by ½ · 2 · ¼ σ(-½).
    assert part.personal.tolist() == [0.25]
    assert update.shared.tolist() == pytest.approx([1 + 0.25 * SIGMA_HALF], abs=1e-6)
    served = one_model_of(method, payload, None, white([0]), key)
    assert served.weights[1] > 0


@pytest.mark.parametrize(("part", "rate"), [(None, 0.25), ([0.0], 0.03125)])
def test_the_schedule_is_that_of_the_heads_own_rate_too(
    part: list[float] | None, rate: float, white: MakeClient, key: RandomKey
) -> None:
    schedule = MultiStepSchedule(milestones=(2,), factor=0.125)
    training = TrainingSettings(num_rounds=2, learning_rate=0.5, schedule=schedule)
    settings = FedRepSettings(head_epochs=1, head_learning_rate=0.25, unseen_epochs=1)
    method = FedRep(two_weights_task(training, a=1, b=0), settings)
    payload = ModelPayload(torch.tensor([1.0, 0.0]))
    # ∂b = -1 at b = 0: a step is the rate, that of round 2 below.
    kept, _ = method.client_update(payload, None, white([0]), 2, key)
    assert kept.personal.tolist() == [0.03125]
    # In the end the last round's, for a new head the first round's.
    before = None if part is None else PersonalPart(torch.tensor(part))
    served = one_model_of(method, payload, before, white([0]), key)
    assert served.weights.tolist() == [1.0, rate]


def test_the_head_is_trained_for_its_epochs(white: MakeClient, key: RandomKey) -> None:
    method = FedRep(two_weights_task(HALF, a=1, b=0), FedRepSettings(head_epochs=2))
    payload = ModelPayload(torch.tensor([1.0, 0.0]))
    part, _ = method.client_update(payload, None, white([0]), 1, key)
    # b = ½, then ∂b = -2 σ(-1).
    assert part.personal.tolist() == pytest.approx([0.5 + SIGMA_1], abs=1e-6)


def test_every_client_trains_its_head_on_the_final_body(
    white: MakeClient, key: RandomKey
) -> None:
    schedule = MultiStepSchedule(milestones=(2,))
    training = TrainingSettings(num_rounds=3, learning_rate=0.5, schedule=schedule)
    method = FedRep(
        two_weights_task(training, a=1, b=0),
        FedRepSettings(head_epochs=1, unseen_epochs=2),
    )
    payload, data = ModelPayload(torch.tensor([2.0, 0.0])), white([0])
    seen = one_model_of(method, payload, PersonalPart(torch.tensor([0.5])), data, key)
    # From its own b = ½ at the last rate, 0.05: ∂b = -2a σ(-2ab) = -4 σ(-2).
    assert seen.weights.tolist() == pytest.approx([2, 0.5 + 0.2 * SIGMA_2], abs=1e-6)
    unseen = one_model_of(method, payload, None, data, key)
    # From the server's b = 0 at the first rate, ½, twice: b = 1, then ∂b = -4 σ(-4).
    assert unseen.weights.tolist() == pytest.approx([2, 1.03597242], abs=1e-6)


def test_heads_are_trained_in_the_end_on_both_splits(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task = normed_task(TRAINING)
    method = FedRep(task, FedRepSettings(head_epochs=2))
    payload, head = ModelPayload(task.initial_weights), task.head_mask
    part = PersonalPart(torch.ones(int(head.sum())))
    for before in (None, part):
        served = one_model_of(method, payload, before, noisy(6, 3, seed=1), key)
        expected = one_model_of(
            method, payload, before, noisy(6, 0, seed=1), key
        ).weights
        assert torch.equal(served.without_validation().weights, expected)
        assert not torch.equal(served.weights, expected)
        assert torch.equal(served.weights != task.initial_weights, head)


def test_only_the_body_moves_at_the_server(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
) -> None:
    task = normed_task(TRAINING)
    clients = {name: noisy(5, 0, seed=i) for i, name in enumerate("ab")}
    state, memory = run_rounds(FedRep(task, FedRepSettings()), clients, num_rounds=2)
    head, initial = task.head_mask, task.initial_weights
    assert torch.equal(state.weights[head], initial[head])
    assert not torch.equal(state.weights[~head], initial[~head])
    parts = [memory[name].personal for name in "ab"]
    assert all(not torch.equal(part, initial[head]) for part in parts)
    assert not torch.equal(parts[0], parts[1])


def test_with_an_empty_head_it_is_fedavg(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds, key: RandomKey
) -> None:
    with key.torch():
        model = FlatModel(HeadlessModel())
    normed = normed_task(TRAINING)
    task = dataclasses.replace(normed, model=model, initial_weights=model.read())
    method = FedRep(task, FedRepSettings())
    clients = {name: noisy(5 + i, 2, seed=i) for i, name in enumerate("abc")}
    expected, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds=3)
    found, memory = run_rounds(method, clients, num_rounds=3)
    assert torch.equal(found.weights, expected.weights)
    for part in (None, memory["a"]):
        payload = ModelPayload(found.weights)
        served = one_model_of(method, payload, part, clients["a"], key)
        assert torch.equal(served.weights, expected.weights)


def test_a_model_without_a_body_is_refused(linear_task: MakeTask) -> None:
    with pytest.raises(ConfigError) as caught:
        FedRep(linear_task(TRAINING), FedRepSettings())
    (problem,) = caught.value.problems
    assert problem.place == "method.name"
    assert "found a model of which no weight would be shared" in problem.message

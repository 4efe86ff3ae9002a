"""FedPer, FedRep, LG-FedAvg and FedBN on one feature: rounds by hand."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from knnper.embedding_model import EmbeddingModel
from knnper.experiment import (
    MultiStepSchedule,
    TrainingSettings,
)
from knnper.flat_model import FlatModel
from knnper.layers import TolerantBatchNorm2d
from knnper.strategies.core.method import Method, NoSettings
from knnper.strategies.core.records import ModelPayload, ModelState
from knnper.strategies.core.sharing import PartlyShared, PersonalPart
from knnper.strategies.core.training import LocalResult
from knnper.strategies.fedbn import FedBN, FedBNSettings
from knnper.strategies.fedper import FedPer, FedPerSettings
from knnper.strategies.fedrep import FedRep, FedRepSettings
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    run_rounds,
    task_on_one_feature,
    two_weights_task,
    white,
)

SIGMA_1 = 0.26894142  # σ(-1)

SIGMA_2 = 0.11920292  # σ(-2)

HALF = TrainingSettings(learning_rate=0.5)

TRAINING = TrainingSettings(num_rounds=3, batch_size=3, learning_rate=0.1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fedper", [0.75 + SIGMA_2, 1]), ("lg_fedavg", [1, 0.75 + SIGMA_2])],
)
def test_first_round_by_hand(name: str, expected: list[float]) -> None:
    method = of_name(name, two_weights_task(HALF, a=1, b=1))
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, memory = run_rounds(method, clients, num_rounds=1)
    # Logits (ab, -ab). Label 0: ∂loss/∂a = -2b σ(-2ab) = -2σ(-2), and b alike: both
    # end at 1 + σ(-2). Label 1: 2b σ(2ab) = 2 (1 - σ(-2)): both end at σ(-2). The
    # mean by examples is ¾ (1 + σ(-2)) + ¼ σ(-2); the server's personal part stays.
    assert state.weights.tolist() == pytest.approx(expected, abs=1e-6)
    assert memory["a"].personal.tolist() == pytest.approx([1 + SIGMA_2], abs=1e-6)
    assert memory["b"].personal.tolist() == pytest.approx([SIGMA_2], abs=1e-6)


def test_a_client_goes_on_with_its_own_part() -> None:
    method = FedPer(two_weights_task(HALF, a=1, b=1), FedPerSettings())
    payload, before = ModelPayload(torch.tensor([0.5, 9])), PersonalPart(torch.ones(1))
    after, update = method.client_update(payload, before, white([0]), 2, KEY)
    # From a = ½ and its own b = 1: ∂a = -2 σ(-1), ∂b = -2 · ½ σ(-1).
    assert update.shared.tolist() == pytest.approx([0.5 + SIGMA_1], abs=1e-6)
    assert after.personal.tolist() == pytest.approx([1 + 0.5 * SIGMA_1], abs=1e-6)
    served = one_model_of(method, payload, before, white([0]))
    assert served.weights.tolist() == [0.5, 1.0]
    assert served.without_validation() is served


def test_unseen_clients_train_their_part_at_the_first_rate() -> None:
    schedule = MultiStepSchedule(milestones=(2,))
    training = TrainingSettings(num_rounds=3, learning_rate=0.5, schedule=schedule)
    task = two_weights_task(training, a=1, b=1)
    method = FedPer(task, FedPerSettings(unseen_epochs=1))
    payload = ModelPayload(torch.tensor([2.0, 0.0]))
    served = one_model_of(method, payload, None, white([0]))
    # ∂b = -2a σ(0) = -2, at the rate ½.
    assert served.weights.tolist() == [2.0, 1.0]
    again = FedPer(task, FedPerSettings(unseen_epochs=2))
    longer = one_model_of(again, payload, None, white([0])).weights
    # ∂b = -2a σ(-2ab) = -4 σ(-4), σ(-4) = 0.01798621.
    assert longer.tolist() == pytest.approx([2.0, 1 + 2 * 0.01798621], abs=1e-6)


def test_without_data_a_part_is_not_used() -> None:
    task = normed_task(TRAINING)
    method, payload = FedPer(task, FedPerSettings()), ModelPayload(task.initial_weights)
    part = PersonalPart(torch.ones(int(task.head_mask.sum())))
    served = one_model_of(method, payload, part, noisy(0, 0, seed=1))
    assert torch.equal(served.weights, task.initial_weights)
    for num_train, num_validation in ((1, 0), (0, 1)):
        data = noisy(num_train, num_validation, seed=1)
        served = one_model_of(method, payload, part, data)
        assert torch.equal(served.weights[task.head_mask], part.personal)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg_fedavg"])
def test_only_what_is_shared_moves_at_the_server(name: str) -> None:
    task = normed_task(TRAINING)
    clients = {client: noisy(5, 0, seed=i) for i, client in enumerate("ab")}
    state, memory = run_rounds(of_name(name, task), clients, num_rounds=2)
    personal = ~task.head_mask if name == "lg_fedavg" else task.head_mask
    initial = task.initial_weights
    moved = state.weights != initial
    assert not bool(moved[personal].any())
    assert bool(moved[~personal].any())
    parts = [memory[client].personal for client in "ab"]
    assert all(len(part) == int(personal.sum()) for part in parts)
    assert all(not torch.equal(part, initial[personal]) for part in parts)
    assert not torch.equal(parts[0], parts[1])


class HeadlessModel(EmbeddingModel):
    """2x2 images; the body's three features are the logits."""

    embedding_dim = num_classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 3, 2), TolerantBatchNorm2d(3))
        self.classifier = nn.Identity()

    def embed(self, x: Tensor) -> Tensor:
        return torch.flatten(self.features(x), start_dim=1)


def test_fedrep_first_round_by_hand() -> None:
    method = FedRep(two_weights_task(HALF, a=1, b=0), FedRepSettings(head_epochs=1))
    clients = {"a": white([0, 0, 0]), "b": white([0, 1])}
    state, memory = run_rounds(method, clients, num_rounds=1)
    # Logits (ab, -ab). Client a: ∂b = -2a σ(0) = -1, so b = ½; then, with that b,
    # ∂a = -2b σ(-2ab) = -σ(-1), so a = 1 + ½ σ(-1). Client b: its labels cancel.
    # The mean of a by examples is 1 + ⅗ · ½ σ(-1).
    assert state.weights.tolist() == pytest.approx([1 + 0.3 * SIGMA_1, 0], abs=1e-6)
    assert memory["a"].personal.tolist() == [0.5]
    assert memory["b"].personal.tolist() == [0.0]


@pytest.mark.parametrize(
    ("num_epochs", "rate", "head"),
    # b = ½, then ∂b = -2 σ(-1); or b = ¼ at its own rate.
    [(2, None, 0.5 + SIGMA_1), (1, 0.25, 0.25)],
)
def test_the_head_has_its_epochs_and_its_rate(
    num_epochs: int, rate: float | None, head: float
) -> None:
    settings = FedRepSettings(head_epochs=num_epochs, head_learning_rate=rate)
    method = FedRep(two_weights_task(HALF, a=1, b=0), settings)
    payload = ModelPayload(torch.tensor([1.0, 0.0]))
    part, update = method.client_update(payload, None, white([0]), 1, KEY)
    assert part.personal.tolist() == pytest.approx([head], abs=1e-6)
    # ∂a = -2 b σ(-2 b) at the rate ½.
    step = head / (1 + math.exp(2 * head))
    assert update.shared.tolist() == pytest.approx([1 + step], abs=1e-6)


def test_every_client_trains_its_head_on_the_final_body() -> None:
    schedule = MultiStepSchedule(milestones=(2,))
    training = TrainingSettings(num_rounds=3, learning_rate=0.5, schedule=schedule)
    method = FedRep(
        two_weights_task(training, a=1, b=0),
        FedRepSettings(head_epochs=1, head_learning_rate=0.5, unseen_epochs=2),
    )
    payload, data = ModelPayload(torch.tensor([2.0, 0.0])), white([0])
    seen = one_model_of(method, payload, PersonalPart(torch.tensor([0.5])), data)
    # From its own b = ½ at the head's last rate, 0.05: ∂b = -2a σ(-2ab) = -4 σ(-2).
    assert seen.weights.tolist() == pytest.approx([2, 0.5 + 0.2 * SIGMA_2], abs=1e-6)
    unseen = one_model_of(method, payload, None, data)
    # From the server's b = 0 at the first rate, ½, twice: b = 1, then ∂b = -4 σ(-4).
    assert unseen.weights.tolist() == pytest.approx([2, 1.03597242], abs=1e-6)


def test_with_an_empty_head_it_is_fedavg() -> None:
    with KEY.torch():
        model = FlatModel(HeadlessModel())
    normed = normed_task(TRAINING)
    task = dataclasses.replace(normed, model=model, initial_weights=model.read())
    clients = {name: noisy(5 + i, 2, seed=i) for i, name in enumerate("abc")}
    expected, _ = run_rounds(of_name("fedavg", task), clients, num_rounds=3)
    state, memory = run_rounds(of_name("fedrep", task), clients, num_rounds=3)
    assert torch.equal(state.weights, expected.weights)
    for part in (None, memory["a"]):
        payload = ModelPayload(state.weights)
        served = one_model_of(of_name("fedrep", task), payload, part, clients["a"])
        assert torch.equal(served.weights, expected.weights)


def normed_pixel(unseen_epochs: int = 20) -> Method:
    """Return FedBN where z = γ x̂ + β; weights (γ, β, b, running mean, variance)."""
    task = task_on_one_feature(nn.BatchNorm1d(1), HALF, 1, 0, 1, 0, 1)
    return FedBN(task, FedBNSettings(unseen_epochs))


def test_two_rounds_by_hand() -> None:
    clients = {"a": white([0, 0]), "b": white([1, 1])}
    state, memory = run_rounds(normed_pixel(), clients, num_rounds=1)
    # Equal pixels: x̂ = 0, so z = β, the gradients of γ and b are 0, and that of β is
    # ±2b σ(0) = ±1. Statistics move by a tenth towards mean 1, variance 0.
    assert state.weights.tolist() == [1, 0, 1, 0, 1]
    assert memory["a"].personal.tolist() == pytest.approx([1, 0.5, 0.1, 0.9])
    assert memory["b"].personal.tolist() == pytest.approx([1, -0.5, 0.1, 0.9])
    state, memory = run_rounds(normed_pixel(), clients, num_rounds=2)
    # z = β = ±½: ∂β = ∓2 σ(-1), and ∂b = -2 · ½ σ(-1) for both.
    head = 1 + 0.5 * SIGMA_1
    assert state.weights.tolist() == pytest.approx([1, 0, head, 0, 1], abs=1e-6)
    kept = [1, 0.5 + SIGMA_1, 0.19, 0.81]
    assert memory["a"].personal.tolist() == pytest.approx(kept, abs=1e-6)


def test_unseen_clients_learn_batch_norm_alone() -> None:
    payload = ModelPayload(torch.tensor([1.0, 0, 1, 0, 1]))
    served = one_model_of(normed_pixel(1), payload, None, white([1, 1]))
    assert served.weights.tolist() == pytest.approx([1, -0.5, 1, 0.1, 0.9])


def test_batch_norm_stays_with_the_clients() -> None:
    task = normed_task(batch_size=3, learning_rate=0.1)
    clients = {name: noisy(6, 0, seed=i) for i, name in enumerate("ab")}
    method = FedBN(task, FedBNSettings())
    state, memory = run_rounds(method, clients, num_rounds=2)
    before, after = (
        task.model.named(weights) for weights in (task.initial_weights, state.weights)
    )
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    names = ("weight", "bias", "running_mean", "running_var")
    # BatchNorm takes off what a convolution's bias adds: it has no gradient.
    assert unchanged - {"features.0.bias"} == {f"features.1.{name}" for name in names}
    assert not torch.equal(memory["a"].personal, memory["b"].personal)
    assert len(memory["a"].personal) == 16


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12).filter(any))
def test_what_was_split_is_joined_again(shared: list[bool]) -> None:
    method = PartlyShared(linear_task(), NoSettings(), torch.tensor(shared), 1)
    trained = torch.arange(len(shared), dtype=torch.float32)
    part, update = method.split(LocalResult(trained, 3, 0.5), num_examples=7)
    assert len(part.personal) + len(update.shared) == len(shared)
    assert (update.num_examples, update.train_loss) == (7, 0.5)
    server = method.aggregate(ModelState(-trained), iter([("a", update)]))
    assert torch.equal(method.joined(server.weights, part), trained)
    assert torch.equal(server.weights, trained.where(method.shared, -trained))
    assert method.joined(trained, None) is trained

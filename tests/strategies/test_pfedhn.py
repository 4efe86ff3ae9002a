from typing import Any

import pytest
import torch

from knnper.data.examples import ClientData
from knnper.experiment import MultiStepSchedule
from knnper.seeding import RandomKey
from knnper.strategies.core.method import UNSEEN_CLIENT, Method
from knnper.strategies.core.records import ModelUpdate
from knnper.strategies.core.task import Task
from knnper.strategies.pfedhn import (
    Hypernetwork,
    Layer,
    PFedHN,
    PFedHNSettings,
    PFedHNState,
    generate,
    hypernetwork_gradients,
)
from tests.strategies.tiny import (
    KEY,
    linear_task,
    normed_task,
    one_model_of,
    white,
)

# θ = relu(v) (1, -1): one unit, for models of two parameters.
NETWORK = Hypernetwork(
    (
        Layer(torch.tensor([[1.0]]), torch.tensor([0.0])),
        Layer(torch.tensor([[1.0], [-1.0]]), torch.tensor([0.0, 0.0])),
    )
)
STATE = PFedHNState(("a", "b"), torch.tensor([[2.0], [1.0]]), NETWORK, torch.empty(0))


def pfedhn_of(task: Task, **settings: Any) -> Method:
    return PFedHN(task, PFedHNSettings(**settings))


def update_of(weights: list[float], num_examples: int = 1) -> ModelUpdate:
    return ModelUpdate(torch.tensor(weights), num_examples, 0.5)


def flat(network: Hypernetwork) -> list[list[float]]:
    tensors = [t for layer in network.layers for t in (layer.weight, layer.bias)]
    return [tensor.flatten().tolist() for tensor in tensors]


def test_seen_clients_get_their_models_and_unseen_clients_the_mean_embedding() -> None:
    method = pfedhn_of(linear_task())
    assert method.broadcast(STATE, "a", KEY).weights.tolist() == [2.0, -2.0]
    assert method.broadcast(STATE, "b", KEY).weights.tolist() == [1.0, -1.0]
    assert method.broadcast(STATE, "a", KEY).hypernetwork is None
    payload = method.broadcast(STATE, UNSEEN_CLIENT, KEY)
    assert payload.weights.tolist() == [1.5, -1.5]
    assert payload.embedding.tolist() == [1.5]
    assert payload.hypernetwork is NETWORK


@pytest.mark.parametrize(
    ("decay", "updates", "network", "embeddings"),
    [
        # θ_a = (2, -2), trained to (3, -3): Δθ = (-1, 1). With the unit at 2:
        #   last weight: Δθ · 2 = (-2, 2); last bias: Δθ; unit: -1 · 1 + 1 · (-1) = -2;
        #   first weight: -2 · v = -4; first bias: -2; embedding: -2 · 1 = -2.
        (
            0,
            [("a", update_of([3.0, -3.0]))],
            [[3.0], [1.0], [2.0, -2.0], [0.5, -0.5]],
            [[3.0], [1.0]],
        ),
        # Client a as above. Client b: θ = (1, -1), trained to (1, -3): Δθ = (0, 2);
        # unit at 1: last weight (0, 2), last bias (0, 2), unit -2, first weight -2,
        # first bias -2, embedding -2. Means: (-1, 2), (-½, 1.5), -3, -2, whatever the
        # sizes.
        (
            0,
            [("a", update_of([3.0, -3.0])), ("b", update_of([1.0, -3.0], 99))],
            [[2.5], [1.0], [1.5, -2.0], [0.25, -0.75]],
            [[3.0], [2.0]],
        ),
        # Nothing was trained, so Δθ = 0 and each tensor of φ loses half of itself.
        (
            1,
            [("a", update_of([2.0, -2.0]))],
            [[0.5], [0.0], [0.5, -0.5], [0.0, 0.0]],
            [[2.0], [1.0]],
        ),
    ],
)
def test_server_steps_by_hand(
    decay: float,
    updates: Any,
    network: list[list[float]],
    embeddings: list[list[float]],
) -> None:
    method = pfedhn_of(linear_task(), learning_rate=0.5, weight_decay=decay)
    state = method.aggregate(STATE, iter(updates))
    assert flat(state.hypernetwork) == network
    assert state.embeddings.tolist() == embeddings


def test_generated_models_start_near_the_initial_weights() -> None:
    task = normed_task()
    method = pfedhn_of(task)
    state = method.init(["a", "b"], KEY)
    weights = [method.broadcast(state, name, KEY).weights for name in "ab"]
    for generated in weights:
        assert float((generated - task.initial_weights).abs().max()) < 0.05
    assert not torch.equal(weights[0], weights[1])


def test_buffers_are_averaged_by_examples() -> None:
    task = normed_task()
    method = pfedhn_of(task)
    state = method.init(["a", "b"], KEY)
    first, second = (torch.full_like(task.initial_weights, x) for x in (4.0, 8.0))
    updates = [("a", ModelUpdate(first, 3, 0.5)), ("b", ModelUpdate(second, 1, 0.5))]
    # ¾ · 4 + ¼ · 8 = 5, for BatchNorm's 4 means and 4 variances.
    assert method.aggregate(state, iter(updates)).buffers.tolist() == [5.0] * 8


def serve_unseen_client(
    method: Method, data: ClientData, key: RandomKey
) -> torch.Tensor:
    payload = method.broadcast(STATE, UNSEEN_CLIENT, key)
    return one_model_of(method, payload, None, data, key).weights


@pytest.mark.parametrize("num_steps", [1, 2])
def test_an_unseen_clients_steps_by_hand(num_steps: int) -> None:
    schedule = MultiStepSchedule(milestones=(2,), factor=0.125)
    task = linear_task(learning_rate=1.0, num_rounds=2, schedule=schedule)
    method = pfedhn_of(task, learning_rate=0.25, unseen_steps=num_steps)
    model = serve_unseen_client(method, white([1]), KEY)
    # θ = (1.5, -1.5); label 1: the gradient is (p, -p) with p = σ(3), at the first
    # rate, so Δθ = θ - θ̃ = (p, -p), (∂θ/∂v)ᵀ Δθ = 2 p, and v = 1.5 - ¼ · 2 p.
    embedding = 1.5 - 0.5 * 0.9525741
    if num_steps == 2:  # then θ = (v, -v) is trained: v ← v - ½ σ(2 v)
        embedding -= 0.5 * float(torch.sigmoid(torch.tensor(2 * embedding)))
    assert model.tolist() == pytest.approx([embedding, -embedding], abs=1e-6)


OTHER_NETWORK = Hypernetwork(
    (
        Layer(torch.tensor([[1.0], [-2.0]]), torch.tensor([0.0, 1.0])),
        Layer(torch.tensor([[3.0, 5.0]]), torch.tensor([7.0])),
    )
)


@pytest.mark.parametrize(
    ("embedding", "generated"),
    [
        (2.0, 13.0),  # units relu(2) = 2, relu(-3) = 0: 3 · 2 + 7
        (-1.0, 22.0),  # units relu(-1) = 0, relu(3) = 3: 5 · 3 + 7
        (0.25, 10.25),  # units ¼ and ½: ¾ + 5/2 + 7
    ],
)
def test_a_hypernetwork_generates_by_hand(embedding: float, generated: float) -> None:
    assert generate(OTHER_NETWORK, torch.tensor([embedding])).tolist() == [generated]


def test_gradients_of_a_hypernetwork_by_hand() -> None:
    # v = -1: only the second unit, 3, is open. θ = 22, trained to 20: Δθ = 2.
    of_layers, of_embedding = hypernetwork_gradients(
        OTHER_NETWORK, torch.tensor([-1.0]), torch.tensor([20.0])
    )
    first_weight, first_bias, last_weight, last_bias = of_layers
    assert last_weight.tolist() == [[0.0, 6.0]]
    assert last_bias.tolist() == [2.0]
    # The open unit gets 2 · 5 = 10; its weight 10 · v; the embedding 10 · (-2).
    assert first_weight.tolist() == [[0.0], [-10.0]]
    assert first_bias.tolist() == [0.0, 10.0]
    assert of_embedding.tolist() == [-20.0]


def test_num_hidden_layers() -> None:
    task = normed_task()
    method = pfedhn_of(task, embedding_dim=5, hidden_dim=7, num_hidden_layers=2)
    layers = method.init(["a"], KEY).hypernetwork.layers
    shapes = [tuple(layer.weight.shape) for layer in layers]
    assert shapes == [(7, 5), (7, 7), (task.model.num_parameters, 7)]

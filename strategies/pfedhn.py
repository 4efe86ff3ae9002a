"""pFedHN: a hypernetwork on the server generates each client's model.

Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using
Hypernetworks", ICML 2021, Algorithm 1. The hypernetwork h with weights φ maps the
embedding v_i of client i to its parameters θ_i = h(v_i; φ). The client trains them to
θ̃_i, and with Δθ_i = θ_i - θ̃_i the server steps

    φ ← φ - α (∂θ_i/∂φ)ᵀ Δθ_i        v_i ← v_i - α (∂θ_i/∂v_i)ᵀ Δθ_i

so that h generates parameters closer to θ̃_i. An unseen client receives φ and finds its
own v by the same steps with φ frozen (the paper's section on novel clients), at the
learning rate of the first round.

Departures from the paper:

- Several clients train in one round. φ steps along the mean of their gradients, equally
  weighted, and each v_i along its own.
- The sign of Δθ_i is that of the authors' code. With θ̃_i - θ_i, as printed, the steps
  would lead away from θ̃_i.
- The last layer starts with the initial weights as its bias and small weights, so that
  the generated models start near the initial model.
- Only parameters are generated. Buffers such as BatchNorm's running statistics are
  averaged as in FedAvg.

The hypernetwork is ``hidden_dim`` times as large as the model, for any number of
clients.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Settings
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.method import Method
from knnper.strategies.core.predictors import ModelPredictor, Predictor
from knnper.strategies.core.records import ModelUpdate, NoState, Record

LAST_LAYER_SCALE = 0.01
"""Size of the last layer's initial weights, relative to the other layers'."""


@dataclass(frozen=True)
class Layer(Record):
    """A linear layer."""

    weight: Tensor  # shape (out, in)
    bias: Tensor  # shape (out,)


@dataclass(frozen=True)
class Hypernetwork(Record):
    """φ: linear layers with ReLU between them."""

    layers: tuple[Layer, ...]  # from (embedding_dim,) to (num_parameters,)


def new_hypernetwork(
    hidden_sizes: Sequence[int], parameters: Tensor, rng: RandomKey
) -> Hypernetwork:
    """Draw a φ that generates models close to ``parameters``."""
    with rng.torch():
        hidden = [_new_layer(i, o) for i, o in itertools.pairwise(hidden_sizes)]
        last = _new_layer(hidden_sizes[-1], len(parameters))
    last = Layer(LAST_LAYER_SCALE * last.weight, parameters)
    return Hypernetwork((*hidden, last))


def generate(hypernetwork: Hypernetwork, embedding: Tensor) -> Tensor:
    """Return θ = h(v; φ), shape (num_parameters,), for v, shape (embedding_dim,)."""
    *hidden_layers, last = hypernetwork.layers
    hidden = embedding
    for layer in hidden_layers:
        hidden = torch.relu(functional.linear(hidden, layer.weight, layer.bias))
    return functional.linear(hidden, last.weight, last.bias)


def hypernetwork_gradients(
    hypernetwork: Hypernetwork, embedding: Tensor, trained: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return (∂θ/∂φ)ᵀ Δθ and (∂θ/∂v)ᵀ Δθ for θ = h(v; φ) and Δθ = θ - θ̃.

    The first has a tensor for weight and bias of each layer, in order; θ̃ is
    ``trained``.
    """
    tensors = (*_tensors(hypernetwork), embedding)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    layers = tuple(map(Layer, leaves[0:-1:2], leaves[1::2]))
    generated = generate(Hypernetwork(layers), leaves[-1])
    change = generated.detach() - trained
    *of_layers, of_embedding = torch.autograd.grad(generated, leaves, change)
    return of_layers, of_embedding


def hypernetwork_step(
    hypernetwork: Hypernetwork,
    directions: Sequence[Tensor],
    learning_rate: float,
    weight_decay: float,
) -> Hypernetwork:
    """Return φ after one step of SGD against ``directions``."""
    stepped = [
        tensor - learning_rate * (direction + weight_decay * tensor)
        for tensor, direction in zip(_tensors(hypernetwork), directions, strict=True)
    ]
    return Hypernetwork(tuple(map(Layer, stepped[0::2], stepped[1::2])))


def _tensors(hypernetwork: Hypernetwork) -> list[Tensor]:
    return [
        tensor for layer in hypernetwork.layers for tensor in (layer.weight, layer.bias)
    ]


def _new_layer(num_inputs: int, num_outputs: int) -> Layer:
    """Draw a layer with torch's default, uniform in ±1/√num_inputs."""
    bound = 1 / math.sqrt(num_inputs)
    weight = torch.empty(num_outputs, num_inputs).uniform_(-bound, bound)
    return Layer(weight, torch.empty(num_outputs).uniform_(-bound, bound))


@dataclass(frozen=True)
class PFedHNSettings(Settings):
    """The hypernetwork and its training.

    Attributes
    ----------
    embedding_dim
        Size of v_i; useful from 8 to 100. The paper takes about a quarter of the number
        of clients.
    hidden_dim
        Units of a hidden layer; the hypernetwork is about this many times as large as
        the model. 100 in the paper.
    num_hidden_layers
        Layers with ReLU before the linear layer that generates the parameters, 1 to 3.
    learning_rate
        α, the learning rate of φ and v; useful from 0.001 to 0.1.
    weight_decay
        Weight decay of φ; v has none.
    unseen_steps
        Steps on v of an unseen client, each after the local training of one round at
        the learning rate of the first round.
    """

    embedding_dim: PositiveInt = 32
    hidden_dim: PositiveInt = 100
    num_hidden_layers: PositiveInt = 1
    learning_rate: PositiveFloat = 0.01
    weight_decay: NonNegativeFloat = 0.0
    unseen_steps: PositiveInt = 20


@dataclass(frozen=True)
class PFedHNState(Record):
    """The server's state."""

    clients: tuple[str, ...]  # names of the seen clients, sorted
    embeddings: Tensor  # v, shape (num_clients, embedding_dim), by ``clients``
    hypernetwork: Hypernetwork  # φ
    buffers: Tensor  # averaged, shape (num_weights - num_parameters,)


@dataclass(frozen=True)
class PFedHNPayload(Record):
    """The payload of a client."""

    # θ_i and the buffers, shape (num_weights,); for an unseen client generated from the
    # mean of all embeddings.
    weights: Tensor
    # For an unseen client the v, (embedding_dim,), and the φ of ``weights``; else None.
    embedding: Tensor | None = None
    hypernetwork: Hypernetwork | None = None


class PFedHN(Method):
    """A hypernetwork on the server generates a model for each client."""

    title = "pFedHN"
    source = "Shamsian et al. 2021, Algorithm 1"
    download = "1 (an unseen client: hidden_dim + 2)"
    server_state = "hidden_dim + 1"
    unseen = "the generated model of an embedding that it finds with its own data"
    trains_unseen_from_start = True
    reference_title = "pFedHN (mean embedding)"
    state_type = PFedHNState
    payload_type = PFedHNPayload

    settings: PFedHNSettings

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> PFedHNState:
        num_parameters = self.task.model.num_parameters
        parameters, buffers = self.task.initial_weights.tensor_split([num_parameters])
        hidden_sizes = [self.settings.hidden_dim] * self.settings.num_hidden_layers
        network = new_hypernetwork(
            [self.settings.embedding_dim, *hidden_sizes],
            parameters,
            rng.child("network"),
        )
        with rng.child("embeddings").torch():
            embeddings = torch.randn(len(clients), self.settings.embedding_dim)
        return PFedHNState(tuple(clients), embeddings, network, buffers)

    @override
    def personalize(
        self,
        payload: PFedHNPayload,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> Predictor:
        return ModelPredictor(self.task, self._adapt(payload, data.train, rng))

    @override
    def broadcast(
        self, state: PFedHNState, client_id: str, rng: RandomKey
    ) -> PFedHNPayload:
        network, buffers = state.hypernetwork, state.buffers
        if client_id in state.clients:
            embedding = state.embeddings[state.clients.index(client_id)]
            return PFedHNPayload(_weights(network, embedding, buffers))
        embedding = state.embeddings.mean(dim=0)
        return PFedHNPayload(_weights(network, embedding, buffers), embedding, network)

    @override
    def aggregate(
        self, state: PFedHNState, updates: Updates[ModelUpdate]
    ) -> PFedHNState:
        network, rate = state.hypernetwork, self.settings.learning_rate
        embeddings, mean_buffers = state.embeddings.clone(), RunningMean()
        mean_gradients = [RunningMean() for _ in range(2 * len(network.layers))]
        for client_id, update in updates:
            index = state.clients.index(client_id)
            trained, buffers = update.weights.tensor_split(
                [len(update.weights) - len(state.buffers)]
            )
            of_layers, of_embedding = hypernetwork_gradients(
                network, state.embeddings[index], trained
            )
            embeddings[index] -= rate * of_embedding
            for mean, gradient in zip(mean_gradients, of_layers, strict=True):
                mean.add(gradient, 1)
            mean_buffers.add(buffers, update.num_examples)
        directions = [mean.result() for mean in mean_gradients]
        stepped = hypernetwork_step(
            network, directions, rate, self.settings.weight_decay
        )
        return PFedHNState(state.clients, embeddings, stepped, mean_buffers.result())

    def _adapt(
        self, payload: PFedHNPayload, examples: Examples, rng: RandomKey
    ) -> Tensor:
        """Return the client's weights; an unseen client with data first finds its v."""
        weights, network = payload.weights, payload.hypernetwork
        embedding, num_parameters = payload.embedding, self.task.model.num_parameters
        if network is None or embedding is None or len(examples) == 0:
            return weights
        rate, buffers = self.task.first_rate, weights[num_parameters:]
        for number in range(self.settings.unseen_steps):
            step_rng = rng.child("step", number)
            trained = self.train(weights, examples, rate, step_rng).weights
            trained = trained[:num_parameters]
            _, slope = hypernetwork_gradients(network, embedding, trained)
            embedding = embedding - self.settings.learning_rate * slope
            weights = _weights(network, embedding, buffers)
        return weights


def _weights(network: Hypernetwork, embedding: Tensor, buffers: Tensor) -> Tensor:
    return torch.cat([generate(network, embedding), buffers])

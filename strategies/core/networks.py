"""Attention over the parameters of a client's nearest neighbours.

Vaswani et al., "Attention is all you need", NeurIPS 2017, Eq. 1, in the form of
Luo et al., Definition 3.1.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import faiss
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from knnper.datastore.index import use_one_thread
from knnper.seeding import RandomKey
from knnper.strategies.core.records import Record


@dataclass(frozen=True)
class Attention(Record):
    """W_Q, W_K and W_V."""

    # query, key: W_Q and W_K, shape (d_k, p).
    query: Tensor
    key: Tensor
    value: Tensor  # The diagonal of W_V, shape (d_v,): a factor for each value


@dataclass(frozen=True)
class Memory(Record):
    """What is known of n clients, a row each."""

    representations: Tensor  # Z, shape (n, p)
    values: Tensor  # M, shape (n, d_v)

    def __len__(self) -> int:
        return int(self.representations.shape[0])

    def take(self, rows: Tensor) -> "Memory":
        """Return the clients in ``rows``, int64 of shape (m,)."""
        return Memory(self.representations[rows], self.values[rows])


@dataclass(frozen=True)
class KnownClients(Record):
    """A memory, and whose it is."""

    names: tuple[str, ...]  # Of the clients, sorted
    memory: Memory  # What is known of them, in that order

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a client's z (p,) and m (d_v,)."""
        row = self.names.index(name)
        return self.memory.representations[row], self.memory.values[row]

    def updated(self, news: Mapping[str, tuple[Tensor, Tensor]]) -> "KnownClients":
        """Return these clients, with what is new of some of them or of others."""
        if not news:
            return self
        known = {name: self.of(name) for name in self.names} | dict(news)
        names = tuple(sorted(known))
        columns = zip(*(known[name] for name in names), strict=True)
        return KnownClients(names, Memory(*map(torch.stack, map(list, columns))))


def nobody(representation_dim: int, num_values: int) -> KnownClients:
    """Return the memory of no client."""
    empty = torch.empty(0, representation_dim), torch.empty(0, num_values)
    return KnownClients((), Memory(*empty))


def new_attention(
    attention_dim: int, representation_dim: int, num_values: int, rng: RandomKey
) -> Attention:
    """Return an attention that begins as the plain mean of the values.

    W_Q is zero, so all scores are; W_K is random, N(0, 1/p), so that W_Q has a gradient
    and W_K gets one with the second step. W_V is the identity.
    """
    shape = (attention_dim, representation_dim)
    with rng.torch():
        key = torch.randn(shape) / math.sqrt(representation_dim)
    return Attention(torch.zeros(shape), key, torch.ones(num_values))


def nearest(memory: Memory, representation: Tensor, count: int) -> Memory:
    """Return the clients nearest to a representation, the nearest first.

    All distances are asked of FAISS, and sorted again: among equally distant clients
    those of the first rows come first, which FAISS does not promise.

    Parameters
    ----------
    representation
        z, shape (p,); compared by the Euclidean distance.
    """
    use_one_thread()
    index = faiss.IndexFlatL2(len(representation))
    index.add(memory.representations.contiguous().numpy())
    query = representation[None].contiguous().numpy()
    distances, rows = index.search(query, len(memory))
    order = np.lexsort((rows[0], distances[0]))[:count]
    return memory.take(torch.from_numpy(rows[0][order]))


def attend(attention: Attention, representation: Tensor, neighbors: Memory) -> Tensor:
    """Return W_V M softmax((W_K Z)ᵀ W_Q z / √d_k), shape (d_v,).

    Parameters
    ----------
    representation
        z, shape (p,), of the client that asks.
    """
    query = attention.query @ representation
    keys = neighbors.representations @ attention.key.T
    shares = torch.softmax(keys @ query / math.sqrt(len(query)), dim=0)
    return attention.value * (shares @ neighbors.values)


def gradients(
    attention: Attention, representation: Tensor, neighbors: Memory, trained: Tensor
) -> tuple[Tensor, ...]:
    """Return (∂M̃/∂W)ᵀ ΔM̃ of W_Q, W_K and W_V, with ΔM̃ = M̃ - ``trained``.

    Parameters
    ----------
    trained
        What local training made of M̃, shape (d_v,).
    """
    matrices = (attention.query, attention.key, attention.value)
    leaves = [matrix.detach().requires_grad_() for matrix in matrices]
    made = attend(Attention(*leaves), representation, neighbors)
    return torch.autograd.grad(made, leaves, made.detach() - trained)


def step(
    attention: Attention, directions: Sequence[Tensor], learning_rate: float
) -> Attention:
    """Return the attention after one step of SGD against ``directions``."""
    matrices = (attention.query, attention.key, attention.value)
    pairs = zip(matrices, directions, strict=True)
    return Attention(*(matrix - learning_rate * along for matrix, along in pairs))


LAST_LAYER_SCALE = 0.01
"""Size of the last layer's initial weights, relative to the other layers'."""


@dataclass(frozen=True)
class Layer(Record):
    """A linear layer."""

    weight: Tensor  # Shape (out, in)
    bias: Tensor  # Shape (out,)


@dataclass(frozen=True)
class Hypernetwork(Record):
    """φ: linear layers with ReLU between them."""

    layers: tuple[Layer, ...]  # From (embedding_dim,) to (num_parameters,)


@dataclass(frozen=True)
class Gradients:
    """Vector-Jacobian products of what was generated."""

    layers: tuple[Tensor, ...]  # (∂θ/∂φ)ᵀ Δθ: weight and bias of each layer, in order
    embedding: Tensor  # (∂θ/∂v)ᵀ Δθ, shape (embedding_dim,)


def new_hypernetwork(
    hidden_sizes: Sequence[int], parameters: Tensor, rng: RandomKey
) -> Hypernetwork:
    """Return φ that generates models close to ``parameters``.

    Parameters
    ----------
    parameters
        Bias of the last layer, shape (num_parameters,).
    """
    with rng.torch():
        hidden = [_new_layer(i, o) for i, o in itertools.pairwise(hidden_sizes)]
        last = _new_layer(hidden_sizes[-1], len(parameters))
    last = Layer(LAST_LAYER_SCALE * last.weight, parameters)
    return Hypernetwork((*hidden, last))


def generate(hypernetwork: Hypernetwork, embedding: Tensor) -> Tensor:
    """Return θ = h(v; φ), shape (num_parameters,), of v, shape (embedding_dim,)."""
    *hidden_layers, last = hypernetwork.layers
    hidden = embedding
    for layer in hidden_layers:
        hidden = torch.relu(functional.linear(hidden, layer.weight, layer.bias))
    return functional.linear(hidden, last.weight, last.bias)


def hypernetwork_gradients(
    hypernetwork: Hypernetwork, embedding: Tensor, trained: Tensor
) -> Gradients:
    """Return the vector-Jacobian products of θ = h(v; φ) with Δθ = θ - θ̃.

    Parameters
    ----------
    hypernetwork, embedding
        φ and v, shape (embedding_dim,).
    trained
        θ̃, what local training made of θ: shape (num_parameters,).
    """
    layers = tuple(
        Layer(_differentiable(layer.weight), _differentiable(layer.bias))
        for layer in hypernetwork.layers
    )
    leaves = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    leaves.append(_differentiable(embedding))
    generated = generate(Hypernetwork(layers), leaves[-1])
    change = generated.detach() - trained
    *of_layers, of_embedding = torch.autograd.grad(generated, leaves, change)
    return Gradients(tuple(of_layers), of_embedding)


def hypernetwork_step(
    hypernetwork: Hypernetwork,
    directions: Sequence[Tensor],
    learning_rate: float,
    weight_decay: float,
) -> Hypernetwork:
    """Return φ after one step of SGD against ``directions``.

    Parameters
    ----------
    hypernetwork
        φ.
    """

    def stepped(tensor: Tensor, direction: Tensor) -> Tensor:
        return tensor - learning_rate * (direction + weight_decay * tensor)

    pairs = zip(hypernetwork.layers, directions[0::2], directions[1::2], strict=True)
    return Hypernetwork(
        tuple(
            Layer(stepped(layer.weight, of_weight), stepped(layer.bias, of_bias))
            for layer, of_weight, of_bias in pairs
        )
    )


def _differentiable(tensor: Tensor) -> Tensor:
    """Return a view of ``tensor`` that autograd tracks; ``tensor`` itself is not."""
    return tensor.detach().requires_grad_()


def _new_layer(num_inputs: int, num_outputs: int) -> Layer:
    """Return a layer with torch's default: uniform in ±1/√num_inputs."""
    bound = 1 / math.sqrt(num_inputs)
    weight = torch.empty(num_outputs, num_inputs).uniform_(-bound, bound)
    return Layer(weight, torch.empty(num_outputs).uniform_(-bound, bound))

"""A network that generates the parameters of another one."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from knnper.config.seeding import RandomKey
from strategies.core.records import Record

LAST_LAYER_SCALE = 0.01
"""Size of the last layer's initial weights, relative to the other layers'."""


@dataclass(frozen=True)
class Layer(Record):
    """A linear layer.

    Attributes
    ----------
    weight
        Shape (out, in).
    bias
        Shape (out,).
    """

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Hypernetwork(Record):
    """φ: linear layers with ReLU between them.

    Attributes
    ----------
    layers
        From (embedding_dim,) to (num_parameters,).
    """

    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Gradients:
    """Vector-Jacobian products of what was generated.

    Attributes
    ----------
    layers
        (∂θ/∂φ)ᵀ Δθ: weight and bias of each layer, in order.
    embedding
        (∂θ/∂v)ᵀ Δθ, shape (embedding_dim,).
    """

    layers: tuple[Tensor, ...]
    embedding: Tensor


def new_hypernetwork(
    hidden_sizes: Sequence[int], parameters: Tensor, rng: RandomKey
) -> Hypernetwork:
    """Return φ that generates models close to ``parameters``.

    Parameters
    ----------
    hidden_sizes
        Size of the embedding, then of each hidden layer.
    parameters
        Bias of the last layer, shape (num_parameters,).
    rng
        Fixes the initial weights.
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


def gradients(
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


def step(
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
    directions
        For weight and bias of each layer, in order, as in `Gradients`.
    learning_rate, weight_decay
        Of the step.
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

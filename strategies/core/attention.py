"""Attention over the parameters of a client's nearest neighbours.

Vaswani et al., "Attention is all you need", NeurIPS 2017, Eq. 1, in the form of
fedattn.txt, Definition 3.1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import faiss
import numpy as np
import torch
from torch import Tensor

from datastore.index.single_thread import use_one_thread
from knnper.config.seeding import RandomKey
from strategies.core.records import Record


@dataclass(frozen=True)
class Attention(Record):
    """W_Q, W_K and W_V.

    Attributes
    ----------
    query, key
        W_Q and W_K, shape (d_k, p).
    value
        The diagonal of W_V, shape (d_v,): a factor for each value.
    """

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Memory(Record):
    """What is known of n clients, a row each.

    Attributes
    ----------
    representations
        Z, shape (n, p).
    values
        M, shape (n, d_v).
    """

    representations: Tensor
    values: Tensor

    def __len__(self) -> int:
        return int(self.representations.shape[0])

    def take(self, rows: Tensor) -> "Memory":
        """Return the clients in ``rows``, int64 of shape (m,)."""
        return Memory(self.representations[rows], self.values[rows])


@dataclass(frozen=True)
class KnownClients(Record):
    """A memory, and whose it is.

    Attributes
    ----------
    names
        Of the clients, sorted.
    memory
        What is known of them, in that order.
    """

    names: tuple[str, ...]
    memory: Memory

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

    Parameters
    ----------
    attention_dim, representation_dim, num_values
        d_k, p and d_v.
    rng
        Fixes W_K.
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
    memory
        One client at least.
    representation
        z, shape (p,); compared by the Euclidean distance.
    count
        K; all clients where there are fewer.
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
    attention
        The three matrices.
    representation
        z, shape (p,), of the client that asks.
    neighbors
        Z and M, of those that it attends to.
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
    attention, representation, neighbors
        What M̃ is made of, see `attend`.
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
    """Return the attention after one step of SGD against ``directions``.

    Parameters
    ----------
    attention
        W_Q, W_K and W_V.
    directions
        One of each, as `gradients` returns them.
    learning_rate
        Of the step.
    """
    matrices = (attention.query, attention.key, attention.value)
    pairs = zip(matrices, directions, strict=True)
    return Attention(*(matrix - learning_rate * along for matrix, along in pairs))

"""FedAttn: one global model, with biases that each client takes from nearby clients.

Luo, Panchal, Guan, "Personalized Federated Learning through Collaboration with Nearest
Neighbors", 2022, Algorithm 1. The server keeps a representation Z_i and the biases M_i
of each client. With N_i the K clients nearest to client i by Z,

    M̃_i = W_V M_{N_i} softmax((W_K Z_{N_i})ᵀ W_Q Z_i / √d_k)        Definition 3.1

replaces the biases of the global model. The client trains this personalised model and
returns Z_i, the mean embedding of its examples, and M_i, its biases. The next global
model is the mean of the trained models. W_Q, W_K and W_V make a step of SGD along the
gradient propagated back from M̃_i - M_i.

The report finds this unstable and suggests two remedies (section 5.3): to pull biases
towards the global biases, or to personalise biases only once the global model has
converged, while all weights continue to train. Both are settings.

Decisions where the report is silent:

- A client is among its own neighbours.
- Before its first round a client receives the global model.
- M̃_i - M_i, the local steps times their learning rate, serves as the gradient, and the
  server steps along its mean over the participants.
- The global biases are the mean of the personal biases.

Departures from the report:

- W_V is diagonal. A full matrix would have the square of the number of biases as
  entries, to be learned from one such vector for each client.
- The first remedy has no pull between the biases of different clients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import faiss
import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.datastore.index import use_one_thread
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveInt, Settings, UnitInterval
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.method import Method, wrong_shape
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.proximal import pull
from knnper.strategies.core.records import ModelUpdate, NoState, Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd


@dataclass(frozen=True)
class Attention(Record):
    """W_Q, W_K and W_V."""

    query: Tensor  # W_Q, shape (d_k, p)
    key: Tensor  # W_K, shape (d_k, p)
    value: Tensor  # the diagonal of W_V, shape (d_v,): a factor for each value


@dataclass(frozen=True)
class Memory(Record):
    """Representations and biases of n clients, one row for each."""

    representations: Tensor  # Z, shape (n, p)
    values: Tensor  # M, shape (n, d_v)

    def __len__(self) -> int:
        return int(self.representations.shape[0])


@dataclass(frozen=True)
class KnownClients(Record):
    """A memory with the names of its clients."""

    names: tuple[str, ...]  # sorted
    memory: Memory  # in the order of the names

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a client's Z_i (p,) and M_i (d_v,)."""
        row = self.names.index(name)
        return self.memory.representations[row], self.memory.values[row]

    def updated(self, news: Mapping[str, tuple[Tensor, Tensor]]) -> "KnownClients":
        """Return the clients with ``news`` of known or new clients added."""
        if not news:
            return self
        known = {name: self.of(name) for name in self.names} | dict(news)
        names = tuple(sorted(known))
        columns = zip(*(known[name] for name in names), strict=True)
        return KnownClients(names, Memory(*map(torch.stack, map(list, columns))))


def new_attention(
    attention_dim: int, representation_dim: int, num_values: int, rng: RandomKey
) -> Attention:
    """Return an attention that is initially the plain mean of the values.

    W_Q is zero, so all scores are zero. W_K is random, N(0, 1/p), so that W_Q has a
    gradient, and W_K has one from the second step on. W_V is the identity.
    """
    shape = (attention_dim, representation_dim)
    with rng.torch():
        key = torch.randn(shape) / math.sqrt(representation_dim)
    return Attention(torch.zeros(shape), key, torch.ones(num_values))


def nearest(memory: Memory, representation: Tensor, count: int) -> Memory:
    """Return the clients nearest to a representation, the nearest first.

    FAISS does not define the order of equally distant clients. All distances are
    therefore sorted again, and of equally distant clients the first rows come first.
    """
    use_one_thread()
    index = faiss.IndexFlatL2(len(representation))
    index.add(memory.representations.contiguous().numpy())
    query = representation[None].contiguous().numpy()
    distances, rows = index.search(query, len(memory))
    order = np.lexsort((rows[0], distances[0]))[:count]
    chosen = torch.from_numpy(rows[0][order])
    return Memory(memory.representations[chosen], memory.values[chosen])


def attend(attention: Attention, representation: Tensor, neighbors: Memory) -> Tensor:
    """Return W_V M softmax((W_K Z)ᵀ W_Q z / √d_k), shape (d_v,)."""
    query = attention.query @ representation
    keys = neighbors.representations @ attention.key.T
    shares = torch.softmax(keys @ query / math.sqrt(len(query)), dim=0)
    return attention.value * (shares @ neighbors.values)


def gradients(
    attention: Attention, representation: Tensor, neighbors: Memory, trained: Tensor
) -> tuple[Tensor, ...]:
    """Return (∂M̃/∂W)ᵀ ΔM̃ of W_Q, W_K and W_V, with ΔM̃ = M̃ - ``trained``."""
    leaves = [tensor.detach().requires_grad_() for tensor in vars(attention).values()]
    model = attend(Attention(*leaves), representation, neighbors)
    return torch.autograd.grad(model, leaves, model.detach() - trained)


@dataclass(frozen=True)
class FedAttnSettings(Settings):
    """The neighbours, the attention and the two remedies.

    Attributes
    ----------
    num_neighbors
        K, the client itself included; useful from 2 to 20. 1 is a client's own biases.
    attention_dim
        d_k, the size of queries and keys; useful from 8 to 128.
    attention_learning_rate
        Learning rate of the server's steps on W_Q, W_K and W_V; useful from 0.01 to 1.
        0 keeps the plain mean of the neighbours.
    bias_prox_weight
        Pull of a client's biases towards the global biases in local training, the first
        remedy; useful from 0.01 to 10. 0 switches it off.
    warm_up_fraction
        The fraction of the rounds, at the start, that are FedAvg's, the second remedy;
        1 is FedAvg.
    """

    num_neighbors: PositiveInt = 10
    attention_dim: PositiveInt = 32
    attention_learning_rate: NonNegativeFloat = 0.1
    bias_prox_weight: NonNegativeFloat = 0.0
    warm_up_fraction: UnitInterval = 0.0


@dataclass(frozen=True)
class FedAttnState(Record):
    """The server's state."""

    weights: Tensor  # G, shape (num_weights,)
    attention: Attention  # W_Q, W_K and W_V
    known: KnownClients  # Z and M of the clients that took part since the warm-up
    num_rounds: int  # rounds made


@dataclass(frozen=True)
class FedAttnPayload(Record):
    """The payload of a client."""

    weights: Tensor  # P_i, shape (num_weights,); G for a client without Z_i and M_i
    biases: Tensor  # G's, shape (num_biases,)
    # After the last round a client that never took part computes M̃_i itself, from the
    # matrices and from Z and M of the others. None for all other payloads.
    attention: Attention | None = None
    memory: Memory | None = None


@dataclass(frozen=True)
class FedAttnUpdate(ModelUpdate):
    """The update of a client: the trained P_i, with M_i as its biases."""

    representation: Tensor | None = None  # Z_i, shape (p,); None during the warm-up


class FedAttn(Method):
    """One model, with biases that each client takes from the nearest clients."""

    title = "FedAttn"
    needs_num_rounds = "its warm-up is a part of all rounds"
    needs_sgd = "its proximal step is that of SGD in closed form"
    source = "Luo, Panchal, Guan 2022, Algorithm 1"
    download = "1 (an unseen client: representation and biases of all seen clients)"
    server_state = "1, and representation and biases of all seen clients"
    unseen = "the model with biases of the seen clients nearest to its own data"
    reference_title = "FedAttn (global)"
    ends_with_global_model = True
    state_type = FedAttnState
    payload_type = FedAttnPayload
    update_type = FedAttnUpdate

    settings: FedAttnSettings

    def __init__(self, task: Task, settings: FedAttnSettings) -> None:
        super().__init__(task, settings)
        self._where = bias_mask(task)
        self._embedding_dim = task.model.module.embedding_dim
        self._num_warm_up = round(settings.warm_up_fraction * task.training.num_rounds)

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> FedAttnState:
        embedding_dim, num_biases = self._embedding_dim, int(self._where.sum())
        attention = new_attention(
            self.settings.attention_dim,
            embedding_dim,
            num_biases,
            rng.child("attention"),
        )
        nothing = Memory(torch.empty(0, embedding_dim), torch.empty(0, num_biases))
        known = KnownClients((), nothing)
        return FedAttnState(self.task.initial_weights, attention, known, num_rounds=0)

    @override
    def broadcast(
        self, state: FedAttnState, client_id: str, rng: RandomKey
    ) -> FedAttnPayload:
        is_over = state.num_rounds >= self.task.training.num_rounds
        weights, biases = state.weights, state.weights[self._where]
        if client_id in state.known.names:
            representation, neighbors = self._neighborhood(state, client_id)
            personal = attend(state.attention, representation, neighbors)
            return FedAttnPayload(weights.masked_scatter(self._where, personal), biases)
        if is_over and state.known.names:
            return FedAttnPayload(weights, biases, state.attention, state.known.memory)
        return FedAttnPayload(weights, biases)

    @override
    def client_update(
        self,
        payload: FedAttnPayload,
        client_state: NoState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[NoState, FedAttnUpdate]:
        rate = self.task.training.learning_rate_at(server_round)
        is_personal = server_round > self._num_warm_up and len(data.train) > 0
        start, examples = payload.weights, data.train
        center = start.masked_scatter(self._where, payload.biases)
        weight = self.settings.bias_prox_weight if is_personal else 0.0
        hook = pull(center, weight, rate, self.task.training.weight_decay, self._where)
        trained = local_sgd(self.task, start, examples, rate, rng, gradient_hook=hook)
        weights, loss = trained.weights, trained.train_loss
        mean = self._representation(weights, examples) if is_personal else None
        return NoState(), FedAttnUpdate(weights, len(examples), loss, mean)

    @override
    def personalize(
        self,
        payload: FedAttnPayload,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> ModelPredictor:
        weights = payload.weights
        if data.num_examples == 0:
            weights = weights.masked_scatter(self._where, payload.biases)
        elif (
            payload.memory is not None and payload.attention is not None and data.train
        ):
            representation = self._representation(weights, data.train)
            neighbors = nearest(
                payload.memory, representation, self.settings.num_neighbors
            )
            biases = attend(payload.attention, representation, neighbors)
            weights = weights.masked_scatter(self._where, biases)
        return ModelPredictor(self.task, weights)

    @override
    def update_problem(
        self, payload: FedAttnPayload, update: FedAttnUpdate
    ) -> str | None:
        return wrong_shape(update, representation=(self._embedding_dim,))

    def _representation(self, weights: Tensor, examples: Examples) -> Tensor:
        """Return Z, the mean embedding of examples, shape (p,)."""
        return self.task.embed(weights, examples.images).mean(dim=0)

    def _neighborhood(self, state: FedAttnState, client: str) -> tuple[Tensor, Memory]:
        """Return Z_i of a known client, and Z and M of its neighbours."""
        representation, _ = state.known.of(client)
        return representation, nearest(
            state.known.memory, representation, self.settings.num_neighbors
        )

    @override
    def aggregate(
        self, state: FedAttnState, updates: Updates[FedAttnUpdate]
    ) -> FedAttnState:
        models, slopes = RunningMean(), [RunningMean() for _ in range(3)]
        attention, news = state.attention, {}
        for client, update in updates:
            models.add(update.weights, update.num_examples)
            if update.representation is None:
                continue
            biases = update.weights[self._where]
            news[client] = (update.representation, biases)
            if client in state.known.names:
                representation, neighbors = self._neighborhood(state, client)
                client_gradients = gradients(
                    attention, representation, neighbors, biases
                )
                for slope, tensor in zip(slopes, client_gradients, strict=True):
                    slope.add(tensor, 1)
        if not news.keys().isdisjoint(state.known.names):
            rate = self.settings.attention_learning_rate
            steps = zip(vars(attention).values(), slopes, strict=True)
            attention = Attention(
                *(tensor - rate * slope.result() for tensor, slope in steps)
            )
        known = state.known.updated(news)
        return FedAttnState(models.result(), attention, known, state.num_rounds + 1)


def bias_mask(task: Task) -> Tensor:
    """Return a mask of all biases, bool of shape (num_weights,).

    torch names them ``bias``, and those of an LSTM ``bias_ih_l0`` and ``bias_hh_l0``.
    """
    mask = torch.zeros(task.model.num_weights, dtype=torch.bool)
    for entry in task.model.entries:
        is_bias = entry.is_parameter and entry.key.startswith("bias")
        mask[entry.start : entry.stop] = is_bias
    return mask

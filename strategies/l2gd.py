"""L2GD: every client trains a model of its own and, by chance, steps towards the mean.

Hanzely, Richtárik, "Federated Learning of a Mixture of Global and Local Models", 2020,
Algorithm 1; a baseline of Chen et al. 2023, Table 6. It minimises what Fed-MTL does,
(1/n) Σ_m (f_m(x_m) + λ/2 ||x_m - x̄||²), but each step is on one of the two terms. A
coin that is the same for all clients decides. With the rate η = α/n:

    tails (1 - p)   x_m ← x_m - η/(1 - p) ∇f_m(x_m)
    heads (p)       x_m ← (x_m + s x̄) / (1 + s),  s = η λ / p, the paper's α λ / (n p)

A round is one communication: a client gets x̄, throws the coin for each of its local
steps and sends x_m. The coins follow from the round and a seed that the server keeps,
so step k has the same coin at every client. With one local step a round and full
participation the rounds are the paper's iterations; its communications are rarer than
these, as x̄ is needed only at heads after tails.

With p = 0 every coin is tails, the rate is η, and nobody steps towards x̄: what the
server sends is where a client starts on its first visit, and no more. With full
participation that is the common initial weights, so a client's model is exactly
`local`'s of the training split, given the same random keys. In the end clients are
served as by `fed_mtl`.

Departures: within a round x̄ is the mean at its start, over the clients that replied in
the last one, weighted by their examples. Heads are a proximal step, which equals the
paper's x_m - s (x_m - x̄) to first order in s and does not diverge where s > 2. ∇f_m is
of a mini-batch, and weight decay a part of f_m. At heads a mini-batch is passed through
the model too, for its loss alone. Buffers such as BatchNorm's running statistics are
the client's own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveInt, ProperFraction
from knnper.strategies.core.averaging import Updates, average_weights
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.strategies.core.training import LocalModel, LocalStep
from knnper.strategies.fed_mtl import FedMTL, FedMTLSettings


@dataclass(frozen=True)
class L2GDSettings(FedMTLSettings):
    """How near the clients' models stay to each other, and how they get there.

    Attributes
    ----------
    prox_weight
        λ; 0 never steps towards the mean.
    aggregation_probability
        p, of a step towards the mean; 0 is local training. The paper's best p grows
        with λ: λ / (L + λ), where L is the smoothness of the loss.
    """

    prox_weight: NonNegativeFloat = 1.0
    aggregation_probability: ProperFraction = 0.2
    unseen_epochs: PositiveInt = 10


@dataclass(frozen=True)
class L2GDState(ModelPayload):
    """The server's state, and what every client gets."""

    seed: int  # Of the coins


class L2GD(FedMTL):
    """Each client trains a model of its own and, by chance, nears the mean."""

    title = "L2GD"
    source = "Hanzely and Richtárik 2020, Algorithm 1; Chen et al. 2023, Table 6"
    reference_title = "L2GD (mean model)"
    state_type = L2GDState
    payload_type = L2GDState

    settings: L2GDSettings

    def init(self, clients: Sequence[str], rng: RandomKey) -> L2GDState:
        seed = rng.child("coins").entropy(num_bytes=6)
        return L2GDState(self.task.initial_weights, seed)

    def how(self, payload: L2GDState, rate: float, server_round: int) -> dict[str, Any]:
        model, probability = self.task.model, self.settings.aggregation_probability
        step = coin_step(
            payload.weights[: model.num_parameters].to(model.device),
            coins(payload.seed, server_round, probability),
            self.settings,
        )
        return {"local_step": step}

    def aggregate(self, state: L2GDState, updates: Updates[ModelUpdate]) -> L2GDState:
        return replace(state, weights=average_weights(updates).weights)


def coins(seed: int, server_round: int, probability: float) -> Iterator[bool]:
    """Yield for each local step of a round, without end, whether it is heads."""
    generator = RandomKey(seed).child("round", server_round).numpy()
    while True:
        yield bool(generator.random() < probability)


def coin_step(mean: Tensor, heads: Iterator[bool], settings: L2GDSettings) -> LocalStep:
    """Return one iteration of Algorithm 1 as a local step."""
    probability = settings.aggregation_probability

    def step(model: LocalModel) -> Tensor:
        loss = model.backward(model.next_batch())
        if next(heads):
            size = model.learning_rate * settings.prox_weight / probability
            model.parameters.lerp_(mean, size / (1 + size))
        else:
            # A step along (∇f_m + d x_m) / (1 - p), d the weight decay, of which the
            # optimizer adds d x_m itself: (∇f_m + p d x_m) / (1 - p) is the rest.
            decay = model.task.training.weight_decay
            model.gradient.add_(model.parameters, alpha=probability * decay)
            model.gradient.div_(1 - probability)
            model.step()
        return loss

    return step

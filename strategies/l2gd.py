"""L2GD: each client trains its own model and, by chance, steps towards the mean.

Hanzely, Richtárik, "Federated Learning of a Mixture of Global and Local Models", 2020,
Algorithm 1; a baseline of Chen et al. 2023, Table 6. L2GD minimises the objective of
Fed-MTL, (1/n) Σ_m (f_m(x_m) + λ/2 ||x_m - x̄||²), but each step acts on one of the two
terms. A coin toss that is common to all clients decides. With the rate η = α/n:

    tails (1 - p)   x_m ← x_m - η/(1 - p) ∇f_m(x_m)
    heads (p)       x_m ← (x_m + s x̄) / (1 + s),  s = η λ / p, the paper's α λ / (n p)

A round is one communication: a client receives x̄, tosses the coin for each of its local
steps and sends x_m. The coins derive from the round and a seed of the server, so that
step k has the same coin at every client. With one local step a round and full
participation the rounds are the paper's iterations; the paper communicates less often,
since x̄ is needed only at heads after tails.

With p = 0 every coin is tails, the rate is η, and no client steps towards x̄, which then
is only the start of a client in its first round. With full participation a client's
model is that of `local` on the training split, for the same random keys. Clients are
served as by `fed_mtl`.

Departures from the paper:

- Within a round x̄ is the mean at its start, over the clients that replied in the last
  one, weighted by their examples.
- Heads make a proximal step. It equals the paper's x_m - s (x_m - x̄) to first order in
  s and does not diverge for s > 2.
- ∇f_m is computed on a mini-batch, and weight decay is a part of f_m. At heads a
  mini-batch passes through the model too, for its loss alone.
- Buffers such as BatchNorm's running statistics stay with the client.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from typing_extensions import override

from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveInt, ProperFraction
from knnper.strategies.core.averaging import Updates, average_weights
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.strategies.core.training import LocalModel, LocalStep
from knnper.strategies.fed_mtl import FedMTL, FedMTLSettings


@dataclass(frozen=True)
class L2GDSettings(FedMTLSettings):
    """The pull of the clients' models towards their mean, and its probability.

    Attributes
    ----------
    prox_weight
        λ; useful from 0.001 to 10. 0 never steps towards the mean.
    aggregation_probability
        p, the probability of a step towards the mean; 0 is local training. The paper's
        best p grows with λ: λ / (L + λ), where L is the smoothness of the loss.
    """

    prox_weight: NonNegativeFloat = 1.0
    aggregation_probability: ProperFraction = 0.2
    unseen_epochs: PositiveInt = 10


@dataclass(frozen=True)
class L2GDState(ModelPayload):
    """The state of the server, and the payload of every client."""

    seed: int  # of the coins


class L2GD(FedMTL):
    """Each client trains its own model and, by chance, steps towards the mean."""

    title = "L2GD"
    source = "Hanzely and Richtárik 2020, Algorithm 1; Chen et al. 2023, Table 6"
    reference_title = "L2GD (mean model)"
    takes_mean = True
    state_type = L2GDState
    payload_type = L2GDState

    settings: L2GDSettings

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> L2GDState:
        seed = rng.child("coins").entropy(num_bytes=6)
        return L2GDState(self.task.initial_weights, seed)

    @override
    def training_options(
        self, payload: L2GDState, rate: float, server_round: int
    ) -> dict[str, Any]:
        model, probability = self.task.model, self.settings.aggregation_probability
        step = coin_step(
            payload.weights[: model.num_parameters].to(model.device),
            coins(payload.seed, server_round, probability),
            self.settings,
        )
        return {"local_step": step}

    @override
    def aggregate(self, state: L2GDState, updates: Updates[ModelUpdate]) -> L2GDState:
        return replace(state, weights=average_weights(updates).weights)


def coins(seed: int, server_round: int, probability: float) -> Iterator[bool]:
    """Yield whether the coin of each local step of a round is heads, without end."""
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
            # A step along (∇f_m + d x_m) / (1 - p), with weight decay d. The optimizer
            # adds d x_m itself, so the gradient must be (∇f_m + p d x_m) / (1 - p).
            decay = model.task.training.weight_decay
            model.gradient.add_(model.parameters, alpha=probability * decay)
            model.gradient.div_(1 - probability)
            model.step()
        return loss

    return step

"""Krum, Multi-Krum and Bulyan: the server selects models close to their neighbours.

Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine
Tolerant Gradient Descent", NeurIPS 2017, sections 4 and 5. The paper compares
gradients; here models are compared, with the same differences. Of n clients, f of them
malicious, with n ≥ 2 f + 3,

    s(k) = Σ_{i → k} |w_k - w_i|²    over the n - f - 2 models closest to w_k
    w ← w_k with the smallest s(k)                                             (Krum)
    w ← the mean of the m models with the smallest s(k)                  (Multi-Krum)

El Mhamdi, Guerraoui, Rouault, "The Hidden Vulnerability of Distributed Learning in
Byzantium", ICML 2018, section 4 (Bulyan), with A = Krum and n ≥ 4 f + 3:

1. Krum's choice among the remaining models joins the selection S, θ = n - 2 f times.
2. Each weight is the mean of the β = θ - 2 f values in S closest to their median.

The server holds all updates of a round at once. Distances cover all weights, buffers
such as BatchNorm's running statistics too, because the server adopts all of them. Ties
of scores go to the first client.

Departure from the paper: Multi-Krum's mean weights the selected models by their
examples, as Flower does, so that m = n is FedAvg. In the paper, and in Bulyan, each
counts the same.

Flower's methods of these names differ:

- They do not require these numbers of clients, nor n ≥ m (its `Bulyan` keeps the old
  model); here a round with fewer clients is an error.
- Flower's `Bulyan` takes the θ best scores of one run of Krum. The paper, and
  `iterated_krum`, run Krum again after each selection. Towards the end fewer than
  2 f + 3 models remain, and Krum compares each with one neighbour.
- Ties in Flower depend on the processor that sorts the scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from knnper.seeding import RandomKey
from knnper.settings import NonNegativeInt, PositiveInt, Settings
from knnper.strategies.core.averaging import (
    RunningMean,
    Updates,
    hold,
    mean_around_median,
    require,
    squared_distances,
)
from knnper.strategies.core.records import ModelState, ModelUpdate
from knnper.strategies.fedavg import FedAvg


@dataclass(frozen=True)
class KrumSettings(Settings):
    """The number of malicious clients that the server expects.

    Attributes
    ----------
    num_malicious
        f, the clients in a round that may send anything; at most (n - 3) / 2 of n, for
        Bulyan (n - 3) / 4. 0 expects none; Bulyan is then the plain mean.
    """

    num_malicious: NonNegativeInt = 0


class Krum(FedAvg):
    """The model of the client that is closest to its neighbours."""

    title = "Krum"
    source = "Blanchard et al. 2017, section 4"
    holds_all_updates = True

    settings: KrumSettings

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> ModelState:
        self.require_enough(len(clients))
        return ModelState(self.task.initial_weights)

    @override
    def aggregate(self, state: ModelState, updates: Updates[ModelUpdate]) -> ModelState:
        held = hold(updates)
        self.require_enough(len(held))
        return ModelState(self.combined(held))

    def require_enough(self, num_clients: int) -> None:
        """Raise RunError unless there are enough clients, n ≥ 2 f + 3."""
        f = self.settings.num_malicious
        require(2 * f + 3, num_clients, f"2 f + 3 with f = {f}")

    def combined(self, held: Sequence[ModelUpdate]) -> Tensor:
        """Combine all updates, sorted by client, to w of the next round."""
        best, *_ = lowest(squared_distances(held), self.settings.num_malicious)
        return held[best].weights


@dataclass(frozen=True)
class MultiKrumSettings(KrumSettings):
    """The number of malicious clients, and of those that are averaged.

    Attributes
    ----------
    num_selected
        m, the clients that are averaged; null is n - f of the n in a round, all that
        are expected to be honest.
    """

    num_selected: PositiveInt | None = None


class MultiKrum(Krum):
    """The mean of the models that are closest to their neighbours."""

    name = "multikrum"
    title = "Multi-Krum"
    source = "Blanchard et al. 2017, section 5"

    settings: MultiKrumSettings

    @override
    def require_enough(self, num_clients: int) -> None:
        super().require_enough(num_clients)
        least = self.settings.num_selected or 0
        require(least, num_clients, f"method.num_selected is {least}")

    @override
    def combined(self, held: Sequence[ModelUpdate]) -> Tensor:
        num_malicious = self.settings.num_malicious
        num_selected = self.settings.num_selected or len(held) - num_malicious
        mean = RunningMean()
        for position in lowest(squared_distances(held), num_malicious)[:num_selected]:
            mean.add(held[position].weights, held[position].num_examples)
        return mean.result()


class Bulyan(Krum):
    """Krum chooses models, and their values near the median are averaged."""

    name = "bulyan"
    title = "Bulyan"
    source = "El Mhamdi et al. 2018, section 4"

    @override
    def require_enough(self, num_clients: int) -> None:
        f = self.settings.num_malicious
        require(4 * f + 3, num_clients, f"4 f + 3 with f = {f}")

    @override
    def combined(self, held: Sequence[ModelUpdate]) -> Tensor:
        num_malicious = self.settings.num_malicious
        selected = iterated_krum(squared_distances(held), num_malicious)
        chosen = [held[position] for position in selected]
        return mean_around_median(chosen, len(chosen) - 2 * num_malicious)


def lowest(distances: NDArray[np.float64], num_malicious: int) -> list[int]:
    """Return the positions of n clients by ascending score, ties in client order."""
    num_closest = max(1, len(distances) - num_malicious - 2)
    # Without the first column: the closest model is the client's own.
    closest = np.sort(distances, axis=1)[:, 1 : num_closest + 1]
    order: list[int] = np.argsort(closest.sum(axis=1), kind="stable").tolist()
    return order


def iterated_krum(distances: NDArray[np.float64], num_malicious: int) -> list[int]:
    """Return the θ = n - 2 f positions that Krum selects, one after the other."""
    remaining, selected = list(range(len(distances))), []
    for _ in range(len(distances) - 2 * num_malicious):
        best = lowest(distances[np.ix_(remaining, remaining)], num_malicious)[0]
        selected.append(remaining.pop(best))
    return selected

"""Krum: the one client's model that is closest to its neighbours.

Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine
Tolerant Gradient Descent", NeurIPS 2017, section 4, on models where the paper has
gradients (their differences are the same). Of n clients, f of them bad, n ≥ 2 f + 3,

    s(k) = Σ_{i → k} |w_k - w_i|²    over the n - f - 2 models closest to w_k
    w ← w_k with the smallest s(k)

All updates of a round are held at once.

Flower's `Krum` does not ask for n ≥ 2 f + 3; here a round of fewer is an error.
Distances cover all weights, buffers such as BatchNorm's running statistics too: what
the server takes over must not differ from what it compared. Of equal scores the first
client's wins; in Flower it may be another's, depending on the processor that sorts
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnper.experiment import NonNegativeInt, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import Updates, hold, require, squared_distances
from knnper.strategies.core.records import ModelState, ModelUpdate
from knnper.strategies.fedavg import FedAvg


@dataclass(frozen=True)
class KrumSettings(Settings):
    """Whom the server expects.

    Attributes
    ----------
    num_malicious
        f, clients in a round that may send anything; at most (n - 3) / 2 of n. The
        paper has a third or fewer. 0 expects none.
    """

    num_malicious: NonNegativeInt = 0


class Krum(FedAvg):
    """The one client's model that is closest to its neighbours."""

    title = "Krum"
    source = "Blanchard et al. 2017, section 4"
    holds_all_updates = True

    settings: KrumSettings

    def init(self, clients: Sequence[str], rng: RandomKey) -> ModelState:
        self.require_enough(len(clients))
        return ModelState(self.task.initial_weights)

    def aggregate(self, state: ModelState, updates: Updates[ModelUpdate]) -> ModelState:
        held = hold(updates)
        self.require_enough(len(held))
        return ModelState(self.combined(held))

    def require_enough(self, num_clients: int) -> None:
        """Raise an error unless n ≥ 2 f + 3."""
        f = self.settings.num_malicious
        require(2 * f + 3, num_clients, f"2 f + 3 with f = {f}")

    def combined(self, held: Sequence[ModelUpdate]) -> Tensor:
        """Return w of the next round from all updates, sorted by client."""
        best, *_ = lowest(squared_distances(held), self.settings.num_malicious)
        return held[best].weights


def lowest(distances: NDArray[np.float64], num_malicious: int) -> list[int]:
    """Return the positions of n clients by their score, of equals the first first.

    ``distances``: Squared, shape (n, n).
    """
    num_closest = max(1, len(distances) - num_malicious - 2)
    # The closest is the client itself.
    closest = np.sort(distances, axis=1)[:, 1 : num_closest + 1]
    order: list[int] = np.argsort(closest.sum(axis=1), kind="stable").tolist()
    return order

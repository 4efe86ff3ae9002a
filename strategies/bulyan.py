"""Bulyan: Krum chooses models, and their values near the median are averaged.

El Mhamdi, Guerraoui, Rouault, "The Hidden Vulnerability of Distributed Learning in
Byzantium", ICML 2018, section 4, with A = Krum, on models where the paper has
gradients. Of n clients, f of them bad, with n ≥ 4 f + 3:

1. Krum's choice among those that are left joins the selection S, θ = n - 2 f times.
2. Each weight is the mean of the β = θ - 2 f values in S closest to their median.

Flower's `Bulyan` takes the θ best scores of one run of Krum; the paper runs Krum anew
each time one has been taken away, and so does `iterated_krum`. Towards the end fewer
than 2 f + 3 are left; Krum then still looks at one neighbour.

Flower keeps the old model where n < 4 f + 3; here it is an error. Every client counts
the same, as in the paper. Distances and means cover all weights, buffers such as
BatchNorm's running statistics too: a mean lies between what clients sent. All updates
of a round are held at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnper.strategies.core.averaging import (
    mean_around_median,
    require,
    squared_distances,
)
from knnper.strategies.core.records import ModelUpdate
from knnper.strategies.krum import Krum, KrumSettings, lowest


@dataclass(frozen=True)
class BulyanSettings(KrumSettings):
    """Whom the server expects.

    Attributes
    ----------
    num_malicious
        f, clients in a round that may send anything; at most (n - 3) / 4 of n. 0
        expects none: then the mean of all clients is left, each counting the same.
    """


class Bulyan(Krum):
    """Krum chooses models, and their values near the median are averaged."""

    title = "Bulyan"
    source = "El Mhamdi et al. 2018, section 4"

    settings: BulyanSettings

    def require_enough(self, num_clients: int) -> None:
        f = self.settings.num_malicious
        require(4 * f + 3, num_clients, f"4 f + 3 with f = {f}")

    def combined(self, held: Sequence[ModelUpdate]) -> Tensor:
        num_malicious = self.settings.num_malicious
        selected = iterated_krum(squared_distances(held), num_malicious)
        chosen = [held[position] for position in selected]
        return mean_around_median(chosen, len(chosen) - 2 * num_malicious)


def iterated_krum(distances: NDArray[np.float64], num_malicious: int) -> list[int]:
    """Return the θ = n - 2 f positions that Krum chooses, one after the other.

    ``distances``: Squared, shape (n, n).
    """
    left = list(range(len(distances)))
    selected = []
    for _ in range(len(distances) - 2 * num_malicious):
        best = lowest(distances[np.ix_(left, left)], num_malicious)[0]
        selected.append(left.pop(best))
    return selected

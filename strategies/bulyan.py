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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from knnper.experiment import NonNegativeInt, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import hold, require
from knnper.strategies.core.method import Method, MethodSpec, NoSettings
from knnper.strategies.core.records import ModelState, ModelUpdate
from knnper.strategies.core.robust import mean_around_median, squared_distances
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import fedavg
from knnper.strategies.krum import lowest


@dataclass(frozen=True)
class BulyanSettings(Settings):
    """Whom the server expects.

    Attributes
    ----------
    num_malicious
        f, clients in a round that may send anything; at most (n - 3) / 4 of n. 0
        expects none: then the mean of all clients is left, each counting the same.
    """

    num_malicious: NonNegativeInt = 0


def bulyan(task: Task, settings: BulyanSettings) -> Method:
    """Return Bulyan on ``task``."""
    base, num_malicious = fedavg(task, NoSettings()), settings.num_malicious

    def init(clients: Sequence[str], rng: RandomKey) -> ModelState:
        _require_enough(len(clients), num_malicious)
        state: ModelState = base.init(clients, rng)
        return state

    def aggregate(
        state: ModelState, updates: Iterable[tuple[str, ModelUpdate]]
    ) -> ModelState:
        held = hold(updates)
        _require_enough(len(held), num_malicious)
        selected = iterated_krum(squared_distances(held), num_malicious)
        chosen = [held[position] for position in selected]
        num_closest = len(chosen) - 2 * num_malicious
        return ModelState(mean_around_median(chosen, num_closest))

    return replace(base, init=init, aggregate=aggregate)


def iterated_krum(distances: NDArray[np.float64], num_malicious: int) -> list[int]:
    """Return the θ = n - 2 f positions that Krum chooses, one after the other.

    Parameters
    ----------
    distances
        Squared, shape (n, n).
    num_malicious
        f.
    """
    left = list(range(len(distances)))
    selected = []
    for _ in range(len(distances) - 2 * num_malicious):
        best = lowest(distances[np.ix_(left, left)], num_malicious)[0]
        selected.append(left.pop(best))
    return selected


def _require_enough(num_clients: int, num_malicious: int) -> None:
    reason = f"4 f + 3 with f = {num_malicious}"
    require(4 * num_malicious + 3, num_clients, reason)


SPEC = MethodSpec(
    title="Bulyan",
    summary="Krum chooses models, and their values near the median are averaged.",
    source="El Mhamdi et al. 2018, section 4",
    build=bulyan,
    upload="1",
    download="1",
    client_state="0",
    server_state="1",
    unseen="the global model",
    reference_title="Bulyan",
    settings_type=BulyanSettings,
    holds_all_updates=True,
    ends_with_global_model=True,
)

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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from knnper.experiment import NonNegativeInt, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import hold, require
from knnper.strategies.core.method import Method, MethodSpec, NoSettings
from knnper.strategies.core.records import ModelState, ModelUpdate
from knnper.strategies.core.robust import squared_distances
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import fedavg


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


def krum(task: Task, settings: KrumSettings) -> Method:
    """Return Krum on ``task``."""
    base = fedavg(task, NoSettings())

    def init(clients: Sequence[str], rng: RandomKey) -> ModelState:
        require_neighbours(len(clients), settings.num_malicious)
        state: ModelState = base.init(clients, rng)
        return state

    def aggregate(
        state: ModelState, updates: Iterable[tuple[str, ModelUpdate]]
    ) -> ModelState:
        held = hold(updates)
        require_neighbours(len(held), settings.num_malicious)
        best, *_ = lowest(squared_distances(held), settings.num_malicious)
        return ModelState(held[best].weights)

    return replace(base, init=init, aggregate=aggregate)


def lowest(distances: NDArray[np.float64], num_malicious: int) -> list[int]:
    """Return the positions of n clients by their score, of equals the first first.

    Parameters
    ----------
    distances
        Squared, shape (n, n).
    num_malicious
        f. One neighbour counts where n - f - 2 is less.
    """
    num_closest = max(1, len(distances) - num_malicious - 2)
    # The closest is the client itself.
    closest = np.sort(distances, axis=1)[:, 1 : num_closest + 1]
    order: list[int] = np.argsort(closest.sum(axis=1), kind="stable").tolist()
    return order


def require_neighbours(num_clients: int, num_malicious: int) -> None:
    """Raise an error unless n ≥ 2 f + 3."""
    reason = f"2 f + 3 with f = {num_malicious}"
    require(2 * num_malicious + 3, num_clients, reason)


SPEC = MethodSpec(
    title="Krum",
    summary="The one client's model that is closest to its neighbours.",
    source="Blanchard et al. 2017, section 4",
    build=krum,
    upload="1",
    download="1",
    client_state="0",
    server_state="1",
    unseen="the global model",
    reference_title="Krum",
    settings_type=KrumSettings,
    holds_all_updates=True,
    ends_with_global_model=True,
)

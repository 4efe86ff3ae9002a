"""Clustered FL: clusters of clients are split in two where the updates diverge.

Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed
Multi-Task Optimization under Privacy Constraints", 2019 (IEEE TNNLS 2020), Algorithms
1 to 5; a baseline of Marfoq et al. 2022, section 5, with the tolerances of the official
implementation. Each cluster c runs FedAvg. With Δ_i = w_i - w_c, of parameters only, it
is split in two after a round in which

    |Σ_i (n_i / Σ n) Δ_i| < ε_1    and    max_i |Δ_i| > ε_2

that is, when the cluster's model is stationary but single clients still move it. The
split minimises α_cross, the largest cosine of two updates in different parts (Algorithm
1). The parts must differ by more than the noise of the updates:
√((1 - α_cross) / 2) > γ_max.

Departures from the papers:

- In the papers all clients take part in every round. Here a cluster is split by its
  members that replied. A member that did not reply, or a client that never took part,
  behaves like an unseen client (Marfoq et al. 2022, "Generalization to unseen
  clients"): it receives all models and joins the cluster with the lowest loss on its
  validation split. The papers send new clients down the tree of splits by the cosines
  of their updates; the server stores no such tree.
- γ_max is one setting; the paper estimates the noise of each client.
- The parts start from their own means in the round in which the cluster is split.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.seeding import RandomKey
from knnper.settings import (
    NonNegativeFloat,
    PositiveInt,
    ProperFraction,
    Settings,
)
from knnper.strategies.core.averaging import Updates, average_weights, denominator
from knnper.strategies.core.records import Record
from knnper.strategies.hypcluster import ClusterMethod, ClusterModels, ClusterUpdate

_SAME_DIRECTION = 1 - 1e-6  # cosines closer to 1 differ by rounding of float32 only
_SLICE = 2**13  # coordinates of each vector in float64 at once


@dataclass(frozen=True)
class ClusteredFLSettings(Settings):
    """The conditions under which a cluster is split in two.

    Attributes
    ----------
    mean_norm_tolerance
        ε_1 (tol1), below which the norm of the mean update counts as stationary; 0.4
        in the official implementation. 0 never splits.
    client_norm_tolerance
        ε_2 (tol2), which the largest norm of a client's update must exceed; 1.6 in the
        official implementation. Null is infinite: it never splits, which is FedAvg.
    separation_gap
        γ_max, [0, 1), which √((1 - α_cross) / 2) must exceed. 0 splits whenever
        α_cross is below 1 - 10⁻⁶, as in the official implementation.
    min_cluster_size
        The fewest clients of either part, which bounds the number of clusters.
    """

    mean_norm_tolerance: NonNegativeFloat = 0.4
    client_norm_tolerance: NonNegativeFloat | None = 1.6
    separation_gap: ProperFraction = 0.0
    min_cluster_size: PositiveInt = 1


@dataclass(frozen=True)
class ClustersState(Record):
    """The server's state."""

    models: tuple[Tensor, ...]  # w_c of each cluster, tensors of shape (num_weights,)
    # The cluster of each client that belongs to one, by name.
    cluster_of: dict[str, int]


Replies = Sequence[tuple[str, ClusterUpdate]]


class ClusteredFL(ClusterMethod):
    """Clusters of clients with one model each, split where the updates diverge."""

    title = "Clustered FL"
    source = "Sattler et al. 2019, Algorithms 1 to 5; Marfoq et al. 2022, section 5"
    download = "1 (without a cluster: one for each)"
    server_state = "one for each cluster"
    unseen = "the cluster model with the lowest loss on its validation split"
    reference_title = "Clustered FL (largest cluster)"
    # Once a cluster has split, its clients are sent different models.
    personalizes_by_inference = False
    holds_all_updates = True
    state_type = ClustersState

    settings: ClusteredFLSettings

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> ClustersState:
        return ClustersState((self.task.initial_weights,), {})

    @override
    def compared(self, data: ClientData, is_training: bool) -> Sequence[Examples]:
        return (data.validation if len(data.validation) else data.train,)

    @override
    def broadcast(
        self, state: ClustersState, client_id: str, rng: RandomKey
    ) -> ClusterModels:
        cluster = state.cluster_of.get(client_id)
        if cluster is not None:
            return ClusterModels((state.models[cluster],), (cluster,), 0)
        sizes = Counter(state.cluster_of.values())
        numbers = tuple(range(len(state.models)))
        largest = max(numbers, key=lambda number: sizes[number])
        return ClusterModels(state.models, numbers, largest)

    @override
    def aggregate(
        self, state: ClustersState, updates: Updates[ClusterUpdate]
    ) -> ClustersState:
        replied = list(updates)
        models, cluster_of = list(state.models), dict(state.cluster_of)
        for number, model in enumerate(state.models):
            replies = [
                (client, update)
                for client, update in replied
                if state.cluster_of.get(client, update.cluster) == number
            ]
            leaving = self._leaving(model, replies)
            if leaving:
                # Members that did not reply choose a cluster in their next round.
                cluster_of = {
                    c: cluster for c, cluster in cluster_of.items() if cluster != number
                }
            for place, is_leaving in ((number, False), (len(models), True)):
                part = [
                    reply for reply in replies if (reply[0] in leaving) is is_leaving
                ]
                if part:
                    models[place : place + 1] = [average_weights(part).weights]
                    cluster_of |= {client: place for client, _ in part}
        return ClustersState(tuple(models), cluster_of)

    def _leaving(self, model: Tensor, replies: Replies) -> frozenset[str]:
        """Return the clients that leave for a new cluster; empty without a split."""
        if len(replies) < 2 * self.settings.min_cluster_size:
            return frozenset()
        # Sorted by name, so that the split does not depend on the order of replies.
        by_name = sorted(replies, key=lambda reply: reply[0])
        parameters = slice(0, self.task.model.num_parameters)
        start = model[parameters]
        moves = torch.stack([update.weights[parameters] for _, update in by_name])
        moves -= start
        mean = average_weights(by_name).weights[parameters] - start
        norms = torch.linalg.vector_norm(moves, dim=1)
        mean_norm, norm = float(torch.linalg.vector_norm(mean)), float(norms.max())
        settings, least = self.settings, self.settings.client_norm_tolerance
        may_move = least is not None and norm > least
        if not (mean_norm < settings.mean_norm_tolerance and may_move):
            return frozenset()
        first, second, cross_similarity = bipartition(cosines(moves))
        separation = math.sqrt(max(0.0, (1 - cross_similarity) / 2))
        is_clear = (
            cross_similarity < _SAME_DIRECTION
            and separation > settings.separation_gap
            and min(len(first), len(second)) >= settings.min_cluster_size
        )
        return frozenset(by_name[p][0] for p in second) if is_clear else frozenset()


def cosines(vectors: Tensor) -> Tensor:
    """Return the cosines of all pairs of vectors, float64 of shape (n, n).

    Cosines of parallel vectors are 1 up to the rounding of float64. Those with a zero
    vector are 0.
    """
    products = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for part in torch.split(vectors, _SLICE, dim=1):
        exact = part.double()
        products.addmm_(exact, exact.T)
    norms = products.diagonal().sqrt()
    return products / denominator(torch.outer(norms, norms))


def bipartition(similarities: Tensor) -> tuple[Sequence[int], Sequence[int], float]:
    """Split two or more members into two parts that are least alike.

    Returns the positions of the members of each part, none empty, with position 0 in
    the first, and α_cross, the largest similarity of two members in different parts,
    which is as small as possible.

    The paper merges the most similar members until two parts are left. Here a part
    grows from the first member, each time by the member most similar to any in it
    (Prim's algorithm for a maximum spanning tree), and the sequence is cut where that
    similarity was smallest. This is optimal: for any other split some step of the
    growth crosses from one part to the other, with a similarity of at most that split's
    α_cross, and the cut has the smallest similarity of all steps.
    """
    num_members = len(similarities)
    order, gains = [0], []
    closeness = similarities[0].clone()
    for _ in range(num_members - 1):
        closeness[order[-1]] = -torch.inf
        gain, nearest = closeness.max(dim=0)
        order.append(int(nearest))
        gains.append(float(gain))
        is_largest = closeness == -torch.inf
        closeness = torch.maximum(closeness, similarities[int(nearest)])
        closeness[is_largest] = -torch.inf
    cut = gains.index(min(gains)) + 1
    return order[:cut], order[cut:], gains[cut - 1]

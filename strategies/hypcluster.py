"""HypCluster: K shared models, each trained by the clients that it fits best.

Mansour, Mohri, Ro, Suresh, "Three Approaches for Personalization with Applications to
Federated Learning", 2020: Mansour et al. 2020, section 4.3,
Algorithm HypCluster and Eq. 3 and 4. In a round each participant i takes

    f(i) = argmin_k L_i(h_k)

with the mean loss on its training data, trains h_f(i), and the server averages each
h_k over the clients that chose it. At first the participants all train one model; they
are split at random into K groups, and the mean of each group is where a h_k begins.

The paper says of the start only that a model is trained on sampled clients and that
all h_k are initialised with it "randomly". Departures: the means of models replace the
paper's SGD on a cluster's pooled data, as in FedAvg; a cluster that nobody chose keeps
its model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from knnper.data.examples import ClientData
from knnper.experiment import PositiveInt, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.clusters import (
    ClusterModels,
    ClusterUpdate,
    chosen_model,
    cluster_problem,
    serve_best,
    train_best,
)
from knnper.strategies.core.method import Method
from knnper.strategies.core.predictors import Predictor
from knnper.strategies.core.records import NoState, Record


@dataclass(frozen=True)
class HypClusterSettings(Settings):
    """How many models are shared.

    Attributes
    ----------
    num_clusters
        K (the paper's q), 1 to 5 in the paper, where 2 was best on EMNIST. 1 is
        FedAvg.
    """

    num_clusters: PositiveInt = 2


@dataclass(frozen=True)
class HypClusterState(Record):
    """The server's state."""

    # h_k: K tensors of shape (num_weights,); before the first round one, the initial
    # model.
    centers: tuple[Tensor, ...]
    largest: int  # The cluster that most examples were trained in, in the last round
    # The group that each seen client is split into in the first round, by its name;
    # empty afterwards.
    deal: dict[str, int]


class HypCluster(Method):
    """A few shared models; each client trains and is served the best for it."""

    title = "HypCluster"
    source = "Mansour et al. 2020, Algorithm HypCluster; three-approaches, section 4.3"
    download = "K (num_clusters)"
    server_state = "K (num_clusters)"
    unseen = "the shared model with the lowest loss on its own data"
    reference_title = "HypCluster (largest cluster)"
    personalizes_by_inference = True
    state_type = HypClusterState
    payload_type = ClusterModels
    update_type = ClusterUpdate

    settings: HypClusterSettings
    update_problem = staticmethod(cluster_problem)
    started_from = staticmethod(chosen_model)

    def init(self, clients: Sequence[str], rng: RandomKey) -> HypClusterState:
        places = rng.child("deal").numpy().permutation(len(clients)).tolist()
        deal = {
            client: place % self.settings.num_clusters
            for client, place in zip(clients, places, strict=True)
        }
        return HypClusterState((self.task.initial_weights,), 0, deal)

    def client_update(
        self,
        payload: ClusterModels,
        client_state: NoState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[NoState, ClusterUpdate]:
        rate = self.task.training.learning_rate_at(server_round)
        update = train_best(self.task, payload, (data.train,), data.train, rate, rng)
        return NoState(), update

    def personalize(
        self,
        payload: ClusterModels,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> Predictor:
        return serve_best(self.task, payload, (data.train, data.validation))

    def broadcast(
        self, state: HypClusterState, client_id: str, rng: RandomKey
    ) -> ClusterModels:
        numbers = tuple(range(len(state.centers)))
        return ClusterModels(state.centers, numbers, state.largest)

    def aggregate(
        self, state: HypClusterState, updates: Updates[ClusterUpdate]
    ) -> HypClusterState:
        sums: dict[int, RunningMean] = {}
        sizes: dict[int, int] = {}
        for client, update in updates:
            cluster = state.deal.get(client, update.cluster)
            if cluster not in range(self.settings.num_clusters):
                continue  # a client may say anything, and a sum is as large as a model
            sums.setdefault(cluster, RunningMean()).add(
                update.weights, update.num_examples
            )
            sizes[cluster] = sizes.get(cluster, 0) + update.num_examples
        means = {k: sums[k].result() for k in sorted(sums)}
        kept = (
            (_mean(means, sizes),) * self.settings.num_clusters
            if state.deal
            else state.centers
        )
        centers = tuple(means.get(k, center) for k, center in enumerate(kept))
        largest = max(means, key=lambda k: sizes[k], default=state.largest)
        return HypClusterState(centers, largest, {})


def _mean(means: dict[int, Tensor], sizes: dict[int, int]) -> Tensor:
    """Return the mean of all groups together: what a group without anyone starts as."""
    everyone = RunningMean()
    for number, mean in means.items():
        everyone.add(mean, sizes[number])
    return everyone.result()

"""HypCluster: K shared models, each trained by the clients that it fits best.

Mansour, Mohri, Ro, Suresh, "Three Approaches for Personalization with Applications to
Federated Learning", 2020, section 4.3, Algorithm HypCluster and Eq. 3 and 4. In a round
each participant i takes

    f(i) = argmin_k L_i(h_k)

with the mean loss on its training data, and trains h_f(i). The server averages each h_k
over the clients that chose it.

In the first round all participants train one model. They are split at random into K
groups, and the mean of each group becomes the first h_k. The paper says about the start
only that a model is trained on sampled clients and that all h_k are initialised with it
"randomly".

Departures from the paper:

- Means of models replace the paper's SGD on a cluster's pooled data, as in FedAvg.
- A cluster that no client chose keeps its model.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.seeding import RandomKey
from knnper.settings import PositiveInt, Settings
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.method import Method, wrong_shape
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelUpdate, Record
from knnper.strategies.core.task import Task


@dataclass(frozen=True)
class ClusterModels(Record):
    """The payload of a client: models of one or more clusters."""

    # The models to choose from, or that of the client's cluster; shape (num_weights,).
    models: tuple[Tensor, ...]
    numbers: tuple[int, ...]  # the cluster of each model
    default: int  # position of the model for a client without data


@dataclass(frozen=True)
class ClusterUpdate(ModelUpdate):
    """The update of a client."""

    cluster: int  # the cluster of the trained model


class ClusterMethod(Method, ABC):
    """Base of methods in which clients choose a model by the loss on their data."""

    chooses_on_validation = True
    payload_type = ClusterModels
    update_type = ClusterUpdate

    @abstractmethod
    def compared(self, data: ClientData, is_training: bool) -> Sequence[Examples]:
        """Return the client's examples on which the models are compared."""

    @override
    def local_update(
        self, payload: ClusterModels, data: ClientData, rate: float, rng: RandomKey
    ) -> ClusterUpdate:
        best = best_position(self.task, payload, self.compared(data, is_training=True))
        trained = self.train(payload.models[best], data.train, rate, rng)
        number, count = payload.numbers[best], len(data.train)
        return ClusterUpdate(trained.weights, count, trained.train_loss, number)

    @override
    def personalize(
        self,
        payload: ClusterModels,
        client_state: Any,
        data: ClientData,
        rng: RandomKey,
    ) -> ModelPredictor:
        best = best_position(self.task, payload, self.compared(data, is_training=False))
        chosen = {"cluster": float(payload.numbers[best])}
        return ModelPredictor(self.task, payload.models[best], chosen)

    @override
    def update_problem(
        self, payload: ClusterModels, update: ClusterUpdate
    ) -> str | None:
        if update.cluster not in payload.numbers:
            known = ", ".join(map(str, payload.numbers))
            return f"cluster: expected one of {known}, found {update.cluster}"
        return wrong_shape(update, weights=tuple(payload.models[0].shape))

    @override
    def started_from(
        self, payload: ClusterModels, update: ClusterUpdate
    ) -> dict[str, Tensor]:
        return {"weights": payload.models[payload.numbers.index(update.cluster)]}


def best_position(task: Task, payload: ClusterModels, parts: Sequence[Examples]) -> int:
    """Return the position of the model with the lowest loss; ties go to the first."""
    if len(payload.models) == 1:
        return 0
    if not any(map(len, parts)):
        return payload.default

    def loss_sum(weights: Tensor, examples: Examples) -> float:
        loss = task.loss_sum(weights, examples)  # NaN counts as infinite
        return float(torch.nan_to_num(loss, nan=torch.inf, posinf=torch.inf))

    losses = [sum(loss_sum(model, part) for part in parts) for model in payload.models]
    return losses.index(min(losses))


@dataclass(frozen=True)
class HypClusterSettings(Settings):
    """The number of shared models.

    Attributes
    ----------
    num_clusters
        K (the paper's q); 1 to 5 in the paper, where 2 was best on EMNIST. 1 is FedAvg.
    """

    num_clusters: PositiveInt = 2


@dataclass(frozen=True)
class HypClusterState(Record):
    """The server's state."""

    # h_k, K tensors of shape (num_weights,); before the first round the initial model.
    centers: tuple[Tensor, ...]
    largest: int  # the cluster with the most training examples in the last round
    # The group of each seen client in the first round, by name; empty afterwards.
    deal: dict[str, int]


class HypCluster(ClusterMethod):
    """A few shared models; each client trains and serves the best for its data."""

    title = "HypCluster"
    source = "Mansour et al. 2020, Algorithm HypCluster; three-approaches, section 4.3"
    download = "K (num_clusters)"
    server_state = "K (num_clusters)"
    unseen = "the shared model with the lowest loss on its own data"
    reference_title = "HypCluster (largest cluster)"
    personalizes_by_inference = True
    state_type = HypClusterState

    settings: HypClusterSettings

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> HypClusterState:
        places = rng.child("deal").numpy().permutation(len(clients)).tolist()
        deal = {
            client: place % self.settings.num_clusters
            for client, place in zip(clients, places, strict=True)
        }
        return HypClusterState((self.task.initial_weights,), 0, deal)

    @override
    def compared(self, data: ClientData, is_training: bool) -> Sequence[Examples]:
        return (data.train,) if is_training else (data.train, data.validation)

    @override
    def broadcast(
        self, state: HypClusterState, client_id: str, rng: RandomKey
    ) -> ClusterModels:
        numbers = tuple(range(len(state.centers)))
        return ClusterModels(state.centers, numbers, state.largest)

    @override
    def aggregate(
        self, state: HypClusterState, updates: Updates[ClusterUpdate]
    ) -> HypClusterState:
        sums: dict[int, RunningMean] = {}
        sizes: dict[int, int] = {}
        for client, update in updates:
            cluster = state.deal.get(client, update.cluster)
            if cluster not in range(self.settings.num_clusters):
                continue  # a client may claim any cluster, and each sum takes memory
            sums.setdefault(cluster, RunningMean()).add(
                update.weights, update.num_examples
            )
            sizes[cluster] = sizes.get(cluster, 0) + update.num_examples
        means = {k: sums[k].result() for k in sorted(sums)}
        previous = state.centers
        if state.deal:  # in the first round an empty group gets the mean of all groups
            overall = RunningMean()
            for number, mean in means.items():
                overall.add(mean, sizes[number])
            previous = (overall.result(),) * self.settings.num_clusters
        centers = tuple(means.get(k, center) for k, center in enumerate(previous))
        largest = max(means, key=lambda k: sizes[k], default=state.largest)
        return HypClusterState(centers, largest, {})

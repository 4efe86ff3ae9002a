"""kNN-Per: the global model and a local memory, mixed at each client.

Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local
Memorization", ICML 2022, Algorithm 1 (knn-per.txt).
"""

import functools
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field
from torch import Tensor

from datastore.classifier import NeighborClassifier
from datastore.kernel import KernelName
from datastore.predictor import KnnPredictor
from datastore.store import LocalStore
from datastore.tuning import choose_knn_weight
from knnper.config.ranges import PositiveFloat, PositiveInt, UnitInterval
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from knnper.data.examples import ClientData
from strategies.core.method import Method, MethodSpec, NoSettings
from strategies.core.records import ModelPayload, NoState
from strategies.core.task import Task
from strategies.fedavg import fedavg


@dataclass(frozen=True)
class KnnSettings(Settings):
    """The local memory and its part in the prediction.

    Attributes
    ----------
    num_neighbors
        k; 10 in the paper, where 7 to 14 make little difference (Figure 5).
    kernel
        ``paper``: exp(-d/σ), Eq. 6. ``squared``: exp(-d²/(p σ)), as in the public
        reference implementation.
    kernel_scale
        σ; anything from 0.1 to 1000 makes little difference (Appendix B).
    knn_weights
        The values of λ that a client chooses from on its validation data, [0, 1];
        the default is the paper's grid (section 5). 0 is the global model alone, 1
        the neighbours alone.
    """

    num_neighbors: PositiveInt = 10
    kernel: KernelName = "paper"
    kernel_scale: PositiveFloat = 1.0
    knn_weights: Annotated[tuple[UnitInterval, ...], Field(min_length=1)] = (
        0.0,
        0.1,
        0.3,
        0.5,
        0.7,
        0.9,
        1.0,
    )


def knn_per(task: Task, settings: NoSettings, personalization: KnnSettings) -> Method:
    """Return FedAvg on ``task`` with a local memory at each client."""

    def personalize(
        payload: ModelPayload,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> KnnPredictor:
        return memorize(task, payload.weights, data, personalization)

    return replace(fedavg(task, settings, NoSettings()), personalize=personalize)


def memorize(
    task: Task, weights: Tensor, data: ClientData, settings: KnnSettings
) -> KnnPredictor:
    """Return the predictor of a client that remembers ``data``.

    λ is chosen on the validation split with only the training split in the store; the
    store that is served holds both, as the paper retrains on both (section 5). A
    client that lacks one of them takes the smallest λ of the grid.

    Parameters
    ----------
    task
        Gives φ and the global model.
    weights
        w of the global model, shape (num_weights,).
    data
        The client's training and validation splits; each image is embedded once.
    settings
        k, kernel, σ and the grid of λ.
    """
    head = functools.partial(task.head, weights)
    classifier = functools.partial(
        NeighborClassifier,
        num_neighbors=settings.num_neighbors,
        kernel=settings.kernel,
        kernel_scale=settings.kernel_scale,
    )
    train, labels = data.train, data.validation.labels
    embeddings = task.embed(weights, data.validation.images)
    store = LocalStore(
        task.embed(weights, train.images), train.labels, task.spec.num_classes
    )
    if len(train) == 0 or len(labels) == 0:
        knn_weight = min(settings.knn_weights)
    else:
        knn_weight = choose_knn_weight(
            classifier(store)(embeddings),
            head(embeddings),
            labels,
            settings.knn_weights,
        )
    return KnnPredictor(
        embed=functools.partial(task.embed, weights),
        head=head,
        neighbors=classifier(store.with_added(embeddings, labels)),
        knn_weight=knn_weight,
    )


SPEC = MethodSpec(
    title="kNN-Per",
    summary="The global model and each client's nearest stored examples, mixed.",
    source="Marfoq et al. 2022, Algorithm 1; knn-per.txt Eq. 3-7",
    build=knn_per,
    upload="1",
    download="1",
    client_state="0",
    unseen="the global model and the client's own store",
    reference_title="FedAvg",
    personalization_type=KnnSettings,
)

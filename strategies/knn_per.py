"""kNN-Per: the global model and a local memory, mixed at each client.

Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local
Memorization", ICML 2022, Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from knnper.data.examples import ClientData
from knnper.datastore.examples import NewExamples, StoreSpec
from knnper.datastore.prediction import KnnPredictor, require_class_shares
from knnper.datastore.settings import require_settings
from knnper.datastore.store import UNNAMED, Store, empty_memory_store
from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.strategies.core.memory import KnnSettings, remember, store_settings_of
from knnper.strategies.core.method import Method, Personalizer
from knnper.strategies.core.predictors import EmbeddingPredictor, Predictor
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import FedAvg


class LocalMemory(Personalizer):
    """What the method serves and each client's nearest stored examples, mixed."""

    name = "knn"
    title = "kNN"
    source = "Marfoq et al. 2022, Algorithm 1 and Eq. 3-7"
    unseen = "remembers like any other client"

    settings: KnnSettings

    def __init__(self, task: Task, method: Method, settings: KnnSettings) -> None:
        super().__init__(task, method, settings)
        spec = StoreSpec(task.spec.num_classes)
        require_settings(settings.store, spec, task.model.module.embedding_dim)
        require_class_shares(settings.class_prior, spec.num_classes)

    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> KnnPredictor:
        served = self.method.personalize(payload, client_state, data, rng)
        base = require_embeddings(served)
        return memorize(base, self.task.spec.num_classes, data, self.settings, rng)


def require_embeddings(predictor: Predictor) -> EmbeddingPredictor:
    """Return ``predictor`` as one that a memory can be put on.

    Raises
    ------
    RunError
        If it has no representation.
    """
    if not isinstance(predictor, EmbeddingPredictor):
        raise RunError(
            "expected a method whose predictors have a representation, found one that "
            f"serves a {type(predictor).__name__}; choose another `personalization`"
        )
    return predictor


def memorize(
    base: EmbeddingPredictor,
    num_classes: int,
    data: ClientData,
    settings: KnnSettings,
    rng: RandomKey,
) -> KnnPredictor:
    """Return the predictor of a client that remembers ``data``.

    λ, k and σ where they are tuned, and the class prior where one is set, are chosen on
    the validation split with only the training split in the store, or by leave-one-out;
    see `TuningSettings`. The store that is served holds both splits, as the paper
    retrains on both (section 5).
    Where ``base`` was trained on both too, the choice is made with what it was before.

    Parameters
    ----------
    base
        Gives φ and the distribution of the global model, or of any other.
    settings
        k, kernel, σ, the grid of λ, how to choose, and the store.
    """
    embedded = _embedded(base, data)
    store = _empty_store(embedded, num_classes, settings, rng)
    chooser = base if settings.is_fixed else base.without_validation()
    if chooser is base:
        tuned = remember(store, *embedded, base.head, settings)
    else:
        before = _embedded(chooser, data)
        other = _empty_store(before, num_classes, settings, rng)
        tuned = remember(other, *before, chooser.head, settings)
        for examples in embedded:
            store.add(examples)
    predictor = tuned.predictor(base.embed, base.head, store, settings)
    return replace(predictor, tuning={**base.describe(), **predictor.tuning})


def _empty_store(
    embedded: Sequence[NewExamples],
    num_classes: int,
    settings: KnnSettings,
    rng: RandomKey,
) -> Store:
    return empty_memory_store(
        StoreSpec(num_classes),
        int(embedded[0].embeddings.shape[1]),
        UNNAMED,
        store_settings_of(settings, rng),
    )


def _embedded(
    base: EmbeddingPredictor, data: ClientData
) -> tuple[NewExamples, NewExamples]:
    """Return the training and the validation split as a store takes them."""
    train, validation = (
        NewExamples(base.embed(split.images), split.labels)
        for split in (data.train, data.validation)
    )
    return train, validation


class KnnPer(FedAvg):
    """The global model and each client's nearest stored examples, mixed."""

    title = "kNN-Per"
    source = "Marfoq et al. 2022, Algorithm 1 and Eq. 3-7"
    unseen = "the global model and the client's own store"
    reference_title = "FedAvg"
    personalization = "knn"

"""kNN-Per: the global model and a local memory, mixed at each client.

Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local
Memorization", ICML 2022, Algorithm 1 (knn-per.txt).
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
from knnper.strategies.core.method import (
    EmbeddingPredictor,
    Method,
    MethodSpec,
    PersonalizerSpec,
    Predictor,
)
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import fedavg


def with_memory(task: Task, method: Method, settings: KnnSettings) -> Method:
    """Return ``method`` with a local memory at each client.

    Parameters
    ----------
    task
        What is learned.
    method
        Its predictors give the representation and the distribution to mix with.
    settings
        The memory.

    Raises
    ------
    ConfigError
        If the store's settings do not go together, or with the embeddings, or the class
        prior is for another number of classes.
    """
    spec = StoreSpec(task.spec.num_classes)
    require_settings(settings.store, spec, task.model.module.embedding_dim)
    require_class_shares(settings.class_prior, spec.num_classes)

    def personalize(
        payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> KnnPredictor:
        base = require_embeddings(method.personalize(payload, client_state, data, rng))
        return memorize(base, task.spec.num_classes, data, settings, rng)

    return replace(method, personalize=personalize)


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
    num_classes
        c.
    data
        The client's training and validation splits; each image is embedded once.
    settings
        k, kernel, σ, the grid of λ, how to choose, and the store.
    rng
        Root of what a store's policy leaves to chance, with the policy's own seed.
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


SPEC = MethodSpec(
    title="kNN-Per",
    summary="The global model and each client's nearest stored examples, mixed.",
    source="Marfoq et al. 2022, Algorithm 1; knn-per.txt Eq. 3-7",
    build=fedavg,
    upload="1",
    download="1",
    client_state="0",
    server_state="1",
    unseen="the global model and the client's own store",
    reference_title="FedAvg",
    personalization="knn",
    ends_with_global_model=True,
)

ON_TOP = PersonalizerSpec(
    title="kNN",
    summary="What the method serves and each client's nearest stored examples, mixed.",
    source="Marfoq et al. 2022, Algorithm 1; knn-per.txt Eq. 3-7",
    settings_type=KnnSettings,
    apply=with_memory,
    unseen="remembers like any other client",
)

"""kNN-Per: the global model and a local memory, mixed at each client.

Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local
Memorization", ICML 2022, Algorithm 1.

The paper tunes λ for each client, on validation data or by cross-validation (section
3). The authors' code chooses no λ: it scores each value of a grid, shared by all
clients, on their test data, and averages over the clients. Here each client chooses
its own, see `knnper.datastore.tuning`, and never on test data.
"""

from dataclasses import replace
from typing import Any

from knnper.data.examples import ClientData
from knnper.datastore.class_prior import require_class_shares
from knnper.datastore.examples import NewExamples, StoreSpec
from knnper.datastore.memory import KnnSettings, store_settings_of
from knnper.datastore.policy import require_settings
from knnper.datastore.prediction import KnnPredictor
from knnper.datastore.store import UNNAMED, Store, empty_memory_store
from knnper.datastore.tuning import fill_and_tune
from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, Personalizer
from knnper.strategies.core.task import EmbeddingPredictor, Predictor, Task
from knnper.strategies.fedavg import FedAvg


# The catalogue finds it as the personalisation `knn`, for any method.
class KnnMemory(Personalizer):
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
        return knn_predictor(base, self.task.spec.num_classes, data, self.settings, rng)


def require_embeddings(predictor: Predictor) -> EmbeddingPredictor:
    """Return ``predictor`` as one that a memory can be put on."""
    if not isinstance(predictor, EmbeddingPredictor):
        raise RunError(
            "expected a method whose predictors have a representation, found one that "
            f"serves a {type(predictor).__name__}; choose another `personalization`"
        )
    return predictor


def knn_predictor(
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
    retrains on both (section 5); a ``base`` that was too chooses as it was before.
    """

    def embedded(by: EmbeddingPredictor) -> tuple[Store, NewExamples, NewExamples]:
        """Return an empty store, and the training and the validation split for it."""
        splits = (data.train, data.validation)
        train, validation = (
            NewExamples(by.embed(split.images), split.labels) for split in splits
        )
        size, chance = train.embeddings.shape[1], store_settings_of(settings, rng)
        spec = StoreSpec(num_classes)
        empty = empty_memory_store(spec, int(size), UNNAMED, chance)
        return empty, train, validation

    store, train, validation = embedded(base)
    scorer = base if settings.is_fixed else base.without_validation()
    if scorer is base:
        tuned = fill_and_tune(store, train, validation, base.head, settings)
    else:
        tuned = fill_and_tune(*embedded(scorer), scorer.head, settings)
        store.add(train)
        store.add(validation)
    predictor = tuned.predictor(base.embed, base.head, store, settings)
    return replace(predictor, tuning={**base.describe(), **predictor.tuning})


# The catalogue finds it as the method `knn_per`: FedAvg's rounds, with `KnnMemory`.
class KnnPer(FedAvg):
    """The global model and each client's nearest stored examples, mixed."""

    title = "kNN-Per"
    source = "Marfoq et al. 2022, Algorithm 1 and Eq. 3-7"
    unseen = "the global model and the client's own store"
    reference_title = "FedAvg"
    personalization = "knn"

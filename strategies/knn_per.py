"""kNN-Per: each client mixes the global model with a vote of its nearest examples.

Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local
Memorization", ICML 2022, Algorithm 1. The rounds are FedAvg's. After them a client m
stores the pairs (φ(x), y) of its data, and predicts with (Eq. 6 and 7)

    p_kNN(y|x) ∝ Σ_{i among the k nearest} 1[y_i = y] exp(-d(φ(x), φ(x_i)) / σ)
    h_{m,λ}(x) = λ_m p_kNN(x) + (1 - λ_m) h_global(x)

Memory and predictor are in `knnper.datastore`, since sites and service use them too:
`tuning` fills the store and chooses λ, k and σ, and `prediction` predicts.

Departures from the paper and its public reference implementation:

- Each client chooses its own λ, on validation data or by leave-one-out, as the paper
  describes (section 3). The reference implementation scores each λ of a grid, common to
  all clients, on test data.
- λ is chosen with the training split in the store. The store that is served holds both
  splits, as the paper retrains on both (section 5).
- The reference implementation mixes p_kNN with logits, and has the kernel
  exp(-d²/(p σ)), here ``kernel: squared``.

Unusual here: the memory is a personalisation on top of any method with a
representation, and the method `knn_per` is FedAvg with it.
"""

from dataclasses import replace
from typing import Any

from typing_extensions import override

from knnper.data.examples import ClientData
from knnper.datastore.class_prior import require_class_shares
from knnper.datastore.examples import NewExamples, StoreSpec
from knnper.datastore.memory import KnnSettings, store_settings_of
from knnper.datastore.policy import require_settings
from knnper.datastore.prediction import KnnPredictor
from knnper.datastore.store import UNNAMED, Store, empty_memory_store
from knnper.datastore.tuning import fill_and_tune, is_fixed
from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, Personalizer
from knnper.strategies.core.predictors import EmbeddingPredictor, Predictor
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import FedAvg


class KnnMemory(Personalizer):
    """A mixture of the served model and the vote of the client's nearest examples."""

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

    @override
    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> KnnPredictor:
        served = self.method.personalize(payload, client_state, data, rng)
        base = require_embedding_predictor(served)
        return knn_predictor(base, self.task.spec.num_classes, data, self.settings, rng)


def require_embedding_predictor(predictor: Predictor) -> EmbeddingPredictor:
    """Return ``predictor`` as one with a representation; raise RunError if none."""
    if not isinstance(predictor, EmbeddingPredictor):
        raise RunError(
            "expected predictors with a representation, found that the method serves a "
            f"{type(predictor).__name__}; choose another `personalization`"
        )
    return predictor


def knn_predictor(
    base: EmbeddingPredictor,
    num_classes: int,
    data: ClientData,
    settings: KnnSettings,
    rng: RandomKey,
) -> KnnPredictor:
    """Fill a client's memory with ``data``, choose λ, k and σ; return the predictor.

    If ``base`` was trained on both splits, the choice is made with its
    `without_validation`, which has not seen the validation split, and with a store of
    that predictor's embeddings.
    """

    def embed_by(
        predictor: EmbeddingPredictor,
    ) -> tuple[Store, NewExamples, NewExamples]:
        """Return an empty store, and the training and validation splits for it."""
        train, validation = (
            NewExamples(predictor.embed(split.images), split.labels)
            for split in (data.train, data.validation)
        )
        store = empty_memory_store(
            StoreSpec(num_classes),
            int(train.embeddings.shape[1]),
            UNNAMED,
            store_settings_of(settings, rng),
        )
        return store, train, validation

    store, train, validation = embed_by(base)
    scorer = base if is_fixed(settings) else base.without_validation()
    if scorer is base:
        tuned = fill_and_tune(store, train, validation, base.head, settings)
    else:
        tuned = fill_and_tune(*embed_by(scorer), scorer.head, settings)
        store.add(train)
        store.add(validation)
    predictor = tuned.predictor(base.embed, base.head, store, settings)
    return replace(predictor, tuning={**base.describe(), **predictor.tuning})


class KnnPer(FedAvg):
    """A mixture of the global model and the vote of each client's nearest examples."""

    title = "kNN-Per"
    source = "Marfoq et al. 2022, Algorithm 1 and Eq. 3-7"
    unseen = "the global model and the client's own store"
    reference_title = "FedAvg"
    personalization = "knn"

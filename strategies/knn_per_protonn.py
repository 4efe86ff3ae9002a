"""kNN-Per with a compressed memory: ProtoNN's prototypes in place of the store.

Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local
Memorization", ICML 2022, Appendix B, Figure 11; Gupta et al.,
"ProtoNN: Compressed and Accurate kNN for Resource-scarce Devices", ICML 2017.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData
from knnper.datastore.memory import PAPER_KNN_WEIGHTS, CriterionName, KnnWeights
from knnper.datastore.prediction import KnnPredictor
from knnper.datastore.protonn import ProtoNNSettings, fit_protonn
from knnper.datastore.tuning import choose_knn_weight, knn_weight_grid
from knnper.seeding import RandomKey
from knnper.settings import Settings
from knnper.strategies.core.method import Personalizer
from knnper.strategies.core.predictors import EmbeddingPredictor
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.knn_per import require_embedding_predictor


@dataclass(frozen=True)
class PrototypeSettings(Settings):
    """The prototypes and their weight in the prediction.

    Attributes
    ----------
    prototypes
        Number, dimension and training of the prototypes.
    knn_weights
        The values of λ, in [0, 1], that a client chooses from on its validation data. A
        single value is fixed; to several values 0 is always added.
    criterion
        The score of a λ: ``accuracy``, ``log_loss`` or ``both``, as for kNN-Per.
    """

    prototypes: ProtoNNSettings = field(default_factory=ProtoNNSettings)
    knn_weights: KnnWeights = PAPER_KNN_WEIGHTS
    criterion: CriterionName = "accuracy"


class Prototypes(Personalizer):
    """A mixture of the served model and prototypes of the client's examples."""

    name = "protonn"
    title = "ProtoNN"
    source = "Marfoq et al. 2022, Appendix B, Figure 11; Gupta et al. 2017"
    unseen = "makes prototypes like any other client"

    settings: PrototypeSettings

    @override
    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> KnnPredictor:
        served = self.method.personalize(payload, client_state, data, rng)
        base = require_embedding_predictor(served)
        return compress(base, self.task.spec.num_classes, data, self.settings, rng)


def compress(
    base: EmbeddingPredictor,
    num_classes: int,
    data: ClientData,
    settings: PrototypeSettings,
    rng: RandomKey,
) -> KnnPredictor:
    """Fit prototypes to ``data``, choose λ, and return the predictor.

    λ is chosen on the validation split with prototypes of the training split. The
    prototypes that are served are fitted to both splits. A client without one of the
    splits takes λ = 0, or the fixed λ.
    """
    fit = functools.partial(
        fit_protonn,
        num_classes=num_classes,
        settings=settings.prototypes,
        rng=rng.child("prototypes"),
    )
    embedded = _embedded(base, data)
    knn_weight = knn_weight_grid(settings.knn_weights)[0]
    if len(data.train) > 0 and len(data.validation) > 0:
        fixed = len(settings.knn_weights) == 1
        chooser = base if fixed else base.without_validation()
        train, held_out = embedded if chooser is base else _embedded(chooser, data)
        knn_weight = choose_knn_weight(
            fit(train, data.train.labels)(held_out),
            chooser.head(held_out),
            data.validation.labels,
            settings.knn_weights,
            settings.criterion,
        )
    prototypes = fit(torch.cat(embedded), data.train_and_validation().labels)
    return KnnPredictor(
        embed=base.embed,
        head=base.head,
        neighbors=prototypes,
        knn_weight=knn_weight,
        tuning={**base.describe(), "num_bytes": float(prototypes.num_bytes)},
    )


def _embedded(base: EmbeddingPredictor, data: ClientData) -> tuple[Tensor, Tensor]:
    """Return the representations of the training and the validation split."""
    return base.embed(data.train.images), base.embed(data.validation.images)


class KnnPerProtoNN(FedAvg):
    """A mixture of the global model and prototypes of each client's examples."""

    title = "kNN-Per (ProtoNN)"
    source = "Marfoq et al. 2022, Appendix B, Figure 11; Gupta et al. 2017"
    unseen = "the global model and prototypes of the client's own examples"
    reference_title = "FedAvg"
    personalization = "protonn"

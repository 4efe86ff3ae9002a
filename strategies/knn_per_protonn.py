"""kNN-Per with a compressed memory: ProtoNN in place of the store.

Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local
Memorization", ICML 2022, Appendix B, Figure 11 (knn-per.txt); Gupta et al., "ProtoNN:
Compressed and Accurate kNN for Resource-scarce Devices", ICML 2017.
"""

import functools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from datastore.prediction.predictor import KnnPredictor
from datastore.protonn.settings import ProtoNNSettings
from datastore.protonn.training import fit_protonn
from datastore.tuning.candidates import weights_to_choose_from
from datastore.tuning.mixing import choose_knn_weight
from datastore.tuning.settings import (
    PAPER_KNN_WEIGHTS,
    CriterionName,
    KnnWeights,
)
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from knnper.data.examples import ClientData
from strategies.core.method import Method, MethodSpec, NoSettings
from strategies.core.records import ModelPayload, NoState
from strategies.core.task import Task
from strategies.fedavg import fedavg


@dataclass(frozen=True)
class PrototypeSettings(Settings):
    """The prototypes and their part in the prediction.

    Attributes
    ----------
    prototypes
        How many, in how many dimensions, and how they are trained.
    knn_weights
        The values of λ that a client chooses from on its validation data, as for
        kNN-Per: a single value is fixed, and of several 0 is always one.
    criterion
        What is best: ``accuracy`` or ``log_loss``.
    """

    prototypes: ProtoNNSettings = field(default_factory=ProtoNNSettings)
    knn_weights: KnnWeights = PAPER_KNN_WEIGHTS
    criterion: CriterionName = "accuracy"


def knn_per_protonn(
    task: Task, settings: NoSettings, personalization: PrototypeSettings
) -> Method:
    """Return FedAvg on ``task`` with learned prototypes at each client."""

    def personalize(
        payload: ModelPayload,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> KnnPredictor:
        return compress(task, payload.weights, data, personalization, rng)

    return replace(fedavg(task, settings, NoSettings()), personalize=personalize)


def compress(
    task: Task,
    weights: Tensor,
    data: ClientData,
    settings: PrototypeSettings,
    rng: RandomKey,
) -> KnnPredictor:
    """Return the predictor of a client that keeps prototypes of ``data``.

    λ is chosen on the validation split with prototypes of the training split; those
    that are served are fitted to both, as kNN-Per's store holds both. A client that
    lacks one of them takes 0, or the λ that is fixed.

    Parameters
    ----------
    task
        Gives φ and the global model.
    weights
        w of the global model, shape (num_weights,).
    data
        The client's training and validation splits; each image is embedded once.
    settings
        The prototypes, and how λ is chosen.
    rng
        Of where the prototypes start.
    """
    embed = functools.partial(task.embed, weights)
    head = functools.partial(task.head, weights)
    fit = functools.partial(
        fit_protonn,
        num_classes=task.spec.num_classes,
        settings=settings.prototypes,
        rng=rng.child("prototypes"),
    )
    train, held_out = embed(data.train.images), embed(data.validation.images)
    labels = data.validation.labels
    if len(train) == 0 or len(labels) == 0:
        knn_weight = weights_to_choose_from(settings.knn_weights)[0]
    else:
        knn_weight = choose_knn_weight(
            fit(train, data.train.labels)(held_out),
            head(held_out),
            labels,
            settings.knn_weights,
            settings.criterion,
        )
    both = fit(torch.cat([train, held_out]), torch.cat([data.train.labels, labels]))
    return KnnPredictor(
        embed=embed,
        head=head,
        neighbors=both,
        knn_weight=knn_weight,
        tuning={"num_bytes": float(both.num_bytes)},
    )


SPEC = MethodSpec(
    title="kNN-Per (ProtoNN)",
    summary="The global model and prototypes of each client's examples, mixed.",
    source="Marfoq et al. 2022, Appendix B, Figure 11; Gupta et al. 2017",
    build=knn_per_protonn,
    upload="1",
    download="1",
    client_state="0",
    unseen="the global model and prototypes of the client's own examples",
    reference_title="FedAvg",
    personalization_type=PrototypeSettings,
)

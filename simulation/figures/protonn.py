"""kNN-Per with prototypes in place of the store, at one client.

knn-per.txt, Appendix B, "Adding compression techniques", Figure 11.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from datastore.memory import memory_store
from datastore.prediction.classifier import NeighborClassifier
from datastore.protonn.settings import ProtoNNSettings
from datastore.protonn.training import fit_protonn
from datastore.tuning.candidates import weights_to_choose_from
from datastore.tuning.mixing import choose_knn_weight
from knnper.config.ranges import PositiveFraction, PositiveInt
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from simulation.figures.embedded import Embedded
from simulation.figures.folder import PartRecord
from simulation.figures.knn_weight import num_correct
from strategies.core.memory import KnnSettings

Fit = Callable[[Embedded], tuple[Callable[[Tensor], Tensor], int]]
"""``examples -> (predictor, bytes)``."""

_LABEL_BYTES = 8


@dataclass(frozen=True)
class ProtoNNFigureSettings(Settings):
    """What the ProtoNN figure shows.

    Attributes
    ----------
    num_clients
        The first so many of the run's clients; null is all.
    capacities
        Prototypes as fractions of a client's examples; 0.1 ... 1 in the paper.
    projection_dims
        d̂; 100, 200 ... 1200 and p = 1280 in the paper.
    training
        How each is trained; capacity and dimension are those above.
    knn
        k, kernel and σ of the store it is compared with, and the grid of λ of both.
    """

    num_clients: PositiveInt | None
    capacities: tuple[PositiveFraction, ...]
    projection_dims: tuple[PositiveInt, ...]
    training: ProtoNNSettings = field(default_factory=ProtoNNSettings)
    knn: KnnSettings = field(default_factory=KnnSettings)

    def cells(self) -> Iterator[ProtoNNSettings]:
        """Yield the settings of each point of the figure."""
        for dim in self.projection_dims:
            for capacity in self.capacities:
                yield replace(self.training, capacity=capacity, projection_dim=dim)


@dataclass(frozen=True, eq=False)
class ClientSplits:
    """One client's images, embedded."""

    train: Embedded
    validation: Embedded
    test: Embedded


def compress_client(
    client: ClientSplits, settings: ProtoNNFigureSettings, key: RandomKey
) -> PartRecord:
    """Return how often one client is right at each point of the figure.

    λ is chosen on the validation split for what is fitted on the training split; what
    is tested is fitted on both, as kNN-Per's store holds both (knn-per.txt, section 5).

    Returns
    -------
    Mapping
        ``cells`` in the order of `ProtoNNFigureSettings.cells`, and ``store`` for
        kNN-Per itself: [correct, validation_correct, λ, bytes] each.
    """
    return {
        "num_test": len(client.test),
        "num_validation": len(client.validation),
        "global_correct": client.test.num_correct(),
        "store": _measured(client, settings.knn, _store_fit(settings.knn)),
        "cells": [
            _measured(client, settings.knn, _protonn_fit(cell, key))
            for cell in settings.cells()
        ],
    }


def _measured(client: ClientSplits, knn: KnnSettings, fit: Fit) -> list[float]:
    knn_weight, on_validation = weights_to_choose_from(knn.knn_weights)[0], 0
    validation, test = client.validation, client.test
    if len(client.train) > 0 and len(validation) > 0:
        predict, _ = fit(client.train)
        local = predict(validation.embeddings)
        seen = local, validation.probabilities, validation.labels
        knn_weight = choose_knn_weight(*seen, knn.knn_weights)
        on_validation = num_correct(*seen, knn_weight)
    both = client.train.followed_by(validation)
    if len(both) == 0:
        return [test.num_correct(), on_validation, 0.0, 0]
    predict, num_bytes = fit(both)
    correct = num_correct(
        predict(test.embeddings), test.probabilities, test.labels, knn_weight
    )
    return [correct, on_validation, knn_weight, num_bytes]


def _protonn_fit(cell: ProtoNNSettings, key: RandomKey) -> Fit:
    def fit(examples: Embedded) -> tuple[Callable[[Tensor], Tensor], int]:
        model = fit_protonn(
            examples.embeddings,
            examples.labels,
            examples.probabilities.shape[1],
            cell,
            key,
        )
        return model, model.num_bytes

    return fit


def _store_fit(knn: KnnSettings) -> Fit:
    def fit(examples: Embedded) -> tuple[Callable[[Tensor], Tensor], int]:
        store = memory_store(
            examples.embeddings, examples.labels, examples.probabilities.shape[1]
        )
        classifier = NeighborClassifier(
            store, knn.num_neighbors, knn.kernel, knn.kernel_scale
        )
        return classifier, len(examples) * (4 * store.embedding_dim + _LABEL_BYTES)

    return fit

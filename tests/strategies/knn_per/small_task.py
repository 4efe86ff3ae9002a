"""What the tests of kNN-Per have in common."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.data.examples import ClientData, Examples, InputSpec
from knnper.datastore.prediction import KnnPredictor
from knnper.seeding import RandomKey
from knnper.strategies.core.memory import KnnSettings
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.task import Task
from knnper.strategies.knn_per import memorize

NUM_CLASSES = 4
INPUT = InputSpec((8, 8, 1), NUM_CLASSES, mean=(0.5,), std=(0.3,))
Draw = Callable[[str, int], Examples]


def served(task: Task, data: ClientData, settings: KnnSettings) -> KnnPredictor:
    base = ModelPredictor(task, task.initial_weights)
    return memorize(base, task.spec.num_classes, data, settings, RandomKey(5))


def stored_by(task: Task, weights: Tensor, data: ClientData) -> Tensor:
    """Return φ of what a client stores, (n, p), each split in a batch of its own.

    As a client embeds them: rows of another batch may have other last bits.
    """
    splits = (data.train, data.validation)
    return torch.cat([task.embed(weights, split.images) for split in splits])


def oracle(
    stored: Tensor, labels: Tensor, queries: Tensor, settings: KnnSettings
) -> NDArray[np.float64]:
    """p_kNN by a loop over the queries; Eq. 6 in float64."""
    keys, asked = stored.double().numpy(), queries.double().numpy()
    probabilities = np.zeros((len(asked), NUM_CLASSES))
    for row, query in enumerate(asked):
        distances = np.sqrt(((keys - query) ** 2).sum(axis=1))
        nearest = np.argsort(distances, kind="stable")[: settings.num_neighbors]
        kept = distances[nearest]
        if settings.kernel == "squared":
            kept = kept**2 / keys.shape[1]
        weights = np.exp(-(kept - kept.min()) / settings.kernel_scale)
        np.add.at(probabilities[row], labels.numpy()[nearest], weights / weights.sum())
    return probabilities

"""A task with a tiny network, clients of it, and what they should be served."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.data.examples import ClientData, Examples, InputSpec, Normalizer
from knnper.datastore.prediction import KnnPredictor
from knnper.experiment import Choice, TrainingSettings
from knnper.models import TinyCnnSettings, build_model
from knnper.seeding import RandomKey
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.task import Task
from knnper.strategies.knn_per import KnnSettings, memorize

NUM_CLASSES = 4
INPUT = InputSpec((8, 8, 1), NUM_CLASSES, mean=(0.5,), std=(0.3,))
_TINY = Choice("tiny_cnn", TinyCnnSettings())


def _task() -> Task:
    model = build_model(_TINY, INPUT, RandomKey(0))
    return Task(
        model=model,
        initial_weights=model.read(),
        fresh_weights=lambda rng: build_model(_TINY, INPUT, rng).read(),
        normalize=Normalizer(INPUT),
        spec=INPUT,
        training=TrainingSettings(),
        evaluation_batch_size=32,
    )


TASK = _task()


def draw(purpose: str, count: int) -> Examples:
    """Draw examples; the first row of pixels tells the label."""
    generator = RandomKey(7, (purpose,)).numpy()
    images = generator.integers(0, 256, (count, 8, 8, 1), "uint8")
    labels = generator.integers(0, NUM_CLASSES, count)
    images[:, 0] = (85 * labels)[:, None, None]
    return Examples(torch.from_numpy(images), torch.from_numpy(labels))


def client(num_train: int, num_validation: int) -> ClientData:
    return ClientData(draw("train", num_train), draw("validation", num_validation))


def served(data: ClientData, settings: KnnSettings) -> KnnPredictor:
    base = ModelPredictor(TASK, TASK.initial_weights)
    return memorize(base, NUM_CLASSES, data, settings, RandomKey(5))


def stored_by(weights: Tensor, data: ClientData) -> Tensor:
    """Return φ of what a client stores, (n, p), each split in a batch of its own.

    As a client embeds them: rows of another batch may have other last bits.
    """
    splits = (data.train, data.validation)
    return torch.cat([TASK.embed(weights, split.images) for split in splits])


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

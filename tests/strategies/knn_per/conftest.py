"""A task with a tiny network, and images to draw."""

import pytest
import torch
from torch import Tensor

from knnper.data.examples import Examples, Normalizer
from knnper.experiment import Choice, TrainingSettings
from knnper.models.catalogue import build_model
from knnper.models.networks import TinyCnnSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.task import Task
from tests.strategies.knn_per.small_task import INPUT, NUM_CLASSES, Draw


@pytest.fixture(scope="module")
def tiny_task() -> Task:
    def fresh(rng: RandomKey) -> Tensor:
        return build_model(choice, INPUT, rng).read()

    choice = Choice("tiny_cnn", TinyCnnSettings())
    model = build_model(choice, INPUT, RandomKey(0))
    return Task(
        model=model,
        initial_weights=model.read(),
        fresh_weights=fresh,
        normalize=Normalizer(INPUT),
        spec=INPUT,
        training=TrainingSettings(),
        evaluation_batch_size=32,
    )


@pytest.fixture
def draw() -> Draw:
    """Draw examples; the first row of pixels tells the label."""

    def examples(purpose: str, count: int) -> Examples:
        generator = RandomKey(7, (purpose,)).numpy()
        images = generator.integers(0, 256, (count, 8, 8, 1), "uint8")
        labels = generator.integers(0, NUM_CLASSES, count)
        images[:, 0] = (85 * labels)[:, None, None]
        return Examples(torch.from_numpy(images), torch.from_numpy(labels))

    return examples

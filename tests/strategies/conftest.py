"""Tasks small enough to train by hand, and a serial loop that drives any method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from knnper.data.examples import (
    ClientData,
    Examples,
    InputSpec,
    Normalizer,
    no_examples,
)
from knnper.experiment import TrainingSettings
from knnper.models.flat import EmbeddingModel, FlatModel
from knnper.models.networks import TolerantBatchNorm2d
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method
from knnper.strategies.core.task import Task
from tests.strategies.trained_methods import TRAINING, Trained, trained


class LinearModel(EmbeddingModel):
    """Logits W x of the pixels x, W of shape (num_classes, num_pixels), at first 0."""

    def __init__(self, spec: InputSpec) -> None:
        super().__init__()
        height, width, channels = spec.image_shape
        self.embedding_dim, self.num_classes = (
            height * width * channels,
            spec.num_classes,
        )
        self.classifier = nn.Linear(self.embedding_dim, self.num_classes, bias=False)
        nn.init.zeros_(self.classifier.weight)

    def embed(self, x: Tensor) -> Tensor:
        return x.flatten(start_dim=1)


class NormedModel(EmbeddingModel):
    """2x2 images, one convolution to 1x1 resolution, BatchNorm, a linear head."""

    def __init__(self, spec: InputSpec) -> None:
        super().__init__()
        self.embedding_dim, self.num_classes = 4, spec.num_classes
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, kernel_size=2), TolerantBatchNorm2d(4), nn.ReLU()
        )
        self.classifier = nn.Linear(4, spec.num_classes)

    def embed(self, x: Tensor) -> Tensor:
        return torch.flatten(self.features(x), start_dim=1)


def _task(
    build: Callable[[InputSpec], EmbeddingModel],
    spec: InputSpec,
    training: TrainingSettings,
) -> Task:
    def new_model(rng: RandomKey) -> FlatModel:
        with rng.torch():
            return FlatModel(build(spec))

    model = new_model(RandomKey(3))
    return Task(
        model=model,
        initial_weights=model.read(),
        fresh_weights=lambda rng: new_model(rng).read(),
        normalize=Normalizer(spec),
        spec=spec,
        training=training,
    )


@pytest.fixture
def linear_task() -> Callable[..., Task]:
    """Make a task for `LinearModel`: one row of pixels in [0, 1], 2 classes."""

    def make(training: TrainingSettings, num_pixels: int = 1) -> Task:
        spec = InputSpec((1, num_pixels, 1), num_classes=2, mean=(0.0,), std=(1.0,))
        return _task(LinearModel, spec, training)

    return make


@pytest.fixture
def normed_task() -> Callable[[TrainingSettings], Task]:
    """Make a task for `NormedModel`: 2x2 images, 3 classes."""
    spec = InputSpec((2, 2, 1), num_classes=3, mean=(0.5,), std=(0.25,))
    return lambda training: _task(NormedModel, spec, training)


@pytest.fixture
def key() -> RandomKey:
    return RandomKey(11)


@pytest.fixture
def white() -> Callable[[Sequence[int]], ClientData]:
    """Make a client whose images are one white pixel (x = 1), with these labels."""

    def make(labels: Sequence[int]) -> ClientData:
        spec = InputSpec((1, 1, 1), num_classes=2, mean=(0.0,), std=(1.0,))
        images = torch.full((len(labels), 1, 1, 1), 255, dtype=torch.uint8)
        train = Examples(images, torch.tensor(labels, dtype=torch.int64))
        return ClientData(train, no_examples(spec))

    return make


@pytest.fixture
def noisy() -> Callable[..., ClientData]:
    """Make a client with random 2x2 images of 3 classes."""

    def make(
        num_train: int, num_validation: int, seed: int, labels: int = 3
    ) -> ClientData:
        def draw(number: int, purpose: str) -> Examples:
            generator = RandomKey(seed).child(purpose).numpy()
            images = generator.integers(0, 256, (number, 2, 2, 1), dtype="uint8")
            found = generator.integers(0, labels, number)
            return Examples(torch.from_numpy(images), torch.from_numpy(found))

        return ClientData(draw(num_train, "train"), draw(num_validation, "validation"))

    return make


@pytest.fixture
def run_rounds(key: RandomKey) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Drive a method serially; return the server's and the clients' last states."""

    def run(
        method: Method, clients: Mapping[str, ClientData], num_rounds: int
    ) -> tuple[Any, dict[str, Any]]:
        names = sorted(clients)
        state = method.init(names, key.child("init"))
        memory: dict[str, Any] = {}
        for server_round in range(1, num_rounds + 1):
            updates = []
            for name in names:
                rng = key.child(server_round, name)
                payload = method.broadcast(state, name, rng)
                memory[name], update = method.client_update(
                    payload, memory.get(name), clients[name], server_round, rng
                )
                updates.append((name, update))
            state = method.aggregate(state, iter(updates))
        return state, memory

    return run


@pytest.fixture
def train(
    normed_task: Callable[..., Task], noisy: Callable[..., ClientData]
) -> Callable[..., Trained]:
    """Make a round of any method of the catalogue; the server has data of its own."""

    def run(name: str, on_top: str | None = None) -> Trained:
        proxy = noisy(7, 0, seed=2).train
        task = replace(normed_task(TRAINING), proxy=lambda: proxy)
        return trained(name, task, noisy, on_top)

    return run

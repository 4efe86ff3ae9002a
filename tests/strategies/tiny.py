"""Tasks small enough to train by hand, their clients, updates and rounds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from knnper.data.examples import ClientData, Examples, InputSpec
from knnper.data.normalization import Normalizer
from knnper.embedding_model import EmbeddingModel
from knnper.experiment import TrainingSettings
from knnper.flat_model import FlatModel
from knnper.layers import TolerantBatchNorm2d
from knnper.models import build_model
from knnper.networks import MlpSettings, StackedLstmSettings, TinyCnnSettings
from knnper.seeding import RandomKey
from knnper.settings import Choice
from knnper.strategies.catalogue import METHODS, PERSONALIZERS
from knnper.strategies.core.assembly import build_task
from knnper.strategies.core.method import Method
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelUpdate
from knnper.strategies.core.task import Task

KEY = RandomKey(11)
ONE_PIXEL = InputSpec((1, 1, 1), num_classes=2, mean=(0.0,), std=(1.0,))
TEXT = InputSpec((1, 1, 5), 4, (), (), dtype="token")
FOUR_PIXELS = InputSpec((2, 2, 1), num_classes=3, mean=(0.5,), std=(0.25,))


class LinearModel(EmbeddingModel):
    """Logits W x of the pixels x, W of shape (num_classes, num_pixels), at first 0."""

    def __init__(self, spec: InputSpec) -> None:
        super().__init__()
        height, width, channels = spec.image_shape
        self.embedding_dim = height * width * channels
        self.num_classes = spec.num_classes
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


def task_of(
    build: Callable[[], EmbeddingModel],
    spec: InputSpec,
    training: TrainingSettings,
    weights: Tensor | None = None,
) -> Task:
    """Return the task of a small model, that starts from ``weights``."""

    def new_model(rng: RandomKey) -> FlatModel:
        with rng.torch():
            return FlatModel(build())

    model = new_model(RandomKey(3))
    return Task(
        model=model,
        initial_weights=model.read() if weights is None else weights,
        fresh_weights=lambda rng: new_model(rng).read(),
        normalize=Normalizer(spec),
        spec=spec,
        training=training,
    )


def linear_task(
    training: TrainingSettings | None = None, num_pixels: int = 1, **settings: Any
) -> Task:
    """Return a task for `LinearModel`: one row of pixels in [0, 1], 2 classes."""
    spec = replace(ONE_PIXEL, image_shape=(1, num_pixels, 1))
    training = training or TrainingSettings(**settings)
    return task_of(lambda: LinearModel(spec), spec, training)


def normed_task(training: TrainingSettings | None = None, **settings: Any) -> Task:
    """Return a task for `NormedModel`: 2x2 images, 3 classes."""
    training = training or TrainingSettings(**settings)
    return task_of(lambda: NormedModel(FOUR_PIXELS), FOUR_PIXELS, training)


WITHOUT_BATCH_NORM = {
    name for name, kind in METHODS.items() if not kind.allows_batch_norm
}


# Clients send statistics in one round, and make no steps.
OF_STATISTICS = {"afl"}


def plain_task(training: TrainingSettings | None = None, **settings: Any) -> Task:
    """Return a task for ``mlp``: 2x2 images, 3 classes, 8 and 4 hidden units."""
    return build_task(
        Choice("mlp", MlpSettings(hidden_sizes=(8, 4))),
        training or TrainingSettings(**settings),
        FOUR_PIXELS,
        RandomKey(3),
        evaluation_batch_size=256,
    )


def task_for(name: str, training: TrainingSettings | None = None) -> Task:
    """Return `normed_task`, or `plain_task` for a method that takes no BatchNorm."""
    return (normed_task if METHODS[name].allows_batch_norm else plain_task)(training)


def tiny_cnn_task(num_classes: int) -> Task:
    """Return a task for ``tiny_cnn``: 8x8 images of one channel."""
    choice = Choice("tiny_cnn", TinyCnnSettings())
    spec = InputSpec((8, 8, 1), num_classes, mean=(0.5,), std=(0.3,))
    model = build_model(choice, spec, RandomKey(0))
    return Task(
        model=model,
        initial_weights=model.read(),
        fresh_weights=lambda rng: build_model(choice, spec, rng).read(),
        normalize=Normalizer(spec),
        spec=spec,
        training=TrainingSettings(),
        evaluation_batch_size=32,
    )


def text_task(
    *, hidden_dim: int = 8, all_positions: bool = True, **training: Any
) -> Task:
    """Return the task of an LSTM: windows of 5 characters of 4, seeded alike."""
    settings = StackedLstmSettings(
        character_dim=4,
        hidden_dim=hidden_dim,
        num_layers=1,
        all_positions=all_positions,
    )
    return build_task(
        Choice("stacked_lstm", settings),
        TrainingSettings(batch_size=8, **training),
        TEXT,
        RandomKey(4),
        evaluation_batch_size=16,
    )


def white(labels: Sequence[int], validation: Sequence[int] = ()) -> ClientData:
    """Return a client whose images are one white pixel (x = 1), with these labels."""

    def split(of: Sequence[int]) -> Examples:
        images = torch.full((len(of), 1, 1, 1), 255, dtype=torch.uint8)
        return Examples(images, torch.tensor(of, dtype=torch.int64))

    return ClientData(split(labels), split(validation))


def noisy(
    num_train: int, num_validation: int, seed: int, labels: int = 3
) -> ClientData:
    """Return a client with random 2x2 images of 3 classes."""

    def draw(number: int, purpose: str) -> Examples:
        generator = RandomKey(seed).child(purpose).numpy()
        images = generator.integers(0, 256, (number, 2, 2, 1), dtype="uint8")
        classes = generator.integers(0, labels, number)
        return Examples(torch.from_numpy(images), torch.from_numpy(classes))

    return ClientData(draw(num_train, "train"), draw(num_validation, "validation"))


def run_rounds(
    method: Method, clients: Mapping[str, ClientData], num_rounds: int
) -> tuple[Any, dict[str, Any]]:
    """Drive a method serially; return the server's and the clients' last states."""
    names = sorted(clients)
    state = method.init(names, KEY.child("init"))
    memory: dict[str, Any] = {}
    for server_round in range(1, num_rounds + 1):
        updates, rng = [], KEY.child("round", server_round)  # as `Local` draws
        for name in names:
            payload = method.broadcast(state, name, rng)
            memory[name], update = method.client_update(
                payload, memory.get(name), clients[name], server_round, rng
            )
            updates.append((name, update))
        state = method.aggregate(state, iter(updates))
    return state, memory


def one_model_of(
    method: Method, payload: Any, memory: Any, data: ClientData, rng: RandomKey = KEY
) -> ModelPredictor:
    """Return what a client is served, which is one model."""
    predictor = method.personalize(payload, memory, data, rng)
    assert isinstance(predictor, ModelPredictor)
    return predictor


def of_name(name: str, task: Task, **settings: Any) -> Method:
    """Return a method of the catalogue with these settings."""
    return METHODS[name](task, METHODS[name].settings_type(**settings))


def topped(on_top: str, task: Task, **settings: Any) -> Method:
    """Return FedAvg with a personalisation of the catalogue on top."""
    top = PERSONALIZERS[on_top]
    return top(task, of_name("fedavg", task), top.settings_type(**settings))


class OppositeLogits(nn.Module):
    """From z, shape (n, 1), to logits (b z, -b z)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, z: Tensor) -> Tensor:
        logit = self.weight * z
        return torch.cat([logit, -logit], dim=1)


class OnOneFeature(EmbeddingModel):
    """A body from one pixel to one feature z, and `OppositeLogits`."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embedding_dim, self.num_classes = 1, 2
        self.body = body
        self.classifier = OppositeLogits()

    def embed(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x.flatten(start_dim=1))
        return features


def task_on_one_feature(
    body: nn.Module, training: TrainingSettings, *weights: float
) -> Task:
    """Return the task of `OnOneFeature` that starts from these weights."""
    initial = torch.tensor(weights, dtype=torch.float32)
    return task_of(lambda: OnOneFeature(body), ONE_PIXEL, training, initial)


def two_weights_task(training: TrainingSettings, a: float, b: float) -> Task:
    """Return the task with z = a x, whose weights are (a, b) at first."""
    return task_on_one_feature(nn.Linear(1, 1, bias=False), training, a, b)


Updates = list[tuple[str, ModelUpdate]]


def updates(*models: Sequence[float], examples: Sequence[int] = ()) -> Updates:
    """Return one update a model, of one example each if it is not said."""
    sizes = examples or [1] * len(models)
    pairs = zip(models, sizes, strict=True)
    return [
        (chr(ord("a") + i), ModelUpdate(torch.tensor(model), size, 0.5))
        for i, (model, size) in enumerate(pairs)
    ]


def on_a_line(*positions: float) -> Updates:
    """Return updates of two weights, of which the second is 0."""
    return updates(*([float(position), 0.0] for position in positions))


def random_updates(num_clients: int, num_weights: int, seed: int) -> Updates:
    """Return updates that differ in weights and numbers of examples."""
    generator = RandomKey(seed).numpy()
    models = generator.normal(size=(num_clients, num_weights)).astype("float32")
    sizes = generator.integers(1, 9, num_clients)
    return updates(*models.tolist(), examples=sizes.tolist())


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))

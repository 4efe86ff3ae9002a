"""Models with one weight in the head, small enough to train by hand."""

import torch
from torch import Tensor, nn

from knnper.experiment import TrainingSettings
from knnper.models.flat import EmbeddingModel
from knnper.strategies.core.task import Task
from tests.strategies.tiny import ONE_PIXEL, task_of


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

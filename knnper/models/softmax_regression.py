"""Softmax regression: a head on the inputs as they are."""

from dataclasses import dataclass

from torch import Tensor, nn

from knnper.data.examples import InputSpec
from knnper.models.base import EmbeddingModel, ModelSettings

INITIAL_DEVIATION = 0.01
"""Of the initial weights: small, so that what a client never saw stays near uniform,
and not zero, so that several models are not all the same."""


@dataclass(frozen=True)
class SoftmaxRegressionSettings(ModelSettings):
    """Only what all models have."""


class SoftmaxRegression(EmbeddingModel):
    """Logits W x + b; φ is the input itself, as a row.

    Parameters
    ----------
    settings
        Where to start.
    spec
        Inputs of any shape.
    """

    def __init__(
        self,
        settings: SoftmaxRegressionSettings,  # noqa: ARG002 (as every model)
        spec: InputSpec,
    ) -> None:
        super().__init__()
        height, width, channels = spec.image_shape
        self.embedding_dim = height * width * channels
        self.num_classes = spec.num_classes
        self.classifier = nn.Linear(self.embedding_dim, spec.num_classes)
        nn.init.normal_(self.classifier.weight, std=INITIAL_DEVIATION)
        nn.init.zeros_(self.classifier.bias)

    def embed(self, x: Tensor) -> Tensor:
        """Return the inputs as rows, shape (n, p)."""
        return x.flatten(start_dim=1)

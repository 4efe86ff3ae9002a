"""The predictors that clients serve."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from knnper.strategies.core.task import Task


class Predictor(Protocol):
    """A personalised client's predictions."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, num_classes); rows sum to 1.

        ``images``: uint8, shape (n, height, width, channels).
        """

    def describe(self) -> Mapping[str, float]:
        """Return the choices made for this client, as in ``{"knn_weight": 0.7}``."""


@runtime_checkable
class EmbeddingPredictor(Predictor, Protocol):
    """A predictor with a representation, on which a local memory can be put."""

    def embed(self, images: Tensor) -> Tensor:
        """Return φ(x), float32 of shape (n, p), of uint8 images."""

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the probabilities (n, c) of representations (n, p)."""

    def without_validation(self) -> "EmbeddingPredictor":
        """Return the predictor as it would be without training on validation data."""


class RepresentationPredictor:
    """Base of predictors that are dataclasses with a representation and a head."""

    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    # The choices made for this client, as in ``{"prox_weight": 0.1}``.
    chosen: Mapping[str, float]
    # Makes the predictor trained without the validation split; None if this one was not
    # trained on that split.
    trained_alone: Callable[[], Self] | None

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities (n, c) of images (n, height, width, channels)."""
        return self.head(self.embed(images))

    def without_validation(self) -> Self:
        """Return the predictor that was not trained on the validation split."""
        return self if self.trained_alone is None else self.trained_alone()

    def describe(self) -> Mapping[str, float]:
        """Return the choices made for this client."""
        return self.chosen


@dataclass(frozen=True)
class MixturePredictor(RepresentationPredictor):
    """Serves Σ_m π_m h_m."""

    task: Task = field(repr=False)  # Gives the architecture
    components: Sequence[Tensor] = field(repr=False)  # M of shape (num_weights,)
    mixture_weights: Tensor  # π, shape (M,), summing to 1
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], MixturePredictor] | None" = None

    @override
    def embed(self, images: Tensor) -> Tensor:
        """Return the components' representations side by side, shape (n, M p)."""
        parts = [self.task.embed(weights, images) for weights in self.components]
        return torch.cat(parts, dim=1)

    @override
    def head(self, embeddings: Tensor) -> Tensor:
        """Return the mixture's probabilities (n, c) of representations (n, M p)."""
        parts = embeddings.tensor_split(len(self.components), dim=1)
        mixed = [
            share * self.task.head(weights, part)
            for share, weights, part in zip(
                self.mixture_weights, self.components, parts, strict=True
            )
        ]
        return torch.stack(mixed).sum(dim=0)


@dataclass(frozen=True)
class ModelPredictor(RepresentationPredictor):
    """Serves h_w."""

    task: Task = field(repr=False)  # Gives the architecture
    weights: Tensor = field(repr=False)  # w, shape (num_weights,)
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], ModelPredictor] | None" = None

    @override
    def embed(self, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p)."""
        return self.task.embed(self.weights, images)

    @override
    def head(self, embeddings: Tensor) -> Tensor:
        """Return the probabilities (n, c) of representations (n, p)."""
        return self.task.head(self.weights, embeddings)


@dataclass(frozen=True)
class HeadPredictor(RepresentationPredictor):
    """Serves another head than the model's on φ_w."""

    task: Task = field(repr=False)  # Gives the architecture
    weights: Tensor = field(repr=False)  # w, shape (num_weights,)
    # From φ_w(x), (n, p), to probabilities (n, c).
    head: Callable[[Tensor], Tensor] = field(repr=False)
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], HeadPredictor] | None" = None

    @override
    def embed(self, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p)."""
        return self.task.embed(self.weights, images)

"""The predictor of a method whose outcome is several models, mixed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strategies.core.task import Task


@dataclass(frozen=True)
class MixturePredictor:
    """Serves Σ_m π_m h_m.

    Attributes
    ----------
    task
        Gives the architecture.
    components
        M tensors of shape (num_weights,).
    mixture_weights
        π, shape (M,), summing to 1.
    chosen
        What is reported of this client.
    trained_alone
        Makes the predictor that was trained without the validation split; None where
        this one was.
    """

    task: Task
    components: Sequence[Tensor]
    mixture_weights: Tensor
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], MixturePredictor] | None" = None

    def __call__(self, images: Tensor) -> Tensor:
        """Return Σ_m π_m h_m(x), shape (n, c), of uint8 images."""
        return self.head(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        """Return the components' representations side by side, shape (n, M p)."""
        parts = [self.task.embed(weights, images) for weights in self.components]
        return torch.cat(parts, dim=1)

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

    def without_validation(self) -> "MixturePredictor":
        """Return the predictor before it was trained on the validation split."""
        return self if self.trained_alone is None else self.trained_alone()

    def describe(self) -> Mapping[str, float]:
        """Return what was chosen."""
        return self.chosen

"""The predictor of a method whose outcome is one model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from strategies.core.task import Task


@dataclass(frozen=True)
class ModelPredictor:
    """Serves h_w.

    Attributes
    ----------
    task
        Gives the architecture.
    weights
        w, shape (num_weights,).
    chosen
        What was chosen for this client, as in ``{"prox_weight": 0.1}``.
    trained_alone
        Makes the predictor that was trained without the validation split; None where
        this one was.
    """

    task: Task
    weights: Tensor
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], ModelPredictor] | None" = None

    def __call__(self, images: Tensor) -> Tensor:
        """Return h_w(x), shape (n, c), of uint8 images (n, height, width, channels)."""
        return self.task.probabilities(self.weights, images)

    def embed(self, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p)."""
        return self.task.embed(self.weights, images)

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the probabilities (n, c) of representations (n, p)."""
        return self.task.head(self.weights, embeddings)

    def without_validation(self) -> "ModelPredictor":
        """Return the predictor before it was trained on the validation split."""
        return self if self.trained_alone is None else self.trained_alone()

    def describe(self) -> Mapping[str, float]:
        """Return what was chosen."""
        return self.chosen

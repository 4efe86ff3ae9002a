"""The predictor of a method whose outcome is one model."""

from collections.abc import Mapping
from dataclasses import dataclass

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
    """

    task: Task
    weights: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        """Return h_w(x), shape (n, c), of uint8 images (n, height, width, channels)."""
        return self.task.probabilities(self.weights, images)

    def describe(self) -> Mapping[str, float]:
        """Return that nothing was chosen."""
        return {}

"""Weighted means of updates that arrive one after the other."""

from collections.abc import Iterable

import torch
from torch import Tensor

from strategies.core.records import ModelState, ModelUpdate


class RunningMean:
    """A weighted mean of equally shaped tensors that keeps only their sum.

    The sum is kept in float64: the mean of one tensor is exactly that tensor, and the
    memory does not grow with the number of tensors.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._total = 0.0

    def add(self, tensor: Tensor, weight: float) -> None:
        """Add ``tensor`` with ``weight``, which must be positive.

        Raises
        ------
        ValueError
            If the weight is not positive or the shape is not that of the others.
        """
        if not weight > 0:
            raise ValueError(f"expected a positive weight, found {weight}")
        if self._sum is None:
            self._sum = torch.zeros(tensor.shape, dtype=torch.float64)
        if tensor.shape != self._sum.shape:
            expected, found = tuple(self._sum.shape), tuple(tensor.shape)
            raise ValueError(f"expected shape {expected}, found {found}")
        self._sum.add_(tensor, alpha=weight)
        self._total += weight

    def result(self) -> Tensor:
        """Return the mean, float32, of the shape of what was added."""
        return self.result_float64().float()

    def result_float64(self) -> Tensor:
        """Return the mean in float64, for maths that goes on with it."""
        if self._sum is None:
            raise ValueError("the mean of no tensors is not defined")
        return self._sum / self._total


def average_weights(updates: Iterable[tuple[str, ModelUpdate]]) -> ModelState:
    """Return w = Σ_m (n_m / Σ n) w_m over the clients that replied.

    knn-per.txt, Eq. 13, renormalised over the replies so that the weights sum to one
    under partial participation too.
    """
    mean = RunningMean()
    for _, update in updates:
        mean.add(update.weights, update.num_examples)
    return ModelState(mean.result())

"""Weighted means of updates that arrive one after the other."""

from collections.abc import Iterable
from operator import itemgetter

import torch
from torch import Tensor

from knnper.errors import RunError
from knnper.strategies.core.records import ModelState, ModelUpdate


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


def denominator(values: Tensor) -> Tensor:
    """Return non-negative ``values`` to divide by: 1e-30 in place of what is 0.

    A quotient whose numerator is 0 too is then 0.
    """
    return values.clamp_min(1e-30)


def hold(updates: Iterable[tuple[str, ModelUpdate]]) -> list[ModelUpdate]:
    """Return all updates, sorted by client: ties then end the same in any order."""
    return [update for _, update in sorted(updates, key=itemgetter(0))]


def require(expected: int, found: int, reason: str) -> None:
    """Raise an error where a rule has too few updates to compare.

    Parameters
    ----------
    expected, found
        Updates of one round, or clients before the first.
    reason
        Where the expected number comes from, as in ``2 f + 3 with f = 1``.

    Raises
    ------
    RunError
        If fewer were found than expected.
    """
    if found < expected:
        raise RunError(
            f"expected at least {expected} clients in a round ({reason}), found "
            f"{found}; raise training.participation or take more clients, or lower "
            "method.num_malicious"
        )


def project_to_simplex(point: Tensor) -> Tensor:
    """Return the point of the simplex that is nearest to ``point``.

    Duchi, Shalev-Shwartz, Singer, Chandra, "Efficient Projections onto the l1-Ball for
    Learning in High Dimensions", ICML 2008, Figure 1.

    Parameters
    ----------
    point
        float64 of shape (n,), n of at least 1.

    Returns
    -------
    Tensor
        float64 of shape (n,), not negative, summing to 1.
    """
    # The same for any shift of all coordinates: large ones would swallow the 1.
    shifted = point - point.max()
    descending = shifted.sort(descending=True).values
    thresholds = (descending.cumsum(0) - 1) / torch.arange(1, len(point) + 1)
    num_positive = int((descending > thresholds).sum())
    return (shifted - thresholds[num_positive - 1]).clamp_min(0)

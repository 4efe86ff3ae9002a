"""Aggregation on the server: means of a stream of updates, and robust statistics."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.errors import RunError
from knnper.strategies.core.records import ModelState, ModelUpdate

AnyUpdate = TypeVar("AnyUpdate")

Updates = Iterable[tuple[str, AnyUpdate]]
"""A stream of ``(client_id, update)`` in client order that can be read once."""
_SLICE = 2**18
"""Coordinates processed at once, which bounds the memory beside the updates."""


class RunningMean:
    """A weighted mean of equally shaped tensors that keeps only their sum.

    The sum is kept in float64: the mean of one tensor is exactly that tensor, and the
    memory does not grow with the number of tensors.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._total = 0.0

    def add(self, tensor: Tensor, weight: float) -> None:
        """Add ``tensor`` with ``weight``, which must be positive."""
        if not weight > 0:
            raise ValueError(f"expected a positive weight, found {weight}")
        if self._sum is None:
            self._sum = torch.zeros(tensor.shape, dtype=torch.float64)
        if tensor.shape != self._sum.shape:
            expected, shape = tuple(self._sum.shape), tuple(tensor.shape)
            raise ValueError(f"expected shape {expected}, found {shape}")
        self._sum.add_(tensor, alpha=weight)
        self._total += weight

    def result(self) -> Tensor:
        """Return the mean, float32, of the shape of what was added."""
        return self.result_float64().float()

    def result_float64(self) -> Tensor:
        """Return the mean in float64, for further computation."""
        if self._sum is None:
            raise ValueError("the mean of no tensors is not defined")
        return self._sum / self._total


def average_weights(updates: Updates[ModelUpdate]) -> ModelState:
    """Average w = Σ_m (n_m / Σ n) w_m over the clients that replied.

    Marfoq et al. 2022, Eq. 13, renormalised over the replies so that the weights sum to
    one under partial participation too.
    """
    return ModelState(_mean(updates).result())


def _mean(updates: Updates[ModelUpdate]) -> RunningMean:
    mean = RunningMean()
    for _, update in updates:
        mean.add(update.weights, update.num_examples)
    return mean


def average_each(
    weighted: Iterable[tuple[Sequence[Tensor], float]],
) -> tuple[Tensor, ...]:
    """Average several tensors at once, over the clients' ``(tensors, weight)``."""
    means: list[RunningMean] = []
    for tensors, weight in weighted:
        means = means or [RunningMean() for _ in tensors]
        for mean, tensor in zip(means, tensors, strict=True):
            mean.add(tensor, weight)
    return tuple(mean.result() for mean in means)


def denominator(values: Tensor) -> Tensor:
    """Replace 0 by 1e-30 in non-negative ``values``, to divide by them."""
    return values.clamp_min(1e-30)


def hold(updates: Updates[AnyUpdate]) -> list[AnyUpdate]:
    """Return all updates, sorted by client, so that ties do not depend on arrival."""
    return [update for _, update in sorted(updates, key=itemgetter(0))]


def require(expected: int, count: int, reason: str) -> None:
    """Raise RunError if a robust rule has too few updates to compare."""
    if count < expected:
        raise RunError(
            f"expected at least {expected} clients in a round ({reason}), found "
            f"{count}; raise training.participation (training.timing.buffer_size where "
            "updates are buffered) or take more clients, or lower method.num_malicious"
        )


def mean_in_parts(
    updates: Updates[ModelUpdate], num_parameters: int
) -> tuple[Tensor, Tensor]:
    """Return the means of the parameters and of the buffers.

    A server's optimizer steps towards the mean of the parameters and may go beyond it.
    A buffer must take the mean itself, since a running variance extrapolated in that
    way can be negative.

    Returns float64 of shape (num_parameters,), and float32 of the other weights.
    """
    weights = _mean(updates).result_float64()
    return weights[:num_parameters], weights[num_parameters:].float()


def median(updates: Sequence[ModelUpdate]) -> Tensor:
    """Return the coordinate-wise median; the mean of the middle two if n is even."""
    return _slice_by_slice(updates, _median)


def trimmed_mean(updates: Sequence[ModelUpdate], num_trimmed: int) -> Tensor:
    """Return the coordinate-wise mean without ``num_trimmed`` extremes on each side.

    float32 of shape (num_weights,).
    """

    def rule(values: Tensor) -> Tensor:
        num_kept = len(values) - 2 * num_trimmed
        return values.sort(dim=0).values.narrow(0, num_trimmed, num_kept).mean(dim=0)

    return _slice_by_slice(updates, rule)


def mean_around_median(updates: Sequence[ModelUpdate], num_closest: int) -> Tensor:
    """Return the mean of the values closest to the median, float32 (num_weights,)."""

    def rule(values: Tensor) -> Tensor:
        distances = (values - _median(values)).abs()
        closest = distances.sort(dim=0, stable=True).indices[:num_closest]
        return values.gather(0, closest).mean(dim=0)

    return _slice_by_slice(updates, rule)


def squared_distances(updates: Sequence[ModelUpdate]) -> NDArray[np.float64]:
    """Return the squared distances between n updates, shape (n, n)."""
    products = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for values in _slices(updates):
        products += values @ values.T
    norms = products.diagonal()
    distances = norms[:, None] + norms[None, :] - 2 * products
    return np.asarray(distances)


def _median(values: Tensor) -> Tensor:
    ordered = values.sort(dim=0).values
    middle = (len(values) - 1) // 2
    return (ordered[middle] + ordered[len(values) // 2]) / 2


def _slice_by_slice(
    updates: Sequence[ModelUpdate], rule: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply ``rule``, float64 (n, d) -> (d,), to all coordinates."""
    return torch.cat([rule(values).float() for values in _slices(updates)])


def _slices(updates: Sequence[ModelUpdate]) -> Iterator[Tensor]:
    """Yield coordinates of all updates, float64 of shape (n, at most `_SLICE`)."""
    split = (torch.split(update.weights, _SLICE) for update in updates)
    for part in zip(*split, strict=True):
        yield torch.stack(part).double()

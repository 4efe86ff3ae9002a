"""Robust statistics of updates: medians, trimmed means, distances."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.strategies.core.records import ModelUpdate

_SLICE = 2**18
"""Coordinates at once: what is held beside the updates."""


def median(updates: Sequence[ModelUpdate]) -> Tensor:
    """Return the coordinate-wise median, float32 of shape (num_weights,).

    Of an even number of updates it is the mean of the two in the middle.
    """
    return _slice_by_slice(updates, _median)


def trimmed_mean(updates: Sequence[ModelUpdate], num_trimmed: int) -> Tensor:
    """Return the coordinate-wise mean without the extremes, float32 (num_weights,).

    Parameters
    ----------
    updates
        One a client, n of them.
    num_trimmed
        Values that are left out at each end, below n / 2.
    """

    def rule(values: Tensor) -> Tensor:
        kept = len(values) - 2 * num_trimmed
        return values.sort(dim=0).values.narrow(0, num_trimmed, kept).mean(dim=0)

    return _slice_by_slice(updates, rule)


def mean_around_median(updates: Sequence[ModelUpdate], num_closest: int) -> Tensor:
    """Return the mean of the values closest to the median, float32 (num_weights,).

    Parameters
    ----------
    updates
        One a client; of values that are equally close the first client's counts.
    num_closest
        Values of each coordinate that count.
    """

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
    distances: NDArray[np.float64] = (
        norms[:, None] + norms[None, :] - 2 * products
    ).numpy()
    return distances


def _median(values: Tensor) -> Tensor:
    ordered = values.sort(dim=0).values
    middle = (len(values) - 1) // 2
    return (ordered[middle] + ordered[len(values) // 2]) / 2


def _slice_by_slice(
    updates: Sequence[ModelUpdate], rule: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return ``rule``, float64 (n, d) -> (d,), applied to all coordinates."""
    return torch.cat([rule(values).float() for values in _slices(updates)])


def _slices(updates: Sequence[ModelUpdate]) -> Iterator[Tensor]:
    """Yield coordinates of all updates, float64 of shape (n, at most `_SLICE`)."""
    split = (torch.split(update.weights, _SLICE) for update in updates)
    for part in zip(*split, strict=True):
        yield torch.stack(part).double()

"""What λ to expect of a client, given how many examples it has."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from datastore.tuning.settings import PriorPoint

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prior:
    """A normal distribution of λ around λ_0, with variance 1 / (2 s).

    Attributes
    ----------
    knn_weight
        λ_0.
    strength
        s: how many scored examples it counts for.
    """

    knn_weight: float
    strength: float


NO_PRIOR = Prior(0.0, 0.0)


def prior_of_size(
    points: Sequence[PriorPoint], strength: float, num_examples: int
) -> Prior:
    """Return what to expect of a client with ``num_examples`` stored.

    λ_0 is linear in log n between the points and constant beyond the outermost.

    Parameters
    ----------
    points
        In any order; none is to expect nothing.
    strength
        s.
    num_examples
        n.
    """
    if not points:
        return NO_PRIOR
    ordered = sorted(points, key=lambda point: point.num_examples)
    sizes = [math.log(point.num_examples) for point in ordered]
    weights = [point.knn_weight for point in ordered]
    expected = np.interp(math.log(max(num_examples, 1)), sizes, weights)
    return Prior(float(expected), strength)


def weights_by_size(
    sizes: Sequence[int], knn_weights: Sequence[float], num_points: int = 5
) -> tuple[PriorPoint, ...]:
    """Return the λ that clients chose as a function of their size, never falling.

    The clients are sorted by size and cut into parts of nearly equal numbers, those of
    one size together. Each part gives a point: the geometric mean of the sizes and the
    mean λ. Where a larger size would have a smaller λ, neighbouring points take their
    common mean (isotonic regression: the least-squares fit of a function that does not
    fall).

    Parameters
    ----------
    sizes
        Stored examples of each client; those without are left out.
    knn_weights
        λ of each client.
    num_points
        The most points.

    Raises
    ------
    ValueError
        If the lengths differ, no client is left or ``num_points`` is not positive.
    """
    if len(sizes) != len(knn_weights):
        raise ValueError(
            f"expected one knn_weight for each size, found {len(knn_weights)} for "
            f"{len(sizes)}"
        )
    if num_points < 1:
        raise ValueError(f"expected at least one point, found {num_points}")
    known = np.array(sizes) > 0
    if not known.any():
        raise ValueError("expected at least one client with examples, found none")
    stored = np.array(sizes)[known]
    weights = np.array(knn_weights, np.float64)[known]
    part = _parts(stored, num_points)
    counts = np.bincount(part)
    log_sizes = np.bincount(part, np.log(stored)) / counts
    rising = _rising(np.bincount(part, weights) / counts, counts)
    return tuple(
        PriorPoint(round(math.exp(log_size)), float(weight))
        for log_size, weight in zip(log_sizes, rising, strict=True)
    )


def _parts(sizes: NDArray[np.int64], num_parts: int) -> NDArray[np.intp]:
    """Return the part of each client, from 0 on and without gaps."""
    ranks = np.searchsorted(np.sort(sizes), sizes)
    found: NDArray[np.intp] = np.unique(
        ranks * num_parts // len(sizes), return_inverse=True
    )[1]
    return found


def _rising(means: Floats, counts: NDArray[np.int64]) -> Floats:
    """Return the closest values that do not fall, by pooling adjacent violators."""
    pools: list[tuple[float, int, int]] = []  # mean, clients, points
    for point in zip(means.tolist(), counts.tolist(), strict=True):
        mean, clients, points = *point, 1
        while pools and pools[-1][0] > mean:
            before, more, others = pools.pop()
            mean = (before * more + mean * clients) / (more + clients)
            clients, points = more + clients, others + points
        pools.append((mean, clients, points))
    return np.repeat([one[0] for one in pools], [one[2] for one in pools])

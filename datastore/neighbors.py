"""The nearest stored examples, and exact distances to them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Neighbors:
    """The nearest stored examples of m queries, nearest first; k' = min(k, n).

    Attributes
    ----------
    squared_distances
        Squared Euclidean distances, float64 of shape (m, k').
    labels
        int64, shape (m, k').
    ids
        In the store, int64 of shape (m, k'). Of two examples at the same distance the
        one with the smaller id comes first.
    """

    squared_distances: Tensor
    labels: Tensor
    ids: Tensor

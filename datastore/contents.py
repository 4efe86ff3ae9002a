"""What a store holds, but for the vectors: ids, labels, times of arrival."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Contents:
    """n stored examples, ascending by id.

    Attributes
    ----------
    ids
        int64, shape (n,). Given in the order of storing, and never given again.
    labels
        int64, shape (n,).
    arrivals
        Seconds since 1970 (UTC), float64 of shape (n,).
    """

    ids: Ids
    labels: NDArray[np.int64]
    arrivals: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, ids: Ids) -> NDArray[np.intp]:
        """Return where ``ids``, all of which are stored, stand; the same shape."""
        return np.searchsorted(self.ids, ids)

    def followed_by(self, later: "Contents") -> "Contents":
        """Return these examples and then ``later``, whose ids are all larger."""
        return Contents(
            np.concatenate([self.ids, later.ids]),
            np.concatenate([self.labels, later.labels]),
            np.concatenate([self.arrivals, later.arrivals]),
        )

    def without(self, ids: Ids) -> "Contents":
        """Return these examples less ``ids``, all of which are stored."""
        kept = np.ones(len(self), dtype=bool)
        kept[self.positions(ids)] = False
        return self.take(kept)

    def take(self, chosen: NDArray[np.bool_]) -> "Contents":
        """Return the examples that ``chosen``, bool of shape (n,), marks."""
        return Contents(self.ids[chosen], self.labels[chosen], self.arrivals[chosen])


def no_contents() -> Contents:
    """Return what an empty store holds."""
    return Contents(
        np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64)
    )

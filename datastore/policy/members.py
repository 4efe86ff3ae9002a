"""Which positions have which label, while a batch is decided about."""

from array import array

import numpy as np
from numpy.typing import NDArray


class Members:
    """Positions by label, each label's ascending.

    Parameters
    ----------
    labels
        Of the positions 0, 1, ..., int64 of shape (n,).
    num_classes
        c.
    """

    def __init__(self, labels: NDArray[np.int64], num_classes: int) -> None:
        self._labels = labels
        self._counts = np.bincount(labels, minlength=num_classes)
        self._positions: dict[int, array[int]] = {}

    def __len__(self) -> int:
        return int(self._counts.sum())

    def count(self, label: int) -> int:
        """Return the number of positions with ``label``."""
        return int(self._counts[label])

    def largest(self) -> list[int]:
        """Return the labels that have the most positions, ascending."""
        return np.flatnonzero(self._counts == self._counts.max()).tolist()

    def append(self, label: int, position: int) -> None:
        """Add a position that is larger than all before."""
        self._of(label).append(position)
        self._counts[label] += 1

    def pop(self, label: int, which: int) -> int:
        """Remove and return the position that stands at ``which`` in its label."""
        position = self._of(label).pop(which)
        self._counts[label] -= 1
        return position

    def _of(self, label: int) -> "array[int]":
        """Return a label's positions; most batches touch few labels."""
        if label not in self._positions:
            found = np.flatnonzero(self._labels == label).astype(np.int64)
            self._positions[label] = array("q", found.tobytes())
        return self._positions[label]

"""Vectors in 8 bits, which rule most of them out before any is compared as it is.

A search reads every vector, and takes as long as reading them. The codes are a quarter
of that. How far a vector is from what its code stands for is known, so a distance
between codes bounds the distance between vectors from below (triangle inequality):
vectors beyond the bound need not be read, and what is found is exact all the same.
"""

import threading
from collections.abc import Iterator

import faiss
import numpy as np
from numpy.typing import NDArray

from datastore.index.base import Ids, Vectors
from datastore.index.codes import place_codes
from datastore.index.single_thread import use_one_thread

FEWEST_NUMBERS = 2**20
"""A smaller index is read as fast as a screen is used."""

_STEPS = 255
_GROUP = 16
"""FAISS compares codes in integers where p is a multiple of it."""

_LARGEST_DIM = (2**31 - 1) // _STEPS**2
"""So that a squared distance between codes fits in 32 bits."""

_ROWS_AT_ONCE = 256
_MARGIN = 1e-6
"""More than float32 loses of a squared distance, and float64 of an error."""

_TRIALS, _WORTHWHILE = 32, 0.5

Bounds = NDArray[np.float64]
Numbers = NDArray[np.float64]


def can_screen(num_vectors: int, dim: int) -> bool:
    """Return whether a screen of so many vectors of that length may pay."""
    fits = dim % _GROUP == 0 and dim <= _LARGEST_DIM
    return fits and num_vectors * dim >= FEWEST_NUMBERS


class Screen:
    """Codes of vectors, by slot; kept in memory only.

    Code c of a number stands for ``low + c step``; the two are the same for all.

    Parameters
    ----------
    vectors
        Finite, shape (n, p), by slot; ``can_screen(n, p)``.
    """

    def __init__(self, vectors: Vectors) -> None:
        self._low, highest = float(vectors.min()), float(vectors.max())
        self._step = (highest - self._low) / _STEPS or 1.0
        self._error = 0.0
        self._num_asked = self._num_answered = 0
        self._codes = faiss.IndexScalarQuantizer(
            vectors.shape[1], faiss.ScalarQuantizer.QT_8bit_direct
        )
        use_one_thread()
        self._codes.codes.reserve(vectors.size)
        self._add(vectors)

    @property
    def num_bytes(self) -> int:
        """Bytes of the codes."""
        return int(self._codes.codes.size())

    @property
    def is_worthwhile(self) -> bool:
        """Whether it could answer often enough, as far as was tried."""
        return (
            self._num_asked < _TRIALS
            or self._num_answered > _WORTHWHILE * self._num_asked
        )

    def extended(self, vectors: Vectors) -> bool:
        """Return whether ``vectors`` (m, p) have codes now, in the slots that follow.

        Not if their codes were so far off that nothing would be ruled out.
        """
        ...

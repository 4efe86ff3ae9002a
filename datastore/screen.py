"""Vectors in 8 bits, which rule most of them out before any is compared as it is.

A search takes as long as reading all vectors, and codes of a quarter of their size are
read sooner. How far each vector is from what its code stands for is known. So by the
triangle inequality the distance of two codes bounds the distance of the vectors from
below, and what is farther by its code than others are in truth need not be read at all.
What is found is exact.
"""

import threading

import faiss
import numpy as np
from numpy.typing import NDArray

from knnper.datastore.codes import address_of, use_huge_pages
from knnper.datastore.index import Ids, Vectors, use_one_thread

FEWEST_NUMBERS = 2**21
"""Fewer are read so soon that a screen saves nothing."""

FEWEST_TOGETHER = 2**22
"""Fewer stay in a processor's cache from one query to the next, where queries come
together, and are read as soon as codes are."""

_LARGEST = 1e15
"""Squared differences of larger numbers may overflow."""

_STEPS = 255

_GROUP = 16
"""FAISS compares codes as integers where p is a multiple of it."""

_MOST_NUMBERS = (2**31 - 1) // _STEPS**2
"""In a vector, so that a squared distance of codes fits in 32 bits."""

_AT_LEAST, _FOR_EACH = 256, 16
"""So many vectors may be left by the codes, or so many for each that is wanted."""

_SHARE = 8
"""At most one of so many, or reading them takes as long as reading all."""

_NUMBERS_AT_ONCE = 2**15
"""So many in float64 fit in a processor's cache."""

_MARGIN = 1e-6
"""More than float32 loses of a root, and float64 of an error."""

_EPS, _TINY = (float(one) for one in (np.finfo("f4").eps, np.finfo("f4").tiny))

_EPS_64 = float(np.finfo("f8").eps)

_NUM_TRIALS = 32

Numbers = NDArray[np.float64]

Slots = Ids


class Screen:
    """The codes of vectors, by slot. They are kept in memory only.

    Code c stands for the number ``low + c step``, in all dimensions alike.

    Parameters
    ----------
    vectors
        Shape (n, p), by slot, as `can_screen` accepts them.
    """

    def __init__(self, vectors: Vectors) -> None:
        self._low, high = float(vectors.min()), float(vectors.max())
        self._step = (high - self._low) / _STEPS or 1.0
        dim = vectors.shape[1]
        # Of numbers as large as these, in float64.
        self._lost = 16 * _EPS_64 * dim**0.5 * max(abs(self._low), abs(high))
        self._error = 0.0
        self._num_asked = self._num_answered = 0
        use_one_thread()
        self._codes = faiss.IndexScalarQuantizer(
            dim, faiss.ScalarQuantizer.QT_8bit_direct
        )
        self._add(*self._coded(vectors))

    @property
    def num_bytes(self) -> int:
        """Bytes of the codes."""
        return int(self._codes.codes.size())

    @property
    def is_worthwhile(self) -> bool:
        """Whether it has answered at least every other query, after some trials."""
        is_tried = self._num_asked >= _NUM_TRIALS
        return not is_tried or 2 * self._num_answered >= self._num_asked

    def extend(self, vectors: Vectors) -> bool:
        """Give codes to ``vectors`` (m, p), in the slots that follow.

        Returns
        -------
        bool
            Whether that was done. If not, they are so far outside of what codes stand
            for that hardly anything could be ruled out any more.
        """
        codes, error = self._coded(vectors)
        if error > self._step * self._codes.d**0.5:
            return False
        self._add(codes, error)
        return True

    def nearest(
        self, query: Vectors, count: int, vectors: Vectors
    ) -> tuple[Vectors, Slots] | None:
        """Return squared distances, ascending, and slots of the nearest vectors.

        Parameters
        ----------
        query
            Shape (p,).
        count
            How many; ``can_leave(count, n)``.
        vectors
            All n by slot, shape (n, p). Only those are read that may be among them.

        Returns
        -------
        tuple or None
            Both of shape (count,). The distances are float32 sums of squared
            differences. None if too many vectors may be among the nearest.
        """
        self._num_asked += 1
        bounds, slots = self._bounds(query, _most_left(count))
        if bounds[-1] <= 0:
            # Far from all that codes stand for, where squares might overflow, too.
            return None
        squared = _squared_distances(query, vectors[slots[:count]])
        # None of these is farther; so the nearest are among those whose bound is less.
        reach = _longest(float(squared.max()), len(query))
        num_left = int(bounds.searchsorted(reach, "right"))
        if num_left == len(bounds):
            return None
        self._num_answered += 1
        rest = _squared_distances(query, vectors[slots[count:num_left]])
        squared = np.concatenate([squared, rest])
        order = squared.argsort(kind="stable")[:count]
        return squared[order], slots[order]

    def _bounds(self, query: Vectors, count: int) -> tuple[Numbers, Slots]:
        """Return lower bounds of distances, ascending, and slots, of the nearest codes.

        No vector that is not among them is nearer than the last of the bounds.
        """
        use_one_thread()
        # After a model has run nothing is in the processor's cache, and so each
        # operation takes long: fewer of them than `_coded` needs for many vectors.
        scaled = np.subtract(query, self._low, dtype=np.float64)
        scaled *= 1 / self._step
        code = np.minimum(np.maximum(np.rint(scaled), 0), _STEPS)
        found, slots = self._codes.search(code[None].astype(np.float32), count)
        scaled -= code
        error = self._possible_error(float(scaled @ scaled)) + self._error
        apart = np.sqrt(found[0], dtype=np.float64)
        apart *= self._step * (1 - _MARGIN)
        apart -= error
        return apart, slots[0]

    def _coded(self, vectors: Vectors) -> tuple[NDArray[np.uint8], float]:
        """Return codes (m, p), and at most how far a vector is from what one means."""
        codes = np.empty(vectors.shape, np.uint8)
        squared = 0.0
        num_rows = max(1, _NUMBERS_AT_ONCE // vectors.shape[1])
        for start in range(0, len(vectors), num_rows):
            rows = slice(start, start + num_rows)
            scaled = vectors[rows].astype(np.float64)
            scaled -= self._low
            scaled *= 1 / self._step
            codes[rows] = nearest = np.rint(scaled).clip(0, _STEPS)
            scaled -= nearest
            squared = max(squared, float(np.einsum("np,np->n", scaled, scaled).max()))
        return codes, self._possible_error(squared)

    def _possible_error(self, squared: float) -> float:
        """Return the length of a vector off by so many steps, squared, or more."""
        error: float = self._step * squared**0.5 * (1 + _MARGIN) + self._lost
        return error

    def _add(self, codes: NDArray[np.uint8], error: float) -> None:
        use_one_thread()
        self._codes.add_sa_codes(codes)
        use_huge_pages(address_of(self._codes), self._codes.codes.size())
        self._error = max(self._error, error)


def can_screen(vectors: Vectors) -> bool:
    """Return whether a screen of ``vectors`` (n, p) is possible, and may pay."""
    dim = vectors.shape[1]
    fits = dim % _GROUP == 0 and dim <= _MOST_NUMBERS
    return (
        fits
        and vectors.size >= FEWEST_NUMBERS
        and bool(vectors.max() <= _LARGEST and vectors.min() >= -_LARGEST)
    )


def pays(num_queries: int, vectors: Vectors) -> bool:
    """Return whether a screen of ``vectors`` may pay for queries that come together."""
    return num_queries == 1 or vectors.size >= FEWEST_TOGETHER


def can_leave(count: int, num_vectors: int) -> bool:
    """Return whether a screen of so many vectors may pay where ``count`` are wanted."""
    return _SHARE * _most_left(count) <= num_vectors


def _most_left(count: int) -> int:
    return max(_AT_LEAST, _FOR_EACH * count)


def _squared_distances(query: Vectors, vectors: Vectors) -> Vectors:
    """Return float32 sums (m,) of the squared differences of (p,) and (m, p)."""
    difference = vectors - query
    squared: Vectors = np.einsum("mp,mp->m", difference, difference)
    return squared


def _longest(squared: float, dim: int) -> float:
    """Return the longest distance whose square a float32 sum may have rounded so.

    Such a sum of p squares is off by at most about p 2^-23 of itself, and by p times
    the smallest normal number where squares underflow.
    """
    bound: float = (squared * (1 + (dim + 8) * _EPS) + dim * _TINY) ** 0.5
    return bound * (1 + _MARGIN)


PAYS_AFTER = 64
"""Queries between two changes that take something away, after which a screen is made:
that takes as long as a hundred queries do without it."""


class Screening:
    """Makes a `Screen` once it pays, and keeps it in line with the vectors.

    Any number of threads may ask at a time, but not while vectors change.
    """

    def __init__(self) -> None:
        self._screen: Screen | None = None
        self._num_queries = 0
        self._making = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return 0 if self._screen is None else self._screen.num_bytes

    def screen(self, vectors: Vectors, num_queries: int, count: int) -> Screen | None:
        """Return what ``num_queries`` queries are to be screened with, if anything.

        Parameters
        ----------
        vectors
            All n by slot, shape (n, p).
        num_queries
            How many come now.
        count
            How many vectors each of them wants.
        """
        if not (pays(num_queries, vectors) and can_leave(count, len(vectors))):
            return None
        if self._screen is None:
            self._num_queries += num_queries
            if self._num_queries > PAYS_AFTER:
                self._make(vectors)
        screen = self._screen
        return screen if screen is not None and screen.is_worthwhile else None

    def follow(self, vectors: Vectors) -> None:
        """Take up ``vectors`` (m, p), which were appended."""
        if self._screen is not None and not self._screen.extend(vectors):
            self.drop()

    def drop(self) -> None:
        """Keep nothing of the vectors, as some of them have to be forgotten."""
        self._screen, self._num_queries = None, 0

    def _make(self, vectors: Vectors) -> None:
        """Make a screen, unless another thread does; or try again much later."""
        if not self._making.acquire(blocking=False):
            return
        try:
            if self._screen is None:
                self._num_queries = 0
                self._screen = Screen(vectors) if can_screen(vectors) else None
        finally:
            self._making.release()

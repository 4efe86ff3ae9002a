"""When the vectors of an index are screened before they are compared."""

import threading

from datastore.index.base import Vectors
from datastore.index.screen import Screen, can_leave, can_screen, pays

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

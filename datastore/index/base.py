"""What every kind of index offers."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]

NOTHING = -1
"""The id that pads a row of candidates where fewer were found."""


class VectorIndex(ABC):
    """Vectors that are found by their distance, each under an id.

    An index is what a store searches; it is not safe to change it while another thread
    searches, and it checks nothing: the store does.

    Attributes
    ----------
    dim
        p, the length of a vector.
    keeps_vectors
        Whether `vectors` returns what was added, bit by bit.
    forgets
        Whether `remove` takes every trace of a vector out of the index. If not, the
        vector is merely never returned again until the index is built anew.
    """

    dim: int
    keeps_vectors: ClassVar[bool]
    forgets: ClassVar[bool]

    @abstractmethod
    def __len__(self) -> int:
        """Return n, the number of vectors that can be found."""

    @property
    @abstractmethod
    def ids(self) -> Ids:
        """The ids of the vectors that can be found, shape (n,), in any order."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of memory that the vectors and whatever finds them take."""

    @property
    @abstractmethod
    def is_outgrown(self) -> bool:
        """Whether the index should be built anew from its vectors.

        True where so many were added or removed since it was built that what it learnt
        from them, or its share of dead entries, makes it worse than a new one.
        """

    @abstractmethod
    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add ``vectors`` (m, p) under ``ids`` (m,), none of which is there."""

    @abstractmethod
    def remove(self, ids: Ids) -> None:
        """Never return ``ids`` (m,) again; all of them are there."""

    @abstractmethod
    def candidates(self, queries: Vectors, count: int) -> tuple[Vectors, Ids]:
        """Return rough squared distances, ascending, and ids, each (m, count).

        Parameters
        ----------
        queries
            Shape (m, p).
        count
            At least 1 and at most n. Where fewer are found, rows end in `NOTHING`.
        """

    def candidates_with_vectors(
        self, queries: Vectors, count: int
    ) -> tuple[Vectors, Ids, Vectors]:
        """Return `candidates`, and their vectors of shape (m, count, p).

        Only of a kind that keeps them. What stands in place of the vectors of
        `NOTHING` means nothing.
        """
        rough, ids = self.candidates(queries, count)
        found = np.where(ids == NOTHING, self.ids[0], ids)
        return rough, ids, self.vectors(found.ravel()).reshape(*ids.shape, -1)

    @abstractmethod
    def vectors(self, ids: Ids) -> Vectors:
        """Return the vectors (m, p) under ``ids`` (m,), all of which are there.

        They are what was added where `keeps_vectors`, else what is left of it.
        """

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write everything to the one file ``path``.

        Raises
        ------
        OSError
            If it cannot be written.
        """

"""What is searched: an index and the labels of what it finds, for many threads."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from datastore.contents import Contents, Ids
from datastore.core.ranking import nearest
from datastore.core.read_write_lock import ReadWriteLock
from datastore.core.rows import Version
from datastore.index.base import VectorIndex, Vectors
from datastore.index.catalogue import IndexSettings, build_index
from datastore.neighbors import Neighbors

ReadVectors = Callable[[Ids], Vectors]
"""Reads stored embeddings (m, p) from where the truth is; each id is asked for once."""


class View:
    """An index and the contents that belong to it; searches and changes may overlap.

    Parameters
    ----------
    index
        Holds the same ids as ``contents``.
    contents
        What the store holds.
    settings
        Of the index.
    version
        Whose embeddings these are.
    read_vectors
        Used where the index does not keep the vectors as they were.
    """

    def __init__(
        self,
        index: VectorIndex,
        contents: Contents,
        settings: IndexSettings,
        version: Version,
        read_vectors: ReadVectors,
    ) -> None:
        self._lock = ReadWriteLock()
        self._index = index
        self._contents = contents
        self._settings = settings
        self.version = version
        self._read_vectors = read_vectors

    @property
    def contents(self) -> Contents:
        """What the store holds."""
        return self._contents

    @property
    def index(self) -> VectorIndex:
        """The index; only the thread that changes the view may use it."""
        return self._index

    def search(self, queries: Tensor, num_neighbors: int) -> Neighbors:
        """Return the nearest examples; see `Store.search`."""
        asked = np.ascontiguousarray(queries.detach().numpy())
        with self._lock.reading:
            num_found = min(num_neighbors, len(self._contents))
            if num_found == 0 or len(asked) == 0:
                return _none(len(asked), num_found)
            distances, ids = nearest(
                asked, self._index, self._settings, num_found, self._read_vectors
            )
            contents = self._contents
            labels = contents.labels[contents.ids.searchsorted(ids)]
        return Neighbors(
            torch.from_numpy(distances), torch.from_numpy(labels), torch.from_numpy(ids)
        )

    def vectors(self, ids: Ids) -> Vectors:
        """Return stored embeddings (m, p) by id, as they were added."""
        with self._lock.reading:
            return self._vectors_of(ids)

    def change(self, added: Contents, vectors: Vectors, removed: Ids) -> None:
        """Remove some examples and add others, at once for whoever searches."""
        with self._lock.writing:
            if len(removed):
                self._index.remove(removed)
                self._contents = self._contents.without(removed)
            if len(added):
                self._index.add(added.ids, vectors)
                self._contents = self._contents.followed_by(added)

    def rebuild(self) -> None:
        """Build the index anew from the vectors; searches go on meanwhile."""
        ids = self._contents.ids
        keeps = self._index.keeps_vectors
        vectors = self._index.vectors(ids) if keeps else self._read_vectors(ids)
        self.replace(
            build_index(self._settings, self._index.dim, ids, vectors), self._contents
        )

    def replace(self, index: VectorIndex, contents: Contents) -> None:
        """Search another index from now on."""
        with self._lock.writing:
            self._index, self._contents = index, contents

    def _vectors_of(self, ids: Ids) -> Vectors:
        if self._index.keeps_vectors:
            return self._index.vectors(ids)
        return self._read_vectors(ids)


def _none(num_queries: int, num_found: int) -> Neighbors:
    ids = torch.empty((num_queries, num_found), dtype=torch.int64)
    return Neighbors(ids.double(), ids, ids)


def bring_up_to_date(
    index: VectorIndex, contents: Contents, read_vectors: ReadVectors
) -> int:
    """Make ``index`` hold the ids of ``contents``; return how many it had to change.

    An id stands for the same vector for ever, so only the ids are compared.
    """
    gone = np.setdiff1d(index.ids, contents.ids)
    missing = np.setdiff1d(contents.ids, index.ids)
    if len(gone):
        index.remove(gone)
    if len(missing):
        index.add(missing, read_vectors(missing))
    return len(gone) + len(missing)

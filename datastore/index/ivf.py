"""Vectors in lists, each with a centroid; a search looks into the nearest lists."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import faiss
import numpy as np

from datastore.index.base import NOTHING, Ids, VectorIndex, Vectors
from datastore.index.index_file import IndexFile, Learnt, read_index_file
from datastore.index.layout import learnable, require_layout
from datastore.index.searching import batches, queries_at_once, search
from datastore.index.settings import ExactVectorsSettings
from datastore.index.single_thread import use_one_thread
from knnper.config.ranges import PositiveInt

_FEWEST_IN_LIST = 40
"""With fewer vectors a list is hardly worth its centroid; k-means wants as many."""

_FEWEST_PROBES, _PROBED_PART = 8, 8

_OUTGROWN_FACTOR = 4
"""Lists are learnt anew when there are four times, or a quarter, of the vectors that
they were learnt from, or three times as many were added: their number should then be
twice, or half, of what it is, or nothing is left of what they were learnt from."""

_MOST_IN_SAMPLE = 64
"""Vectors for each centroid in k-means; more take longer and change little."""


@dataclass(frozen=True)
class ListsSettings(ExactVectorsSettings):
    """IVF: the vectors, in lists.

    On 50,000 embeddings of CIFAR-10 (p = 512), recall@10 with the default values is
    0.998 for a trained model and 0.985 for an untrained one.

    Attributes
    ----------
    num_lists
        nlist. Null is the square root of n. There is one list only while there are
        fewer than 40 vectors for each (n < 1,600 with null).
    num_probes
        nprobe: lists that a search looks into. Null is an eighth of the lists, and at
        least 8. A search that finds too little looks into all.
    """

    name: Literal["ivf"] = "ivf"
    num_lists: PositiveInt | None = None
    num_probes: PositiveInt | None = None

    def code_bytes(self, dim: int) -> int:
        """Return 4 p + 8: the vector and its id."""
        return 4 * dim + 8

    def lists_for(self, num_vectors: int) -> int:
        """Return the number of lists for n = ``num_vectors``."""
        num_lists = self.num_lists or max(1, round(math.sqrt(num_vectors)))
        return num_lists if num_vectors >= _FEWEST_IN_LIST * num_lists else 1

    def probes_for(self, num_lists: int) -> int:
        """Return the number of lists to look into."""
        default = max(_FEWEST_PROBES, math.ceil(num_lists / _PROBED_PART))
        return min(num_lists, self.num_probes or default)


class ListsIndex(VectorIndex):
    """IVF. A vector leaves no trace in its list, but in the centroids.

    Parameters
    ----------
    content
        An index that is trained, with a direct map; it keeps the ids itself.
    settings
        See `ListsSettings`.
    """

    keeps_vectors = True
    forgets = False

    def __init__(self, content: IndexFile, settings: ListsSettings) -> None:
        self._index: faiss.IndexIVFFlat = content.index
        self._learnt = content.learnt
        self._settings = settings
        self.dim = content.index.d

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def ids(self) -> Ids:
        """The ids, list by list, shape (n,)."""
        lists = self._index.invlists
        parts = [
            faiss.rev_swig_ptr(lists.get_ids(number), lists.list_size(number)).copy()
            for number in range(self._index.nlist)
            if lists.list_size(number) > 0
        ]
        return np.concatenate([np.empty(0, np.int64), *parts])

    @property
    def num_bytes(self) -> int:
        """Bytes of vectors, ids, centroids, and of the map from an id to its list."""
        codes = len(self) * self._settings.code_bytes(self.dim)
        # A bucket, and a node of key, value and link, of the hash table.
        direct_map = 32 * len(self)
        return codes + direct_map + 4 * self.dim * int(self._index.nlist)

    @property
    def is_outgrown(self) -> bool:
        """Whether other lists would do better."""
        num_sample, num_since = self._learnt.num_sample, self._learnt.num_since
        if num_sample == 0:
            return self._settings.lists_for(len(self)) > 1
        factor = _OUTGROWN_FACTOR
        return num_since >= (factor - 1) * num_sample or len(self) * factor < num_sample

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add ``vectors`` (m, p) under ``ids`` (m,)."""
        _put_into_lists(self._index, ids, vectors)
        self._learnt = self._learnt.followed_by(len(ids))

    def remove(self, ids: Ids) -> None:
        """Take ``ids`` (m,) out of their lists."""
        use_one_thread()
        self._index.remove_ids(faiss.IDSelectorArray(ids))

    def candidates(self, queries: Vectors, count: int) -> tuple[Vectors, Ids]:
        """Return rough squared distances and ids of the nearest, each (m, count)."""
        num_lists = int(self._index.nlist)
        distances, ids = self._probe(
            queries, count, self._settings.probes_for(num_lists)
        )
        short = ids[:, -1] == NOTHING
        if short.any():
            distances[short], ids[short] = self._probe(queries[short], count, num_lists)
        return distances, ids

    def vectors(self, ids: Ids) -> Vectors:
        """Return the vectors (m, p) under ``ids`` (m,)."""
        found: Vectors = self._index.reconstruct_batch(ids)
        return found

    def write(self, path: Path) -> None:
        """Write lists and centroids."""
        IndexFile(self._index, np.empty(0, np.int64), self._learnt).write(path)

    def _probe(
        self, queries: Vectors, count: int, num_probes: int
    ) -> tuple[Vectors, Ids]:
        params = faiss.SearchParametersIVF(nprobe=num_probes)
        at_once = queries_at_once(self.dim)
        return search(self._index, queries, count, at_once, params)


def build_lists(
    settings: ListsSettings, dim: int, ids: Ids, vectors: Vectors
) -> ListsIndex:
    """Return an index of ``vectors`` (n, p) under ``ids`` (n,)."""
    num_lists = settings.lists_for(len(vectors))
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(dim), dim, num_lists)
    index.set_direct_map_type(faiss.DirectMap.Hashtable)
    index.cp.max_points_per_centroid = _MOST_IN_SAMPLE
    use_one_thread()
    if num_lists == 1:
        # All go there, wherever its centroid is.
        index.quantizer.add(np.zeros((1, dim), dtype=np.float32))
        index.is_trained = True
    else:
        index.train(learnable(vectors))
    _put_into_lists(index, ids, vectors)
    num_sample = len(vectors) if num_lists > 1 else 0
    content = IndexFile(index, np.empty(0, np.int64), Learnt(num_sample))
    return ListsIndex(content, settings)


def read_lists(settings: ListsSettings, path: Path, dim: int) -> ListsIndex:
    """Return what was written; see `datastore.index.catalogue.read_index`."""
    content = read_index_file(path)
    require_layout(content, path, dim, {faiss.IndexIVFFlat: 4 * dim})
    return ListsIndex(content, settings)


def _put_into_lists(index: faiss.IndexIVFFlat, ids: Ids, vectors: Vectors) -> None:
    """Add ``vectors`` (m, p) under ``ids`` (m,) to the lists of ``index``.

    As ``add_with_ids``, which loses vectors whose distance to the centroids overflows.
    """
    use_one_thread()
    nearest = [
        index.quantizer.assign(learnable(vectors[rows]), 1)
        for rows in batches(len(vectors), queries_at_once(index.d))
    ]
    lists = np.concatenate([np.empty((0, 1), np.int64), *nearest])
    arrays = [np.ascontiguousarray(array) for array in (vectors, ids, lists)]
    index.add_core(len(vectors), *map(faiss.swig_ptr, arrays))

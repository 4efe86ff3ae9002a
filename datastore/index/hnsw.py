"""A graph in which a search walks from vector to vector, towards the query.

Malkov and Yashunin, "Efficient and robust approximate nearest neighbor search using
Hierarchical Navigable Small World graphs", 2018, Algorithms 1 to 5.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import faiss
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from datastore.index.base import NOTHING, Ids, VectorIndex, Vectors
from datastore.index.codes import decoded
from datastore.index.index_file import (
    IndexFile,
    Learnt,
    empty_file,
    read_index_file,
)
from datastore.index.layout import require_layout
from datastore.index.searching import queries_at_once, search
from datastore.index.settings import ExactVectorsSettings
from datastore.index.single_thread import use_one_thread
from datastore.index.slots import SlotTable
from knnper.config.ranges import PositiveInt

_LARGEST_DEAD_SHARE = 0.25
"""At this share a search keeps a third more candidates than in a new graph."""


@dataclass(frozen=True)
class GraphSettings(ExactVectorsSettings):
    """HNSW: the vectors, and links between near ones.

    On 50,000 embeddings of CIFAR-10 (p = 512), recall@10 with the default values is
    0.994 for a trained model and 0.978 for an untrained one.

    Attributes
    ----------
    num_links
        M: links of a vector, twice as many on the lowest level; 8 to 64 are useful.
    ef_construction
        efConstruction: candidates among which a new vector finds its links. Building
        takes that much longer; at least M is useful.
    ef_search
        efSearch: candidates that a search keeps. With 64, recall@10 on the untrained
        model's embeddings is 0.948; with 256, 0.993.
    """

    name: Literal["hnsw"] = "hnsw"
    num_links: Annotated[int, Field(ge=2, le=512)] = 16
    ef_construction: PositiveInt = 64
    ef_search: PositiveInt = 128

    def code_bytes(self, dim: int) -> int:
        """Return 4 p + 8 M: the vector and its links on the lowest level."""
        return 4 * dim + 8 * self.num_links


class GraphIndex(VectorIndex):
    """HNSW. What is removed stays in the graph, and is never returned.

    Parameters
    ----------
    content
        The graph, and the ids of its entries: `NOTHING` for a dead one.
    ef_search
        See `GraphSettings`.
    """

    keeps_vectors = True
    forgets = False

    def __init__(self, content: IndexFile, ef_search: int) -> None:
        self._index: faiss.IndexHNSWFlat = content.index
        self._storage = faiss.downcast_index(content.index.storage)
        self._table = SlotTable(content.ids)
        self._ef_search = ef_search
        self.dim = content.index.d
        self._note_the_dead()

    def __len__(self) -> int:
        return len(self._table) - self._num_dead

    @property
    def ids(self) -> Ids:
        """The ids of the entries that live, shape (n,)."""
        return self._table.by_slot[self._alive()]

    @property
    def num_bytes(self) -> int:
        """Bytes of vectors, links and the table of ids."""
        graph = self._index.hnsw
        links = 4 * (graph.neighbors.size() + graph.levels.size())
        starts = 8 * graph.offsets.size()
        vectors = self._storage.codes.size()
        return int(vectors + links + starts) + self._table.num_bytes

    @property
    def is_outgrown(self) -> bool:
        """Whether more than a quarter of the entries are dead."""
        return self._num_dead > _LARGEST_DEAD_SHARE * len(self._table)

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add ``vectors`` (m, p) under ``ids`` (m,)."""
        use_one_thread()
        self._index.add(vectors)
        self._table.append(ids)
        self._note_the_dead()

    def remove(self, ids: Ids) -> None:
        """Mark the entries of ``ids`` (m,) as dead."""
        self._table.vacate(ids)
        self._note_the_dead()

    def candidates(self, queries: Vectors, count: int) -> tuple[Vectors, Ids]:
        """Return rough squared distances and ids of the nearest, each (m, count).

        Where the graph does not lead to ``count`` that live, all are compared.
        """
        at_once = queries_at_once(self.dim)
        # As many of the candidates live as if there were no dead ones.
        num_entries = len(self._table)
        kept = min(num_entries, self._ef_search * num_entries // len(self))
        params = faiss.SearchParametersHNSW(efSearch=kept, sel=self._living)
        distances, slots = search(self._index, queries, count, at_once, params)
        short = slots[:, -1] == NOTHING
        if short.any():
            everything = faiss.SearchParameters(sel=self._living)
            distances[short], slots[short] = search(
                self._storage, queries[short], count, at_once, everything
            )
        return distances, self._table.ids_at(slots)

    def vectors(self, ids: Ids) -> Vectors:
        """Return the vectors (m, p) under ``ids`` (m,)."""
        return decoded(self._storage, self._table.slots_of(ids))

    def write(self, path: Path) -> None:
        """Write graph, vectors and ids."""
        IndexFile(self._index, self._table.by_slot, Learnt(num_sample=0)).write(path)

    def _alive(self) -> NDArray[np.bool_]:
        return np.not_equal(self._table.by_slot, NOTHING)

    def _note_the_dead(self) -> None:
        alive = self._alive()
        self._num_dead = int(len(alive) - alive.sum())
        # FAISS refers to the bits and does not copy them.
        self._bits = np.packbits(alive, bitorder="little")
        self._living = (
            faiss.IDSelectorBitmap(self._bits) if self._num_dead > 0 else None
        )


def build_graph(
    settings: GraphSettings, dim: int, ids: Ids, vectors: Vectors
) -> GraphIndex:
    """Return an index of ``vectors`` (n, p) under ``ids`` (n,)."""
    graph = faiss.IndexHNSWFlat(dim, settings.num_links)
    graph.hnsw.efConstruction = settings.ef_construction
    built = GraphIndex(empty_file(graph), settings.ef_search)
    built.add(ids, vectors)
    return built


def read_graph(settings: GraphSettings, path: Path, dim: int) -> GraphIndex:
    """Return what was written; see `datastore.index.catalogue.read_index`."""
    content = read_index_file(path)
    require_layout(content, path, dim, {faiss.IndexHNSWFlat: 4 * dim})
    return GraphIndex(content, settings.ef_search)

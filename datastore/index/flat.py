"""Vectors as they are, or in half precision; nothing is learnt from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import faiss
import numpy as np

from datastore.index.base import Ids, Vectors
from datastore.index.codes import CodesIndex, code_rows
from datastore.index.index_file import IndexFile, empty_file, read_index_file
from datastore.index.layout import require_layout
from datastore.index.screening import Screening
from datastore.index.settings import ExactVectorsSettings, LossySettings
from datastore.index.single_thread import use_one_thread

_LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class FlatSettings(ExactVectorsSettings):
    """Exact: every query is compared with every vector, in 4 p bytes each.

    Where a large index is asked often, p bytes more a vector, in memory only, rule most
    vectors out before they are read.
    """

    name: Literal["flat"] = "flat"

    @property
    def is_exhaustive(self) -> bool:
        """True."""
        return True

    def code_bytes(self, dim: int) -> int:
        """Return 4 p."""
        return 4 * dim


@dataclass(frozen=True)
class HalfSettings(LossySettings):
    """Numbers in half precision, in 2 p bytes a vector.

    Half precision keeps 11 bits of a number and ends at 65504, where larger ones are
    cut. On 50,000 embeddings of CIFAR-10 (p = 512) recall@10 is 0.999.
    """

    name: Literal["fp16"] = "fp16"

    def code_bytes(self, dim: int) -> int:
        """Return 2 p."""
        return 2 * dim


class FlatIndex(CodesIndex):
    """The vectors themselves.

    Rough squared distances are float32 sums of squared differences. They are off by at
    most about p 2^-23 of themselves, and by p times the smallest normal number where
    squares underflow, and do not depend on the other queries.

    A large index that is asked often takes a quarter more memory, for a `Screen`.
    """

    keeps_vectors = True
    forgets = True

    def __init__(self, content: IndexFile) -> None:
        super().__init__(content)
        self._by_slot: Vectors = code_rows(self._index).view(np.float32)
        self._screening = Screening()

    @property
    def num_bytes(self) -> int:
        """Bytes of the vectors, of their screen and of the table of ids."""
        return super().num_bytes + self._screening.num_bytes

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add ``vectors`` (m, p) under ``ids`` (m,)."""
        super().add(ids, vectors)
        self._by_slot = code_rows(self._index).view(np.float32)
        self._screening.follow(vectors)

    def remove(self, ids: Ids) -> None:
        """Overwrite the vectors of ``ids`` (m,)."""
        self._screening.drop()
        super().remove(ids)
        self._by_slot = code_rows(self._index).view(np.float32)

    def candidates_with_vectors(
        self, queries: Vectors, count: int
    ) -> tuple[Vectors, Ids, Vectors]:
        """Return `candidates`, and their vectors of shape (m, count, p)."""
        vectors = self._by_slot
        screen = self._screening.screen(vectors, len(queries), count)
        if screen is None:
            return self._compared(queries, count)
        found = [screen.nearest(query, count, vectors) for query in queries]
        known = [one for one in found if one is not None]
        if len(known) < len(queries):
            return self._compared(queries, count)
        slots = np.array([slots for _, slots in known])
        rough = np.array([squared for squared, _ in known])
        return rough, self._table.by_slot[slots], vectors[slots]

    def _compared(self, queries: Vectors, count: int) -> tuple[Vectors, Ids, Vectors]:
        """Return the same, from reading all vectors."""
        if len(queries) > self._queries_at_once:
            return super().candidates_with_vectors(queries, count)
        use_one_thread()
        # One call in place of many: beside the search itself, they take long.
        rough, slots, vectors = self._index.search_and_reconstruct(queries, count)
        return rough, self._table.ids_at(slots), vectors


class HalfIndex(CodesIndex):
    """Their numbers in half precision."""

    keeps_vectors = False
    forgets = True

    def _encodable(self, vectors: Vectors) -> Vectors:
        return np.clip(vectors, -_LARGEST_HALF, _LARGEST_HALF)


def build_flat(
    settings: FlatSettings,  # noqa: ARG001 (one signature for all kinds)
    dim: int,
    ids: Ids,
    vectors: Vectors,
) -> FlatIndex:
    """Return an index of ``vectors`` (n, p) under ``ids`` (n,)."""
    built = FlatIndex(empty_file(faiss.IndexFlatL2(dim)))
    built.add(ids, vectors)
    return built


def read_flat(settings: FlatSettings, path: Path, dim: int) -> FlatIndex:
    """Return what was written; see `datastore.index.catalogue.read_index`."""
    content = read_index_file(path)
    require_layout(content, path, dim, {faiss.IndexFlatL2: settings.code_bytes(dim)})
    return FlatIndex(content)


def build_half(
    settings: HalfSettings,  # noqa: ARG001 (one signature for all kinds)
    dim: int,
    ids: Ids,
    vectors: Vectors,
) -> HalfIndex:
    """Return an index of ``vectors`` (n, p) under ``ids`` (n,)."""
    half = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_fp16)
    built = HalfIndex(empty_file(half))
    built.add(ids, vectors)
    return built


def read_half(settings: HalfSettings, path: Path, dim: int) -> HalfIndex:
    """Return what was written; see `datastore.index.catalogue.read_index`."""
    content = read_index_file(path)
    layouts = {faiss.IndexScalarQuantizer: settings.code_bytes(dim)}
    require_layout(content, path, dim, layouts)
    return HalfIndex(content)

"""What every kind of index offers."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

import faiss
import numpy as np
from numpy.typing import NDArray

from knnper.datastore.examples import ExamplesMissingError, StoreDamagedError
from knnper.experiment import NonNegativeInt, Settings

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
        """Whether the index should be built anew from its vectors."""

    @abstractmethod
    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add ``vectors`` (m, p) under ``ids`` (m,), none of which is there."""

    @abstractmethod
    def remove(self, ids: Ids) -> None:
        """Never return ``ids`` (m,) again; all of them are there."""

    @abstractmethod
    def candidates(self, queries: Vectors, count: int) -> tuple[Vectors, Ids]:
        """Return rough squared distances, ascending, and ids, each (m, count)."""

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
        """Return the vectors (m, p) under ``ids`` (m,), all of which are there."""

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write everything to the one file ``path``."""


NUM_SPARE = 4
"""Candidates beyond k that FAISS is asked for, so that its order can be corrected."""


@dataclass(frozen=True)
class KindSettings(Settings, ABC):
    """Settings of one kind of index, and what a store has to know of the kind."""

    @property
    @abstractmethod
    def ranks_exactly(self) -> bool:
        """Whether candidates are compared anew, by exact distances to the vectors."""

    @property
    def is_exhaustive(self) -> bool:
        """Whether rough distances are exact but for rounding, and to every vector."""
        return False

    @abstractmethod
    def candidates_for(self, num_neighbors: int) -> int:
        """Return how many candidates to ask for where k neighbours are wanted."""

    @abstractmethod
    def code_bytes(self, dim: int) -> int:
        """Return the bytes that a vector of p = ``dim`` numbers takes in the index."""

    @property
    def num_needed(self) -> int:
        """The fewest vectors to learn from; with fewer they are kept as they are."""
        return 0

    @abstractmethod
    def fresh(self, dim: int) -> faiss.Index:
        """Return an empty index of FAISS that has learnt nothing."""

    def encodable(self, vectors: Vectors) -> Vectors:
        """Return what an index that learns nothing is given of ``vectors`` (n, p)."""
        return vectors

    def filled(self, dim: int, ids: Ids, vectors: Vectors) -> "IndexFile":
        """Return the content of an index of ``vectors`` (n, p) under ``ids`` (n,)."""
        use_one_thread()
        index, num_sample = self.fresh(dim), 0
        if self.num_needed == 0:
            vectors = self.encodable(vectors)
        elif len(vectors) < self.num_needed:
            index = faiss.IndexFlatL2(dim)
        else:
            vectors, num_sample = learnable(vectors), len(vectors)
            index.train(vectors)
        index.add(vectors)
        return IndexFile(index, ids, Learnt(num_sample))

    @abstractmethod
    def index_of(self, content: "IndexFile") -> VectorIndex:
        """Return the index with this content."""

    def build(self, dim: int, ids: Ids, vectors: Vectors) -> VectorIndex:
        """Return an index of vectors.

        The same vectors in the same order make the same index.

        Parameters
        ----------
        dim
            p, the length of a vector.
        ids
            No two alike, none negative, int64 of shape (n,); n may be 0.
        vectors
            Shape (n, p), in the order of ``ids``.

        Raises
        ------
        ConfigError
            If the settings do not go with p.
        """
        return self.index_of(self.filled(dim, ids, vectors))

    def read(self, path: Path, dim: int) -> VectorIndex:
        """Return the index that `VectorIndex.write` wrote to ``path``.

        What the settings say of searching may differ from those of the build.
        """
        content = read_index_file(path)
        expected = [self.fresh(dim)]
        if self.num_needed:
            expected.append(faiss.IndexFlatL2(dim))
        require_layout(content, path, expected)
        return self.index_of(content)


@dataclass(frozen=True)
class ExactVectorsSettings(KindSettings):
    """Settings of a kind that keeps the vectors as they are."""

    @property
    def ranks_exactly(self) -> bool:
        """True: the vectors are at hand."""
        return True

    def candidates_for(self, num_neighbors: int) -> int:
        """Return k and some to spare."""
        return num_neighbors + NUM_SPARE


@dataclass(frozen=True)
class LossySettings(KindSettings):
    """Settings of a kind that keeps less than the vectors.

    Attributes
    ----------
    rerank
        r: that many times k candidates are compared anew by exact distances to the
        original vectors. With 0 the distances to what the index kept are used.
    """

    rerank: NonNegativeInt = 0

    @property
    def ranks_exactly(self) -> bool:
        """Whether ``rerank`` is positive."""
        return self.rerank > 0

    def candidates_for(self, num_neighbors: int) -> int:
        """Return k, or r k with re-ranking."""
        return num_neighbors * max(1, self.rerank)


def use_one_thread() -> None:
    """Keep FAISS from OpenMP's default, with which forks hang and workers compete."""
    # A property of the calling thread, so this comes before each use. One thread also
    # makes the graph of HNSW the same in every build.
    faiss.omp_set_num_threads(1)


_MARK = int.from_bytes(b"knnindex", "little")

_HEADER = np.dtype("<i8")

_BYTES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Learnt:
    """How old it is what an index learnt from its vectors."""

    num_sample: int  # that were there when it learnt; 0 if it learnt nothing
    num_since: int = 0  # that were added since, whether or not they are still there

    def followed_by(self, num_added: int) -> "Learnt":
        """Return the same after ``num_added`` more."""
        return Learnt(self.num_sample, self.num_since + num_added)


@dataclass(frozen=True)
class IndexFile:
    """What is in the file."""

    index: faiss.Index
    ids: Ids  # by slot; none where FAISS keeps the ids itself
    learnt: Learnt

    def write(self, path: Path) -> None:
        """Write the file."""
        learnt = self.learnt
        header = [_MARK, len(self.ids), learnt.num_sample, learnt.num_since]
        use_one_thread()
        with path.open("wb") as file:
            file.write(np.array(header, _HEADER).data)
            file.write(np.ascontiguousarray(self.ids, _HEADER).data)
            # An error of `file.write` comes out of FAISS as it is.
            faiss.write_index(self.index, faiss.PyCallbackIOWriter(file.write))


def read_index_file(path: Path) -> IndexFile:
    """Return what `IndexFile.write` wrote."""
    use_one_thread()
    try:
        with path.open("rb") as file:
            return _read(file)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise StoreDamagedError(
            f"{path} is no index that can be read; build it anew from the vectors: "
            f"{error}"
        ) from error


def _read(file: BinaryIO) -> IndexFile:
    mark, num_slots, num_sample, num_since = _numbers(file, 4).tolist()
    if mark != _MARK:
        raise ValueError(f"expected the mark {_MARK} at its start, found {mark}")
    ids = _numbers(file, num_slots)
    index = faiss.read_index(faiss.PyCallbackIOReader(file.read, _BYTES_AT_ONCE))
    if file.read(1):
        raise ValueError("expected its end after the index, found more")
    return IndexFile(index, ids, Learnt(num_sample, num_since))


def _numbers(file: BinaryIO, count: int) -> Ids:
    size = count * _HEADER.itemsize
    left = os.fstat(file.fileno()).st_size - file.tell()
    if not 0 <= size <= left:
        raise ValueError(f"expected {size} bytes, found {left}")
    return np.frombuffer(file.read(size), _HEADER).astype(np.int64)


_LARGEST = 1e15


def learnable(vectors: Vectors) -> Vectors:
    """Return ``vectors`` with larger numbers cut to 1e15."""
    # Ranges, and distances between vectors in k-means, then do not overflow.
    return np.clip(vectors, -_LARGEST, _LARGEST)


def require_layout(
    content: IndexFile, path: Path, expected: Sequence[faiss.Index]
) -> None:
    """Refuse a file that holds nothing like one of these, or has lost ids."""
    index = content.index
    # The lists of IVF hold the ids themselves.
    keeps_ids = isinstance(index, faiss.IndexIVF)
    num_slots = index.ntotal if keeps_ids else len(content.ids)
    found = (*_layout(index), index.ntotal)
    known = [(*_layout(one), num_slots) for one in expected]
    if found not in known:
        raise StoreDamagedError(
            f"{path} holds another index than the settings say; build it anew from "
            "the vectors. Found type, size of an embedding, bytes of a code and number "
            f"{found}, expected {' or '.join(map(str, known))}"
        )


def _layout(index: faiss.Index) -> tuple[str, int, int]:
    return type(index).__name__, int(index.d), _code_size(index)


def _code_size(index: faiss.Index) -> int:
    """Return the bytes in which ``index`` keeps a vector."""
    if isinstance(index, faiss.IndexIVF):
        return int(index.code_size)
    holder = index.storage if isinstance(index, faiss.IndexHNSW) else index
    return int(holder.sa_code_size())


QUERIES_AT_ONCE, NUMBERS_AT_ONCE = 16, 65536
"""With so few queries, and numbers in them, FAISS sums squared differences. Above some
threshold (20 queries, in later versions 128,000 numbers) it expands them into a dot
product, whose cancellation can lose all digits of a small distance."""


def queries_at_once(dim: int) -> int:
    """Return how many queries of ``dim`` numbers FAISS may be given together."""
    return max(1, min(QUERIES_AT_ONCE, NUMBERS_AT_ONCE // dim))


def search(
    index: faiss.Index,
    queries: Vectors,
    count: int,
    at_once: int,
    params: faiss.SearchParameters | None = None,
) -> tuple[Vectors, Ids]:
    """Return squared distances, ascending, and FAISS's labels, each (m, count)."""
    use_one_thread()
    if len(queries) <= at_once:
        rough, found = index.search(queries, count, params=params)
        return rough, found
    distances = np.empty((len(queries), count), dtype=np.float32)
    labels = np.empty((len(queries), count), dtype=np.int64)
    for rows in batches(len(queries), at_once):
        found = index.search(queries[rows], count, params=params)
        distances[rows], labels[rows] = found
    return distances, labels


def batches(num_queries: int, at_once: int) -> Iterator[slice]:
    """Yield the rows of each batch."""
    for start in range(0, num_queries, at_once):
        yield slice(start, start + at_once)


Slots = NDArray[np.intp]


class SlotTable:
    """Ids by slot, and slots by id; 16 bytes an id."""

    def __init__(self, ids: Ids) -> None:
        self._ids = np.array(ids, dtype=np.int64)
        self._order = np.argsort(self._ids, kind="stable")

    def __len__(self) -> int:
        """Return the number of slots, with the empty ones."""
        return len(self._ids)

    @property
    def by_slot(self) -> Ids:
        """The id in each slot, `NOTHING` where it is empty; shape (n,)."""
        return self._ids

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the table takes."""
        return self._ids.nbytes + self._order.nbytes

    def ids_at(self, slots: Ids) -> Ids:
        """Return the ids in ``slots``, of any shape; `NOTHING` where a slot is -1."""
        found = self._ids[slots]
        if slots.min(initial=0) < 0:
            found[slots < 0] = NOTHING
        return found

    def slots_of(self, ids: Ids) -> Slots:
        """Return the slots of ``ids`` (m,)."""
        places = np.searchsorted(self._ids, ids, sorter=self._order)
        slots = self._order.take(places, mode="clip") if len(self) else places
        if len(slots) and (len(self) == 0 or (self._ids[slots] != ids).any()):
            raise ExamplesMissingError("the index does not hold all of these ids")
        return slots

    def append(self, ids: Ids) -> None:
        """Put ``ids`` (m,), none of which is there, into new slots at the end."""
        order = np.argsort(ids, kind="stable")
        places = np.searchsorted(self._ids, ids[order], sorter=self._order)
        self._order = np.insert(self._order, places, order + len(self))
        self._ids = np.concatenate([self._ids, ids])

    def vacate(self, ids: Ids) -> None:
        """Leave the slots of ``ids`` empty; no other id moves."""
        self._ids[self.slots_of(ids)] = NOTHING
        is_empty = self._ids[self._order] == NOTHING
        parts = [self._order[is_empty], self._order[~is_empty]]
        self._order = np.concatenate(parts)

    def close_up(self, ids: Ids) -> tuple[Slots, Slots]:
        """Take ``ids`` (m,) out; return which slots have to move, and where to."""
        num_left = len(self) - len(ids)
        stays = np.ones(len(self), dtype=bool)
        stays[self.slots_of(ids)] = False
        holes = np.flatnonzero(~stays[:num_left])
        movers = num_left + np.flatnonzero(stays[num_left:])
        moved_to = np.arange(len(self))
        moved_to[movers] = holes
        self._order = moved_to[self._order[stays[self._order]]]
        self._ids[holes] = self._ids[movers]
        self._ids = self._ids[:num_left].copy()
        return movers, holes

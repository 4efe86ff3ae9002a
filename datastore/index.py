"""The index of a store, on FAISS: exact search, or any ``faiss.index_factory`` string.

An index is a cache of the embeddings in the database. It finds candidates; whether
their distances are exact depends on its settings, see `knnper.datastore.search`.
"""

import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal, NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from knnper.datastore.examples import ExamplesMissingError, Ids, StoreDamagedError
from knnper.errors import ConfigError, Problem
from knnper.files import open_plain
from knnper.settings import NonNegativeInt, PositiveInt, Settings

_LOG = logging.getLogger(__name__)
Vectors = NDArray[np.float32]
Slots = NDArray[np.intp]

# The id that pads a row of candidates when an index finds too few.
NOTHING = -1
# Candidates beyond k that FAISS is asked for, so that its order can be corrected.
NUM_SPARE = 4
# Rows of float64 that fit in a processor's cache.
ROWS_AT_ONCE = 256
EPS, TINY = (float(value) for value in (np.finfo("f4").eps, np.finfo("f4").tiny))

# Up to these numbers of queries, and of numbers in them, FAISS sums squared
# differences. Above a threshold (20 queries, in later versions 128,000 numbers) it
# computes |x|² - 2 x·y + |y|², where cancellation can lose all digits of a small
# distance.
QUERIES_AT_ONCE, NUMBERS_AT_ONCE = 16, 65536

# An index of larger numbers overflows in k-means, or in half precision.
_LARGEST, _LARGEST_HALF = 1e15, float(np.finfo(np.float16).max)
# A trained index is trained again after that many times its sample was added.
_OUTGROWN_AFTER = 3
# The share of removed vectors at which an index is rebuilt.
_LARGEST_DEAD_SHARE = 0.25

_MARK = int.from_bytes(b"knnindex", "little")
_HEADER = np.dtype("<i8")
_BYTES_AT_ONCE = 1 << 20


class Candidates(NamedTuple):
    """The result of a search for m queries, in the order of rough distances."""

    rough: Vectors  # squared distances, ascending; (m, k')
    ids: Ids  # (m, k'); `NOTHING` where fewer were found


class VectorIndex(ABC):
    """Vectors under ids, searched by distance. The caller synchronises and validates.

    Attributes
    ----------
    forgets
        Whether `remove` erases a vector's bytes. If not, it hides the vector until the
        index is rebuilt.
    dim
        p, the length of a vector.
    """

    forgets: bool = False
    dim: int

    @property
    @abstractmethod
    def ids(self) -> Ids:
        """The ids of the vectors that can be found, shape (n,), in any order."""

    @abstractmethod
    def __len__(self) -> int:
        """Return n."""

    @property
    @abstractmethod
    def is_outgrown(self) -> bool:
        """Whether the index should be rebuilt from its vectors."""

    @abstractmethod
    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add ``vectors`` (m, p) under new ``ids`` (m,)."""

    @abstractmethod
    def remove(self, ids: Ids) -> None:
        """Hide the indexed ``ids`` (m,) from all later searches."""

    @abstractmethod
    def candidates(self, queries: Vectors, count: int) -> Candidates:
        """Find ``count`` candidates for each of m queries (m, p)."""

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write the index to one file."""


class FlatIndex(VectorIndex):
    """Every query is compared with every vector.

    The vectors are in an array of NumPy, which the system keeps in huge pages. FAISS
    scans them a quarter faster than its own memory.

    Rough squared distances are float32 sums of squared differences. Their relative
    error is at most about p 2^-23; where squares underflow, an absolute error of up to
    p times the smallest normal number is added. They do not depend on other queries.
    """

    forgets = True
    is_outgrown = False

    def __init__(self, ids: Ids, vectors: Vectors) -> None:
        self.dim = vectors.shape[1]
        self._by_slot = ids  # shape (n,)
        self._memory = vectors  # n vectors, then room for more
        self._order: Slots | None = None  # slots by id; computed when needed
        self._at_once = max(1, min(QUERIES_AT_ONCE, NUMBERS_AT_ONCE // self.dim))

    def __len__(self) -> int:
        return len(self._by_slot)

    @property
    @override
    def ids(self) -> Ids:
        return self._by_slot.copy()

    @override
    def add(self, ids: Ids, vectors: Vectors) -> None:
        num_before = len(self)
        num_after = num_before + len(ids)
        if num_after > len(self._memory):
            # Twice the size, so that single additions seldom copy all vectors.
            num_rows = max(num_after, 2 * num_before)
            memory = np.empty((num_rows, self.dim), np.float32)
            memory[:num_before] = self._memory[:num_before]
            self._memory = memory
        self._memory[num_before:num_after] = vectors
        self._by_slot = np.concatenate([self._by_slot, ids])
        self._order = None

    def remove(self, ids: Ids) -> None:
        """Move the last vectors into the slots of the removed vectors."""
        num_left = len(self) - len(ids)
        stays = np.ones(len(self), dtype=bool)
        stays[self._slots_of(ids)] = False
        holes = np.flatnonzero(~stays[:num_left])
        movers = num_left + np.flatnonzero(stays[num_left:])
        self._memory[holes] = self._memory[movers]
        self._memory[num_left : len(self)] = 0
        self._by_slot[holes] = self._by_slot[movers]
        self._by_slot = self._by_slot[:num_left].copy()
        self._order = None

    @override
    def candidates(self, queries: Vectors, count: int) -> Candidates:
        rough, slots = self.search(queries, count)
        return Candidates(rough, np.where(slots < 0, NOTHING, self._by_slot[slots]))

    def search(self, queries: Vectors, count: int) -> tuple[Vectors, Slots]:
        """Find ``count`` candidates for each query; return their slots, not their ids.

        A slot is -1, and its rough distance the largest number, where float32 cannot
        express the distance.
        """
        use_one_thread()
        vectors = self._memory[: len(self)]
        if len(queries) <= self._at_once:
            return faiss.knn(queries, vectors, count)  # type: ignore[no-any-return]
        parts = [
            faiss.knn(queries[start : start + self._at_once], vectors, count)
            for start in range(0, len(queries), self._at_once)
        ]
        return (
            np.concatenate([rough for rough, _ in parts]),
            np.concatenate([slots for _, slots in parts]),
        )

    def at_slots(self, slots: Slots) -> tuple[Ids, Vectors]:
        """Return the ids, and the vectors (..., p), in ``slots`` of any shape.

        The slot -1 is replaced by the last one.
        """
        return self._by_slot[slots], self._memory.take(slots, axis=0, mode="wrap")

    def vectors(self, ids: Ids) -> Vectors:
        """Return the vectors (m, p) of ``ids`` (m,), with the bits that were added."""
        return self._memory[self._slots_of(ids)]

    @override
    def write(self, path: Path) -> None:
        with path.open("wb") as file:
            _write_head(file, self._by_slot, self.dim, 0)
            file.write(self._memory[: len(self)].data)

    def _slots_of(self, ids: Ids) -> Slots:
        if self._order is None:
            self._order = np.argsort(self._by_slot, kind="stable")
        places = np.searchsorted(self._by_slot, ids, sorter=self._order)
        slots = self._order.take(places, mode="clip") if len(self._by_slot) else places
        is_known = len(self._by_slot) > 0 and (self._by_slot[slots] == ids).all()
        if len(ids) and not is_known:
            raise ExamplesMissingError("the index does not hold all of these ids")
        return slots


class FactoryIndex(VectorIndex):
    """An index by ``faiss.index_factory``. Not all kinds can remove, so none has to.

    A removed vector stays in the index and is skipped in its results, until the index
    is rebuilt from the database.
    """

    def __init__(self, content: "IndexFile", settings: "FactorySettings") -> None:
        self._index = content.index
        self._by_slot = np.array(content.ids, np.int64)  # `NOTHING` where removed
        self._num_sample, self._num_since = content.num_sample, content.num_since
        self.dim = content.index.d
        self._settings = settings
        # An index that must be trained is flat until there are enough vectors.
        self._is_waiting = isinstance(content.index, faiss.IndexFlat)
        self._num_dead = int((self._by_slot == NOTHING).sum())

    def __len__(self) -> int:
        return len(self._by_slot) - self._num_dead

    @property
    @override
    def ids(self) -> Ids:
        living: Ids = self._by_slot[self._by_slot != NOTHING]
        return living

    @override
    def write(self, path: Path) -> None:
        use_one_thread()
        with path.open("wb") as file:
            _write_head(file, self._by_slot, self._num_sample, self._num_since)
            # An error of `file.write` comes out of FAISS unchanged.
            faiss.write_index(self._index, faiss.PyCallbackIOWriter(file.write))

    @property
    def is_outgrown(self) -> bool:
        """Whether training, or a rebuild without the removed vectors, is due."""
        if self._num_dead > _LARGEST_DEAD_SHARE * len(self._by_slot):
            return True
        if self._is_waiting:
            return self._settings.can_train(self.dim, len(self))
        return 0 < self._num_sample * _OUTGROWN_AFTER <= self._num_since

    @override
    def add(self, ids: Ids, vectors: Vectors) -> None:
        use_one_thread()
        self._index.add(self._settings.encodable(vectors))
        self._by_slot = np.concatenate([self._by_slot, ids])
        self._num_since += len(ids)

    @override
    def remove(self, ids: Ids) -> None:
        is_removed = np.isin(self._by_slot, ids)
        self._by_slot[is_removed] = NOTHING
        self._num_dead += int(is_removed.sum())

    @override
    def candidates(self, queries: Vectors, count: int) -> Candidates:
        # If the removed vectors take places, a wider search makes up for all of them.
        first = min(len(self._by_slot), count + min(count, self._num_dead))
        candidates = self._living(queries, count, first)
        short = (candidates.ids == NOTHING).any(axis=1)
        if short.any() and first < count + self._num_dead:
            wider = self._living(queries[short], count, count + self._num_dead)
            candidates.rough[short] = wider.rough
            candidates.ids[short] = wider.ids
        return candidates

    def _living(self, queries: Vectors, count: int, num_asked: int) -> Candidates:
        """Search ``num_asked`` vectors; return the first ``count`` not removed."""
        use_one_thread()
        rough = np.full((len(queries), count), np.inf, np.float32)
        ids = np.full((len(queries), count), NOTHING, np.int64)
        for row in range(len(queries)):
            # Alone, because the last bits of some kinds depend on the other queries.
            distances, slots = self._index.search(queries[row : row + 1], num_asked)
            slots = slots[0]
            row_ids = np.where(slots < 0, NOTHING, self._by_slot[slots])
            alive = np.flatnonzero(row_ids != NOTHING)[:count]
            rough[row, : len(alive)] = distances[0, alive]
            ids[row, : len(alive)] = row_ids[alive]
        return Candidates(rough, ids)


@dataclass(frozen=True)
class FlatSettings(Settings):
    """Exact search: every query is compared with every vector, in 4 p bytes each."""

    is_exhaustive: ClassVar[bool] = True
    ranks_exactly: ClassVar[bool] = True
    name: Literal["flat"] = "flat"

    def candidates_for(self, num_neighbors: int) -> int:
        """Return the number of candidates to search for k neighbours."""
        return num_neighbors + NUM_SPARE

    def code_bytes(self, dim: int) -> int:
        """Return the bytes that a vector of p = ``dim`` numbers takes."""
        return 4 * dim

    def build(self, dim: int, ids: Ids, vectors: Vectors) -> FlatIndex:
        """Build an index of ``vectors`` (n, p) under ``ids`` (n,), none negative."""
        index = FlatIndex(np.empty(0, np.int64), np.empty((0, dim), np.float32))
        index.add(ids, vectors)
        return index

    def read(self, path: Path, dim: int) -> FlatIndex:
        """Read what `VectorIndex.write` wrote; `StoreDamagedError` if it is not."""
        with _reading(path) as file:
            ids, stored_dim, _ = _read_head(file)
            size = _num_bytes_left(file)
            layout = ("flat", stored_dim, 4 * stored_dim)
            num_vectors = size // (4 * stored_dim) if stored_dim > 0 else 0
            _require_layout(
                path, (*layout, num_vectors), [("flat", dim, 4 * dim, len(ids))]
            )
            vectors = np.empty((len(ids), dim), np.float32)
            if size != vectors.nbytes:
                raise ValueError(f"expected {vectors.nbytes} bytes, found {size}")
            file.readinto(vectors.data)  # type: ignore[attr-defined]
        return FlatIndex(ids, vectors)


@dataclass(frozen=True)
class FactorySettings(Settings):
    """An approximate or compressed index by a string of ``faiss.index_factory``.

    Attributes
    ----------
    factory
        Such as ``HNSW16``, ``IVF64,Flat``, ``SQ8``, ``SQfp16`` or ``PQ16``:
        https://github.com/facebookresearch/faiss/wiki/The-index-factory.
    parameters
        Of FAISS's ``ParameterSpace``, such as ``efSearch=128`` or ``nprobe=8``.
    train_size
        Examples from which an index that must be trained is trained; with fewer, search
        is exact. Product quantisation needs 1,024 or more.
    rerank
        r: the r k nearest candidates are compared again by the exact distance to their
        original vectors. With 0, distances are those of FAISS.
    """

    is_exhaustive: ClassVar[bool] = False
    factory: str
    name: Literal["factory"] = "factory"
    parameters: str = ""
    train_size: PositiveInt = 1024
    rerank: NonNegativeInt = 0

    @property
    def ranks_exactly(self) -> bool:
        """Whether candidates are compared again by exact distances."""
        return self.rerank > 0

    def candidates_for(self, num_neighbors: int) -> int:
        """Return the number of candidates to search for k neighbours."""
        return num_neighbors * max(1, self.rerank)

    def code_bytes(self, dim: int) -> int:
        """Return the bytes that a vector of p = ``dim`` numbers takes in the index."""
        return _code_bytes(self.empty(dim))

    def empty(self, dim: int) -> faiss.Index:
        """Create the index without vectors; `ConfigError` if FAISS refuses it."""
        try:
            index = faiss.index_factory(dim, self.factory)
            faiss.ParameterSpace().set_index_parameters(index, self.parameters)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            message = (
                f"found factory {self.factory!r} with parameters {self.parameters!r}, "
                f"which FAISS refuses for embeddings of {dim} numbers: {reason}"
            )
            raise ConfigError(
                [Problem("index.factory", message)], "the store"
            ) from None
        _silence_training(index)
        return index

    def can_train(self, dim: int, num_vectors: int) -> bool:
        """Return whether there are vectors enough to train the index."""
        return not self.empty(dim).is_trained and num_vectors >= self.train_size

    def encodable(self, vectors: Vectors) -> Vectors:
        """Cut numbers that overflow in FAISS; vectors (n, p)."""
        is_half = "fp16" in self.factory.lower()
        largest = _LARGEST_HALF if is_half else _LARGEST
        return np.clip(vectors, -largest, largest)

    def build(self, dim: int, ids: Ids, vectors: Vectors) -> VectorIndex:
        """Build an index of ``vectors`` (n, p) under ``ids`` (n,), none negative."""
        use_one_thread()
        index, num_sample = self.empty(dim), 0
        if not index.is_trained and len(vectors) < self.train_size:
            index = faiss.IndexFlatL2(dim)
        elif not index.is_trained:
            try:
                index.train(self.encodable(vectors))
                num_sample = len(vectors)
            except RuntimeError as error:
                _LOG.warning(
                    "the index %s cannot be trained on %d examples and stays exact; "
                    "raise train_size: %s",
                    self.factory,
                    len(vectors),
                    str(error).strip().splitlines()[-1],
                )
                index = faiss.IndexFlatL2(dim)
        built = FactoryIndex(IndexFile(index, np.empty(0, np.int64), num_sample), self)
        built.add(ids, vectors)
        built._num_since = 0
        return built

    def read(self, path: Path, dim: int) -> VectorIndex:
        """Read what `VectorIndex.write` wrote; `StoreDamagedError` if it is not."""
        content, expected = _read_index_file(path), [self.empty(dim)]
        if not expected[0].is_trained:
            expected.append(faiss.IndexFlatL2(dim))
        _require_layout(
            path,
            (*_layout(content.index), int(content.index.ntotal)),
            [(*_layout(index), len(content.ids)) for index in expected],
        )
        if not isinstance(content.index, faiss.IndexFlat):
            faiss.ParameterSpace().set_index_parameters(content.index, self.parameters)
        return FactoryIndex(content, self)


IndexSettings = Annotated[FlatSettings | FactorySettings, Field(discriminator="name")]


@dataclass(frozen=True)
class IndexFile:
    """The content of the file of a `FactoryIndex`.

    Attributes
    ----------
    index
        As FAISS writes it.
    ids
        By slot, shape (n,); `NOTHING` where a vector was removed.
    num_sample
        Vectors that the index was trained on; 0 if it was not.
    num_since
        Vectors that were added since.
    """

    index: faiss.Index
    ids: Ids
    num_sample: int = 0
    num_since: int = 0


def use_one_thread() -> None:
    """Keep FAISS from OpenMP's default, with which forks hang and workers compete."""
    # A property of the calling thread, so this comes before each use. One thread also
    # makes the graph of HNSW the same in every build.
    faiss.omp_set_num_threads(1)


def _silence_training(index: faiss.Index) -> None:
    """Keep FAISS from printing advice on the sample size once for each client."""
    kind = faiss.downcast_index(index)  # a view: ``index`` must stay referenced
    quantizers: list[Any] = [kind, getattr(kind, "pq", None)]
    for quantizer in quantizers:
        if hasattr(quantizer, "cp"):
            quantizer.cp.min_points_per_centroid = 1


def _read_index_file(path: Path) -> IndexFile:
    """Read what `FactoryIndex.write` wrote."""
    use_one_thread()
    with _reading(path) as file:
        ids, num_sample, num_since = _read_head(file)
        reader = faiss.PyCallbackIOReader(file.read, _BYTES_AT_ONCE)
        with _vectors_of_at_most(os.fstat(file.fileno()).st_size):
            index = faiss.read_index(reader)
        if file.read(1):
            raise ValueError("expected its end after the index, found more bytes")
    return IndexFile(index, ids, num_sample, num_since)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """Open the file of an index; any error of reading it is `StoreDamagedError`."""
    try:
        with open_plain(path) as file:
            yield file
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise StoreDamagedError(
            f"{path} is not an index that can be read; rebuild it from the vectors: "
            f"{error}"
        ) from error


def _write_head(file: IO[bytes], ids: Ids, *numbers: int) -> None:
    """Write the start of an index's file: a mark, two numbers, and the ids by slot."""
    file.write(np.array([_MARK, len(ids), *numbers], _HEADER).data)
    file.write(np.ascontiguousarray(ids, _HEADER).data)


def _read_head(file: IO[bytes]) -> tuple[Ids, int, int]:
    """Read what `_write_head` wrote: the ids, and the two numbers."""
    mark, num_slots, first, second = _numbers(file, 4).tolist()
    if mark != _MARK:
        raise ValueError(f"expected the mark {_MARK} at its start, found {mark}")
    return _numbers(file, num_slots), first, second


@contextlib.contextmanager
def _vectors_of_at_most(num_bytes: int) -> Iterator[None]:
    """Keep FAISS from allocating more memory than the file has bytes."""
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):
        yield  # Earlier versions trust the sizes in a file.
        return
    before = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(num_bytes)
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(before)


def _numbers(file: IO[bytes], count: int) -> Ids:
    size = count * _HEADER.itemsize
    available = _num_bytes_left(file)
    if not 0 <= size <= available:
        raise ValueError(f"expected {size} bytes, found {available}")
    return np.frombuffer(file.read(size), _HEADER).astype(np.int64)


def _num_bytes_left(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size - file.tell()


# Type, size of an embedding, bytes of a vector, and the number of vectors.
_Layout = tuple[str, int, int, int]


def _require_layout(path: Path, actual: _Layout, expected: list[_Layout]) -> None:
    """Reject an index that the settings cannot have written."""
    if actual not in expected:
        raise StoreDamagedError(
            f"{path} holds another index than the settings describe; rebuild it "
            "from the vectors. Found type, size of an embedding, bytes of a vector and "
            f"number of vectors {actual}, expected {' or '.join(map(str, expected))}"
        )


def _layout(index: faiss.Index) -> tuple[str, int, int]:
    return type(index).__name__, int(index.d), _code_bytes(index)


def _code_bytes(index: faiss.Index) -> int:
    """Return the bytes that a vector takes in an index, its links included."""
    kind = faiss.downcast_index(index)  # a view: ``index`` must stay referenced
    if isinstance(kind, faiss.IndexPreTransform | faiss.IndexIDMap):
        return _code_bytes(kind.index)
    if isinstance(kind, faiss.IndexRefine):
        return _code_bytes(kind.base_index) + _code_bytes(kind.refine_index)
    if isinstance(kind, faiss.IndexIVF):
        return int(kind.code_size) + 8  # the id
    if isinstance(kind, faiss.IndexHNSW):
        links = 4 * kind.hnsw.nb_neighbors(0)
        return _code_bytes(kind.storage) + int(links)
    return int(kind.sa_code_size())

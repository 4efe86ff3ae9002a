"""The kinds of index that a store can be given, on FAISS: settings, contents, files."""

import contextlib
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import faiss
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.datastore.examples import ExamplesMissingError, Ids, StoreDamagedError
from knnper.errors import ConfigError, DataError, Problem
from knnper.files import open_plain
from knnper.settings import NonNegativeInt, PositiveInt, Settings

_LOG = logging.getLogger(__name__)
Vectors = NDArray[np.float32]
Slots = NDArray[np.intp]
NOTHING = -1
"""The id that pads a row of candidates where fewer were found."""
NUM_SPARE = 4
"""Candidates beyond k that FAISS is asked for, so that its order can be corrected."""


class Candidates(NamedTuple):
    """What a search finds for m queries, in the order of rough distances."""

    rough: NDArray[np.floating[Any]]  # squared distances, ascending; (m, k')
    ids: Ids  # (m, k'); `NOTHING` where fewer were found
    vectors: Vectors  # (m, k', p); any where there is no id
    # The most that a vector is from the rounded one to which the distance is.
    rounding: float = 0.0


class VectorIndex(ABC):
    """Vectors that are found by their distance, each under an id.

    An index is what a store searches; it is not safe to change it while another thread
    searches, and it checks nothing: the store does.
    """

    keeps_vectors: bool = True  # whether `vectors` returns what was added, bit by bit
    # Whether `remove` takes every trace of a vector out of the index. If not, it is
    # merely never returned again until the index is built anew.
    forgets: bool = False

    def __init__(self, content: "IndexFile") -> None:
        self._index, self._table = content.index, _SlotTable(content.ids)
        self._num_sample, self._num_since = content.num_sample, content.num_since
        self.dim: int = content.index.d  # p, the length of a vector
        self._at_once = _queries_at_once(self.dim)

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
    def has_learnt(self) -> bool:
        """False where vectors are kept as they are: too few to learn from."""
        return True

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
        self, queries: Vectors, count: int, *, may_round: bool
    ) -> Candidates:
        """Return ``count`` candidates or more, where the kind keeps the vectors.

        With ``may_round`` they are found among rounded vectors where that is faster.
        """
        del may_round  # no kind but flat has both
        rough, ids = self.candidates(queries, count)
        found = np.where(ids == NOTHING, self.ids[0], ids)
        vectors = self.vectors(found.ravel()).reshape(*ids.shape, -1)
        return Candidates(rough, ids, vectors)

    @abstractmethod
    def vectors(self, ids: Ids) -> Vectors:
        """Return the vectors (m, p) under ``ids`` (m,), all of which are there."""

    def write(self, path: Path) -> None:
        """Write everything to the one file ``path``."""
        learnt = self._num_sample, self._num_since
        IndexFile(self._index, self._table.by_slot, *learnt).write(path)


@dataclass(frozen=True)
class IndexFile:
    """What is in the file of an index."""

    index: faiss.Index
    ids: Ids  # by slot; none where FAISS keeps the ids itself
    num_sample: int = 0  # vectors that were there when it learnt; 0 if it did not
    num_since: int = 0  # that were added since, whether or not they are still there

    def write(self, path: Path) -> None:
        """Write the file."""
        header = [_MARK, len(self.ids), self.num_sample, self.num_since]
        use_one_thread()
        with path.open("wb") as file:
            file.write(np.array(header, _HEADER).data)
            file.write(np.ascontiguousarray(self.ids, _HEADER).data)
            # An error of `file.write` comes out of FAISS as it is.
            faiss.write_index(self.index, faiss.PyCallbackIOWriter(file.write))


_MARK = int.from_bytes(b"knnindex", "little")
_HEADER = np.dtype("<i8")
_BYTES_AT_ONCE = 1 << 20


def _read_index_file(path: Path) -> IndexFile:
    """Return what `IndexFile.write` wrote."""
    use_one_thread()
    try:
        with open_plain(path) as file:
            mark, num_slots, num_sample, num_since = _numbers(file, 4).tolist()
            if mark != _MARK:
                raise ValueError(
                    f"expected the mark {_MARK} at its start, found {mark}"
                )
            ids = _numbers(file, num_slots)
            reader = faiss.PyCallbackIOReader(file.read, _BYTES_AT_ONCE)
            with _vectors_of_at_most(os.fstat(file.fileno()).st_size):
                index = faiss.read_index(reader)
            if file.read(1):
                raise ValueError("expected its end after the index, found more")
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise StoreDamagedError(
            f"{path} is no index that can be read; build it anew from the vectors: "
            f"{error}"
        ) from error
    return IndexFile(index, ids, num_sample, num_since)


@contextlib.contextmanager
def _vectors_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let FAISS take no more memory for what it reads than the file has."""
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):
        yield  # Earlier versions believe what a file claims.
        return
    before = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(num_bytes)
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(before)


def _numbers(file: IO[bytes], count: int) -> Ids:
    size = count * _HEADER.itemsize
    left = os.fstat(file.fileno()).st_size - file.tell()
    if not 0 <= size <= left:
        raise ValueError(f"expected {size} bytes, found {left}")
    return np.frombuffer(file.read(size), _HEADER).astype(np.int64)


def _layout(index: faiss.Index) -> tuple[str, int, int]:
    """Return type, size of an embedding, and the bytes in which a vector is kept."""
    if isinstance(index, faiss.IndexIVF):
        code_size = index.code_size
    else:
        holder = index.storage if isinstance(index, faiss.IndexHNSW) else index
        code_size = holder.sa_code_size()
    return type(index).__name__, int(index.d), int(code_size)


@dataclass(frozen=True)
class KindSettings(Settings, ABC):
    """Settings of one kind of index, and what a store has to know of the kind."""

    # Whether rough distances are exact but for rounding, and to every vector.
    is_exhaustive: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        """The ``name`` that each kind has, such as flat."""
        return str(vars(self)["name"])

    @property
    def ranks_exactly(self) -> bool:
        """Whether candidates are compared anew, by exact distances to the vectors."""
        return True

    def candidates_for(self, num_neighbors: int) -> int:
        """Return how many candidates to ask for where k neighbours are wanted."""
        return num_neighbors + NUM_SPARE

    def code_bytes(self, dim: int) -> int:
        """Return the bytes that a vector of p = ``dim`` numbers takes in the index."""
        return _layout(self.fresh(dim))[2]

    @property
    def num_needed(self) -> int:
        """The fewest vectors to learn from; with fewer they are kept as they are."""
        return 0

    @abstractmethod
    def fresh(self, dim: int) -> faiss.Index:
        """Return an empty index of FAISS that has learnt nothing."""

    def require_range(self, vectors: Vectors) -> None:
        """Refuse, with a `DataError`, numbers (n, p) that no such index can hold."""

    def encodable(self, vectors: Vectors) -> Vectors:
        """Return what FAISS is given of ``vectors`` (n, p)."""
        return vectors

    def filled(self, dim: int, ids: Ids, vectors: Vectors) -> IndexFile:
        """Return the content of an index of ``vectors`` (n, p) under ``ids`` (n,)."""
        use_one_thread()
        index, num_sample = self.fresh(dim), 0
        if len(vectors) < self.num_needed:
            index = faiss.IndexFlatL2(dim)
        else:
            vectors = self.encodable(vectors)
            if self.num_needed:
                num_sample = len(vectors)
                index.train(vectors)
        index.add(vectors)
        self.warn_if_coarse(index, vectors)
        return IndexFile(index, ids, num_sample)

    def warn_if_coarse(self, index: faiss.Index, vectors: Vectors) -> None:
        """Log if codes of ``vectors`` (n, p), the last in an index, are too coarse."""

    def index_of(self, content: IndexFile) -> VectorIndex:
        """Return the index with this content."""
        return CodesIndex(content, self)

    def build(self, dim: int, ids: Ids, vectors: Vectors) -> VectorIndex:
        """Return an index of ``vectors`` (n, p) under ``ids`` (n,), none negative."""
        return self.index_of(self.filled(dim, ids, vectors))

    def read(self, path: Path, dim: int) -> VectorIndex:
        """Return what `VectorIndex.write` wrote; other settings may search it."""
        content = _read_index_file(path)
        index = content.index
        expected = [self.fresh(dim)]
        if self.num_needed:
            expected.append(faiss.IndexFlatL2(dim))
        # The lists of IVF hold the ids themselves.
        keeps_ids = isinstance(index, faiss.IndexIVF)
        num_slots = index.ntotal if keeps_ids else len(content.ids)
        found = (*_layout(index), index.ntotal)
        known = [(*_layout(one), num_slots) for one in expected]
        if found not in known:
            raise StoreDamagedError(
                f"{path} holds another index than the settings say; build it anew from "
                "the vectors. Found type, size of an embedding, bytes of a code and "
                f"number {found}, expected {' or '.join(map(str, known))}"
            )
        return self.index_of(content)


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

    def encodable(self, vectors: Vectors) -> Vectors:
        """Return them cut so that what is learnt does not overflow."""
        return _learnable(vectors)

    def warn_if_coarse(self, index: faiss.Index, vectors: Vectors) -> None:
        """See `KindSettings`; large numbers that differ little are such vectors."""
        if len(vectors) < _FEWEST_CHECKED or isinstance(index, faiss.IndexFlat):
            return
        evenly = np.linspace(0, len(vectors) - 1, _MOST_CHECKED)
        rows = np.unique(evenly.astype(np.intp))
        some = vectors[rows].astype(np.float64)
        kept = index.sa_decode(_code_rows(index)[index.ntotal - len(vectors) + rows])
        # Medians, which a few vectors far from all others do not change.
        error = np.median(np.square(some - kept).sum(axis=1))
        spread = np.median(np.square(some - np.median(some, axis=0)).sum(axis=1))
        if error > _LARGEST_ERROR * spread:
            _LOG.warning(
                "the index %s stores these embeddings too coarsely to distinguish "
                "them: they are very large, very small, or differ little for their "
                "size; choose the index flat, or scale the inputs",
                self.kind,
            )


_FEWEST_CHECKED, _MOST_CHECKED = 16, 1024
"""Bounds on the number of vectors that are compared with their codes."""
_LARGEST_ERROR = 0.5
"""Of a code, squared, relative to how far a vector is from the middle of all: 0.2 to
0.4 with product quantisation of embeddings, less than 0.001 with the other kinds."""
_LARGEST = 1e15
_LARGEST_HALF = float(np.finfo(np.float16).max)


def _learnable(vectors: Vectors) -> Vectors:
    """Return ``vectors`` with larger numbers cut to 1e15."""
    # Ranges, and distances between vectors in k-means, then do not overflow.
    return np.clip(vectors, -_LARGEST, _LARGEST)


def use_one_thread() -> None:
    """Keep FAISS from OpenMP's default, with which forks hang and workers compete."""
    # A property of the calling thread, so this comes before each use. One thread also
    # makes the graph of HNSW the same in every build.
    faiss.omp_set_num_threads(1)


QUERIES_AT_ONCE, NUMBERS_AT_ONCE = 16, 65536
"""With so few queries, and numbers in them, FAISS sums squared differences. Above some
threshold (20 queries, in later versions 128,000 numbers) it expands them into a dot
product, whose cancellation can lose all digits of a small distance."""


def _queries_at_once(dim: int) -> int:
    """Return how many queries of ``dim`` numbers FAISS may be given together."""
    return max(1, min(QUERIES_AT_ONCE, NUMBERS_AT_ONCE // dim))


def _batches(num_queries: int, at_once: int) -> Iterator[slice]:
    for start in range(0, num_queries, at_once):
        yield slice(start, start + at_once)


def _search(
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
    for rows in _batches(len(queries), at_once):
        found = index.search(queries[rows], count, params=params)
        distances[rows], labels[rows] = found
    return distances, labels


class _SlotTable:
    """Ids by slot, and slots by id; 16 bytes an id."""

    def __init__(self, ids: Ids) -> None:
        # The id in each slot, `NOTHING` where it is empty; shape (n,).
        self.by_slot = np.array(ids, dtype=np.int64)
        self._order = np.argsort(self.by_slot, kind="stable")

    def __len__(self) -> int:
        return len(self.by_slot)  # the empty ones included

    @property
    def num_bytes(self) -> int:
        return self.by_slot.nbytes + self._order.nbytes

    def ids_at(self, slots: Ids) -> Ids:
        """Return the ids in ``slots``, of any shape; `NOTHING` where a slot is -1."""
        found = self.by_slot[slots]
        if slots.min(initial=0) < 0:
            found[slots < 0] = NOTHING
        return found

    def slots_of(self, ids: Ids) -> Slots:
        """Return the slots of ``ids`` (m,)."""
        places = np.searchsorted(self.by_slot, ids, sorter=self._order)
        slots = self._order.take(places, mode="clip") if len(self) else places
        if len(slots) and (len(self) == 0 or (self.by_slot[slots] != ids).any()):
            raise ExamplesMissingError("the index does not hold all of these ids")
        return slots

    def append(self, ids: Ids) -> None:
        """Put ``ids`` (m,), none of which is there, into new slots at the end."""
        order = np.argsort(ids, kind="stable")
        places = np.searchsorted(self.by_slot, ids[order], sorter=self._order)
        self._order = np.insert(self._order, places, order + len(self))
        self.by_slot = np.concatenate([self.by_slot, ids])

    def vacate(self, ids: Ids) -> None:
        """Leave the slots of ``ids`` empty; no other id moves."""
        self.by_slot[self.slots_of(ids)] = NOTHING
        is_empty = self.by_slot[self._order] == NOTHING
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
        self.by_slot[holes] = self.by_slot[movers]
        self.by_slot = self.by_slot[:num_left].copy()
        return movers, holes


_OUTGROWN_AFTER = 3
"""An index learns anew when that many times its sample was added: it has then grown
fourfold, or been replaced three times."""
_FAR_OUTSIDE = 4.0
"""A vector is outside if the squared error of its code is larger than this times the
mean squared distance of learnt vectors from their mean."""
_MOST_OUTSIDE = 64
"""Or when the vectors far outside of the learnt range are a 64th of its sample."""


class CodesIndex(VectorIndex):
    """A code for each vector, which may be the vector: FAISS's ``IndexFlatCodes``.

    A kind that learns keeps the vectors themselves while there are too few.

    Rough squared distances of a flat index are float32 sums of squared differences.
    They are off by at most about p 2^-23 of themselves, and by p times the smallest
    normal number where squares underflow, and do not depend on the other queries.
    """

    def __init__(self, content: IndexFile, settings: KindSettings) -> None:
        super().__init__(content)
        self._held = [self._index]  # all that has a code for each slot
        self._settings = settings
        self._num_outside = 0  # vectors far outside of the learnt range
        self.keeps_vectors = False
        self.forgets = settings.num_needed == 0
        if isinstance(settings, ProductSettings):
            # FAISS compares several queries with the centroids by a matrix product,
            # whose last bits depend on how many there are.
            self._at_once = 1

    def __len__(self) -> int:
        return len(self._table)

    @property
    def ids(self) -> Ids:
        """The ids, by slot, shape (n,)."""
        return self._table.by_slot.copy()

    @property
    def num_bytes(self) -> int:
        """Bytes of the codes, of the table of ids and of what was learnt."""
        num_learnt = 0
        if isinstance(self._index, faiss.IndexScalarQuantizer):
            num_learnt = self._index.sq.trained.size()
        elif isinstance(self._index, faiss.IndexPQ):
            num_learnt = self._index.pq.centroids.size()
        num_held = sum(one.codes.size() for one in self._held)
        return int(num_held + 4 * num_learnt) + self._table.num_bytes

    @property
    def has_learnt(self) -> bool:
        """Whether the vectors are codes; if not, they are kept as they are."""
        return self._num_sample > 0 or self.forgets

    @property
    def is_outgrown(self) -> bool:
        """Whether there now are enough vectors to learn from, or many new ones."""
        if not self.has_learnt:
            return len(self) >= self._settings.num_needed
        if self.forgets:
            return False
        has_grown = self._num_since >= _OUTGROWN_AFTER * self._num_sample
        return has_grown or self._num_outside * _MOST_OUTSIDE >= self._num_sample

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add ``vectors`` (m, p) under ``ids`` (m,)."""
        use_one_thread()
        codes = self._settings.encodable(vectors) if self.has_learnt else vectors
        if self._num_sample > 0:
            self._note_outside(vectors)
        self._index.add(codes)
        if self.forgets:
            self._settings.warn_if_coarse(self._index, vectors)
        self._table.append(ids)
        self._num_since += len(ids)

    def _note_outside(self, vectors: Vectors) -> None:
        """Count vectors (m, p) far outside of the learnt range.

        Their codes, and so their distances, are wrong until the index is trained again.
        """
        learnt = self._index.sa_decode(_code_rows(self._index)[:ROWS_AT_ONCE])
        width = np.square(learnt - np.mean(learnt, axis=0, dtype=np.float64))
        kept = self._index.sa_decode(self._index.sa_encode(_learnable(vectors)))
        errors = np.square(vectors.astype(np.float64) - kept).sum(axis=1)
        outside = int((errors > _FAR_OUTSIDE * width.sum(axis=1).mean()).sum())
        if outside and not self._num_outside:
            _LOG.warning(
                "%d embeddings are far outside of the range that the index %s has "
                "learnt, and their distances are wrong; the index learns again when "
                "there are more of them, or by knnper store rewrite",
                outside,
                self._settings.kind,
            )
        self._num_outside += outside

    def remove(self, ids: Ids) -> None:
        """Overwrite the codes of ``ids`` (m,)."""
        movers, holes = self._table.close_up(ids)
        num_left = len(self._table)
        for index in self._held:
            codes = _code_rows(index)
            codes[holes] = codes[movers]
            codes[num_left:] = 0
            index.codes.resize(num_left * index.code_size)
            index.ntotal = num_left

    def candidates(self, queries: Vectors, count: int) -> tuple[Vectors, Ids]:
        """Return rough squared distances and ids of the nearest, each (m, count)."""
        distances, slots = _search(self._index, queries, count, self._at_once)
        return distances, self._table.ids_at(slots)

    def vectors(self, ids: Ids) -> Vectors:
        """Return what the codes of ``ids`` (m,) stand for, shape (m, p)."""
        return _decoded(self._index, self._table.slots_of(ids))


HALVED_FROM = 1 << 21
"""Bytes of vectors from which a flat index keeps them in half precision too. Fewer are
still in the processor's own cache at the next query."""
_MORE_SPARE = 12
"""Candidates beyond those asked for, so that rounding seldom leaves a doubt: of 300
queries among 5,000 embeddings by ImageNet's MobileNetV2 none; without them one in ten
(k = 50)."""
_HALVED_BITS = 8
"""The longest vector is scaled to less than 2^8: half precision ends at 65504, and gets
coarse below 6e-5. What is so short that float32 cannot scale it is less."""
_LONGEST_HALVED = 2.0**12
"""With a vector of this length that came later, rounding leaves few certain."""
EPS, TINY = (float(one) for one in (np.finfo("f4").eps, np.finfo("f4").tiny))
ROWS_AT_ONCE = 256
"""So many rows in float64 fit in a processor's cache."""


class FlatIndex(CodesIndex):
    """The vectors; and, where a query waits for them to be read, also their halves.

    Half precision is half to read, so that a query takes half the time (0.41 instead of
    0.77 ms among 5,000 of 1,280 numbers). With e the most that rounding moves a vector,
    one that is no candidate is at least as far as the last candidate's rounded one,
    less e. Where that leaves a doubt, whoever asks looks again without rounding.
    """

    def __init__(self, content: IndexFile, settings: KindSettings) -> None:
        super().__init__(content, settings)
        self.keeps_vectors = True
        self._longest = 0.0  # of the scaled vectors
        self._halve(0)

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add ``vectors`` (m, p) under ``ids`` (m,)."""
        start = len(self)
        super().add(ids, vectors)
        self._halve(start)

    def candidates_with_vectors(
        self, queries: Vectors, count: int, *, may_round: bool
    ) -> Candidates:
        """See `VectorIndex`."""
        num_found = count + _MORE_SPARE
        is_halved = len(self._held) > 1 and self._longest <= _LONGEST_HALVED
        if not (may_round and is_halved and num_found < len(self)):
            rough, slots = _search(self._index, queries, count, self._at_once)
            rounding = 0.0
        else:
            scaled = queries * self._scale
            rough, slots = _search(self._held[1], scaled, num_found, self._at_once)
            # Squares may have underflowed.
            rough = (rough - np.float64(self.dim * TINY)).clip(0)
            rough /= np.float64(self._scale) ** 2
            # By 2^-11 of a number, or by 2^-25 where it is subnormal.
            most = 2**-11 * self._longest * (1 + self.dim * EPS)
            rounding = (most + 2**-25 * math.sqrt(self.dim)) / float(self._scale)
        vectors = _code_rows(self._index).view(np.float32)[slots]
        return Candidates(rough, self._table.ids_at(slots), vectors, rounding)

    def _halve(self, start: int) -> None:
        """Keep the vectors from slot ``start`` on in half precision too."""
        if len(self._held) == 1:
            # Other instruction sets gain nothing, or decode a number at a time.
            if (
                self._index.codes.size() < HALVED_FROM
                or "AVX512" not in faiss.SIMDConfig.get_level_name()
            ):
                return
            self._held.append(HalfSettings().fresh(self.dim))
            start = 0
        vectors = _code_rows(self._index).view(np.float32)
        for first in range(start, len(vectors), ROWS_AT_ONCE):
            part = vectors[first : first + ROWS_AT_ONCE]
            if first == 0:
                _, exponent = math.frexp(_longest(part.astype(np.float64)))
                self._scale = np.float32(2.0 ** min(_HALVED_BITS - exponent, 100))
            with np.errstate(over="ignore"):  # to infinity, which is too long
                scaled = part * self._scale
                self._held[1].add_sa_codes(scaled.astype(np.float16).view(np.uint8))
                self._longest = max(self._longest, _longest(scaled))


def _longest(vectors: NDArray[np.floating[Any]]) -> float:
    """Return the largest Euclidean norm of ``vectors`` (m, p)."""
    return math.sqrt(np.einsum("np,np->n", vectors, vectors).max())


def _code_rows(index: faiss.IndexFlatCodes) -> NDArray[np.uint8]:
    """Return the codes of ``index`` themselves, not a copy, shape (n, code size).

    They must not be used after anything was added to the index.
    """
    shape = (index.ntotal, index.code_size)
    if index.ntotal == 0:
        return np.empty(shape, dtype=np.uint8)
    codes: NDArray[np.uint8] = faiss.rev_swig_ptr(
        index.codes.data(), index.ntotal * index.code_size
    )
    return codes.reshape(shape)


def _decoded(index: faiss.IndexFlatCodes, slots: Slots) -> Vectors:
    """Return what the codes in ``slots`` (m,) stand for, shape (m, p)."""
    codes = _code_rows(index)[slots]
    if isinstance(index, faiss.IndexFlat):
        return codes.view(np.float32)
    vectors: Vectors = index.sa_decode(codes)
    return vectors


@dataclass(frozen=True)
class FlatSettings(KindSettings):
    """Exact: every query is compared with every vector, in 4 p bytes each.

    In memory it is 6 p where `FlatIndex` keeps them in half precision too.
    """

    is_exhaustive: ClassVar[bool] = True
    name: Literal["flat"] = "flat"

    def fresh(self, dim: int) -> faiss.Index:
        """See `KindSettings`."""
        return faiss.IndexFlatL2(dim)

    def index_of(self, content: IndexFile) -> VectorIndex:
        """See `KindSettings`."""
        return FlatIndex(content, self)


@dataclass(frozen=True)
class HalfSettings(LossySettings):
    """Numbers in half precision, in 2 p bytes a vector.

    Half precision keeps 11 bits of a number; numbers beyond 65504 are refused.
    On 50,000 embeddings of CIFAR-10 (p = 512) recall@10 is 0.999.
    """

    name: Literal["fp16"] = "fp16"

    def fresh(self, dim: int) -> faiss.Index:
        """See `KindSettings`."""
        return faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_fp16)

    def require_range(self, vectors: Vectors) -> None:
        """See `KindSettings`."""
        beyond = np.abs(vectors) > _LARGEST_HALF
        if beyond.any():
            row = int(beyond.any(axis=1).argmax())
            raise DataError(
                f"embeddings: found a number in row {row} that the index fp16 cannot "
                f"hold, expected numbers from {-_LARGEST_HALF:g} to "
                f"{_LARGEST_HALF:g}; choose the index flat or sq8, or scale the inputs"
            )

    def encodable(self, vectors: Vectors) -> Vectors:
        """Return them cut to what half precision can say."""
        return np.clip(vectors, -_LARGEST_HALF, _LARGEST_HALF)


_RANGE_MARGIN = 0.25
"""By which part of its width a learnt range is extended at both ends. What is added
later and lies outside is cut to the range. On embeddings of CIFAR-10, recall@10 after
learning from 256 of 50,000 is 0.980 without a margin, 0.990 with this one; after
learning from all it is 0.99 either way."""
_RANGE_SAMPLE = 256
"""With fewer vectors a range is too narrow for those that follow (recall@10 of 0.946
without a margin, and 0.975 with it, after 64), and there is little to be saved."""
_POINTS_PER_CENTROID = (4, 64)
"""The fewest and the most vectors for each centroid in k-means. With fewer, centroids
are hardly more than single vectors; more take four times as long for an accuracy that
is the same within a point."""


@dataclass(frozen=True)
class ScalarSettings(LossySettings):
    """Each number in 8 bits, p bytes a vector."""

    name: Literal["sq8"] = "sq8"

    @property
    def num_needed(self) -> int:
        """See `KindSettings`."""
        return _RANGE_SAMPLE

    def fresh(self, dim: int) -> faiss.Index:
        """See `KindSettings`."""
        scalar = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit)
        scalar.sq.rangestat_arg = _RANGE_MARGIN
        return scalar


@dataclass(frozen=True)
class ProductSettings(LossySettings):
    """Product quantisation: parts of a vector, each as the number of a centroid.

    While there are fewer than 4 vectors for each centroid (1,024 with 8 bits) they are
    kept as they are. On 50,000 embeddings of CIFAR-10 (p = 512) recall@10 is 0.73 by
    default, in 64 bytes a vector; among 40 candidates are 0.995 of the ten nearest, so
    that ``rerank`` of 4 makes up for it.

    Attributes
    ----------
    num_parts
        M, the number of sub-quantisers; divides p. Null is the largest divisor of p
        that leaves at least 8 numbers in a part.
    num_bits
        Of the number of a centroid, from 4 to 8: there are 2^bits in each part.
    """

    name: Literal["pq"] = "pq"
    num_parts: PositiveInt | None = None
    num_bits: Annotated[int, Field(ge=4, le=8)] = 8

    def parts_of(self, dim: int) -> int:
        """Return M for vectors of p = ``dim`` numbers."""
        divisors = [parts for parts in range(1, dim + 1) if dim % parts == 0]
        if self.num_parts is None:
            return max(parts for parts in divisors if parts <= max(1, dim // 8))
        if self.num_parts not in divisors:
            message = (
                f"found {self.num_parts}, which does not divide {dim}, the size of an "
                f"embedding; choose one of {', '.join(map(str, divisors))}, or null"
            )
            raise ConfigError([Problem("index.num_parts", message)], "the store")
        return self.num_parts

    @property
    def num_needed(self) -> int:
        """See `KindSettings`."""
        return int(_POINTS_PER_CENTROID[0] * 2**self.num_bits)

    def fresh(self, dim: int) -> faiss.Index:
        """See `KindSettings`."""
        product = faiss.IndexPQ(dim, self.parts_of(dim), self.num_bits)
        fewest, most = _POINTS_PER_CENTROID
        product.pq.cp.min_points_per_centroid = fewest
        product.pq.cp.max_points_per_centroid = most
        return product


_LARGEST_DEAD_SHARE = 0.25
"""At this share a search keeps a third more candidates than in a new graph."""


@dataclass(frozen=True)
class GraphSettings(KindSettings):
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
        return super().code_bytes(dim) + 8 * self.num_links

    def fresh(self, dim: int) -> faiss.Index:
        """See `KindSettings`."""
        graph = faiss.IndexHNSWFlat(dim, self.num_links)
        graph.hnsw.efConstruction = self.ef_construction
        return graph

    def index_of(self, content: IndexFile) -> VectorIndex:
        """See `KindSettings`."""
        return GraphIndex(content, self.ef_search)


class GraphIndex(VectorIndex):
    """HNSW. What is removed stays in the graph, and is never returned."""

    def __init__(self, content: IndexFile, ef_search: int) -> None:
        super().__init__(content)
        self._storage = faiss.downcast_index(content.index.storage)
        self._ef_search = ef_search
        self._note_the_dead()

    def __len__(self) -> int:
        return len(self._table) - self._num_dead

    @property
    def ids(self) -> Ids:
        """The ids of the entries that live, shape (n,)."""
        living: Ids = self._table.by_slot[self._table.by_slot != NOTHING]
        return living

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
        """Return rough squared distances and ids of the nearest, each (m, count)."""
        # As many of the candidates live as if there were no dead ones.
        num_entries = len(self._table)
        kept = min(num_entries, self._ef_search * num_entries // len(self))
        params = faiss.SearchParametersHNSW(efSearch=kept, sel=self._living)
        distances, slots = _search(self._index, queries, count, self._at_once, params)
        short = slots[:, -1] == NOTHING
        if short.any():
            everything = faiss.SearchParameters(sel=self._living)
            distances[short], slots[short] = _search(
                self._storage, queries[short], count, self._at_once, everything
            )
        return distances, self._table.ids_at(slots)

    def vectors(self, ids: Ids) -> Vectors:
        """Return the vectors (m, p) under ``ids`` (m,)."""
        return _decoded(self._storage, self._table.slots_of(ids))

    def _note_the_dead(self) -> None:
        alive = np.not_equal(self._table.by_slot, NOTHING)
        self._num_dead = int(len(alive) - alive.sum())
        # FAISS refers to the bits and does not copy them.
        self._bits = np.packbits(alive, bitorder="little")
        self._living = (
            faiss.IDSelectorBitmap(self._bits) if self._num_dead > 0 else None
        )


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
class ListsSettings(KindSettings):
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
        return super().code_bytes(dim) + 8

    def lists_for(self, num_vectors: int) -> int:
        """Return the number of lists for n = ``num_vectors``."""
        num_lists = self.num_lists or max(1, round(math.sqrt(num_vectors)))
        return num_lists if num_vectors >= _FEWEST_IN_LIST * num_lists else 1

    def probes_for(self, num_lists: int) -> int:
        """Return the number of lists to look into."""
        default = max(_FEWEST_PROBES, math.ceil(num_lists / _PROBED_PART))
        return min(num_lists, self.num_probes or default)

    def fresh(self, dim: int, num_lists: int = 1) -> faiss.Index:
        """See `KindSettings`."""
        return faiss.IndexIVFFlat(faiss.IndexFlatL2(dim), dim, num_lists)

    def filled(self, dim: int, ids: Ids, vectors: Vectors) -> IndexFile:
        """See `KindSettings`."""
        num_lists = self.lists_for(len(vectors))
        index = self.fresh(dim, num_lists)
        index.set_direct_map_type(faiss.DirectMap.Hashtable)
        index.cp.max_points_per_centroid = _MOST_IN_SAMPLE
        use_one_thread()
        if num_lists == 1:
            # All go there, wherever its centroid is.
            index.quantizer.add(np.zeros((1, dim), dtype=np.float32))
            index.is_trained = True
        else:
            index.train(_learnable(vectors))
        _put_into_lists(index, ids, vectors)
        num_sample = len(vectors) if num_lists > 1 else 0
        return IndexFile(index, np.empty(0, np.int64), num_sample)

    def index_of(self, content: IndexFile) -> VectorIndex:
        """See `KindSettings`."""
        return ListsIndex(content, self)


class ListsIndex(VectorIndex):
    """IVF. A vector leaves no trace in its list, but in the centroids."""

    def __init__(self, content: IndexFile, settings: ListsSettings) -> None:
        super().__init__(content)
        self._settings = settings

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
        num_sample, factor = self._num_sample, _OUTGROWN_FACTOR
        if num_sample == 0:
            return self._settings.lists_for(len(self)) > 1
        has_grown = self._num_since >= (factor - 1) * num_sample
        return has_grown or len(self) * factor < num_sample

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add ``vectors`` (m, p) under ``ids`` (m,)."""
        _put_into_lists(self._index, ids, vectors)
        self._num_since += len(ids)

    def remove(self, ids: Ids) -> None:
        """Take ``ids`` (m,) out of their lists."""
        use_one_thread()
        self._index.remove_ids(faiss.IDSelectorArray(ids))

    def candidates(self, queries: Vectors, count: int) -> tuple[Vectors, Ids]:
        """Return rough squared distances and ids of the nearest, each (m, count)."""
        num_lists = int(self._index.nlist)
        num_probes = self._settings.probes_for(num_lists)
        distances, ids = self._probe(queries, count, num_probes)
        short = ids[:, -1] == NOTHING
        if short.any():
            distances[short], ids[short] = self._probe(queries[short], count, num_lists)
        return distances, ids

    def vectors(self, ids: Ids) -> Vectors:
        """Return the vectors (m, p) under ``ids`` (m,)."""
        found: Vectors = self._index.reconstruct_batch(ids)
        return found

    def _probe(
        self, queries: Vectors, count: int, num_probes: int
    ) -> tuple[Vectors, Ids]:
        params = faiss.SearchParametersIVF(nprobe=num_probes)
        return _search(self._index, queries, count, self._at_once, params)


def _put_into_lists(index: faiss.IndexIVFFlat, ids: Ids, vectors: Vectors) -> None:
    """Add ``vectors`` (m, p) under ``ids`` (m,) to the lists of ``index``."""
    use_one_thread()
    nearest = [
        index.quantizer.assign(_learnable(vectors[rows]), 1)
        for rows in _batches(len(vectors), _queries_at_once(index.d))
    ]
    lists = np.concatenate([np.empty((0, 1), np.int64), *nearest])
    arrays = [np.ascontiguousarray(array) for array in (vectors, ids, lists)]
    index.add_core(len(vectors), *map(faiss.swig_ptr, arrays))


IndexSettings = Annotated[
    FlatSettings
    | HalfSettings
    | ScalarSettings
    | ProductSettings
    | GraphSettings
    | ListsSettings,
    Field(discriminator="name"),
]

INDEX_KINDS: Mapping[str, type[IndexSettings]] = {
    kind.name: kind for kind in get_args(get_args(IndexSettings)[0])
}
"""Their settings, by name; another kind is one more."""

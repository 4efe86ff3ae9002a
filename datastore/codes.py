"""The kinds that keep one code a vector and compare a query with all of them."""

import ctypes
import mmap
import sys
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from knnper.datastore.index import (
    Ids,
    IndexFile,
    SlotTable,
    VectorIndex,
    Vectors,
    queries_at_once,
    search,
    use_one_thread,
)

FEWEST_BYTES = 4 * 2**20
"""Smaller arrays stay in the processor's caches anyway."""

_HUGE_PAGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE, MADV_COLLAPSE (Linux 6.1 and later)


def use_huge_pages(address: int, num_bytes: int) -> bool:
    """Ask for huge pages for memory that is in use; its content stays.

    Returns
    -------
    bool
        Whether the system was asked and did not refuse. If not, nothing has changed.
    """
    if num_bytes < FEWEST_BYTES or not sys.platform.startswith("linux"):
        return False
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if madvise(first, length, _HUGE_PAGE) != 0:
        return False
    # Pages that are there already are replaced at once, or by and by without this.
    madvise(first, length, _COLLAPSE)
    return True


class CodesIndex(VectorIndex):
    """Base of those kinds, on any of FAISS's ``IndexFlatCodes``.

    A vector is removed by moving the last code into its place, which takes as long as
    it takes to write one code; FAISS itself would move all that follow. Bytes that are
    no longer used are overwritten with zeros.

    Parameters
    ----------
    content
        An index that is trained, the ids of its codes, and how old its training is.
    """

    def __init__(self, content: IndexFile) -> None:
        self._index: faiss.IndexFlatCodes = content.index
        self._table = SlotTable(content.ids)
        self._learnt = content.learnt
        self.dim = content.index.d
        self._address = 0
        self._place_codes()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def ids(self) -> Ids:
        """The ids, by slot, shape (n,)."""
        return self._table.by_slot.copy()

    @property
    def num_bytes(self) -> int:
        """Bytes of the codes and of the table of ids."""
        return int(self._index.codes.size()) + self._table.num_bytes

    @property
    def is_outgrown(self) -> bool:
        """False: nothing was learnt."""
        return False

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add ``vectors`` (m, p) under ``ids`` (m,)."""
        use_one_thread()
        self._index.add(self._encodable(vectors))
        self._table.append(ids)
        self._learnt = self._learnt.followed_by(len(ids))
        self._place_codes()

    def _place_codes(self) -> None:
        """Take care of where the codes lie, each time FAISS has moved them."""
        address = address_of(self._index)
        if address != self._address:
            self._address = address
            use_huge_pages(address, self._index.codes.size())

    def remove(self, ids: Ids) -> None:
        """Overwrite the codes of ``ids`` (m,)."""
        codes = code_rows(self._index)
        movers, holes = self._table.close_up(ids)
        num_left = len(self._table)
        codes[holes] = codes[movers]
        codes[num_left:] = 0
        self._index.codes.resize(num_left * self._index.code_size)
        self._index.ntotal = num_left

    def candidates(self, queries: Vectors, count: int) -> tuple[Vectors, Ids]:
        """Return rough squared distances and ids of the nearest, each (m, count)."""
        distances, slots = search(self._index, queries, count, self._queries_at_once)
        return distances, self._table.ids_at(slots)

    def vectors(self, ids: Ids) -> Vectors:
        """Return what the codes of ``ids`` (m,) stand for, shape (m, p)."""
        return decoded(self._index, self._table.slots_of(ids))

    def write(self, path: Path) -> None:
        """Write codes and ids."""
        IndexFile(self._index, self._table.by_slot, self._learnt).write(path)

    @property
    def _queries_at_once(self) -> int:
        return queries_at_once(self.dim)

    def _encodable(self, vectors: Vectors) -> Vectors:
        return vectors


def address_of(index: faiss.IndexFlatCodes) -> int:
    """Return where in memory the codes are; 0 where there are none."""
    if index.ntotal == 0:
        return 0
    first: NDArray[np.uint8] = faiss.rev_swig_ptr(index.codes.data(), 1)
    return int(first.ctypes.data)


def code_rows(index: faiss.IndexFlatCodes) -> NDArray[np.uint8]:
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


def decoded(index: faiss.IndexFlatCodes, slots: NDArray[np.intp]) -> Vectors:
    """Return what the codes in ``slots`` (m,) stand for, shape (m, p)."""
    codes = code_rows(index)[slots]
    if isinstance(index, faiss.IndexFlat):
        return codes.view(np.float32)
    vectors: Vectors = index.sa_decode(codes)
    return vectors

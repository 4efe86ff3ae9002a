"""The one file of an index: four numbers, the ids by slot, and FAISS's own format."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import faiss
import numpy as np

from datastore.errors import StoreDamagedError
from datastore.index.base import Ids
from datastore.index.single_thread import use_one_thread

_MARK = int.from_bytes(b"knnindex", "little")
_HEADER = np.dtype("<i8")
_BYTES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Learnt:
    """How old it is what an index learnt from its vectors.

    Attributes
    ----------
    num_sample
        Vectors that were there when it learnt; 0 if it learnt nothing.
    num_since
        Vectors that were added since then, whether or not they are still there.
    """

    num_sample: int
    num_since: int = 0

    def followed_by(self, num_added: int) -> "Learnt":
        """Return the same after ``num_added`` more."""
        return Learnt(self.num_sample, self.num_since + num_added)


@dataclass(frozen=True)
class IndexFile:
    """What is in the file.

    Attributes
    ----------
    index
        Of FAISS.
    ids
        By slot, int64; none where FAISS keeps the ids itself.
    learnt
        See `Learnt`.
    """

    index: faiss.Index
    ids: Ids
    learnt: Learnt

    def write(self, path: Path) -> None:
        """Write the file.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        learnt = self.learnt
        header = [_MARK, len(self.ids), learnt.num_sample, learnt.num_since]
        use_one_thread()
        with path.open("wb") as file:
            file.write(np.array(header, _HEADER).data)
            file.write(np.ascontiguousarray(self.ids, _HEADER).data)
            # An error of `file.write` comes out of FAISS as it is.
            faiss.write_index(self.index, faiss.PyCallbackIOWriter(file.write))


def empty_file(index: faiss.Index) -> IndexFile:
    """Return an empty ``index`` of FAISS that learnt nothing, as the file holds it."""
    return IndexFile(index, np.empty(0, np.int64), Learnt(num_sample=0))


def read_index_file(path: Path) -> IndexFile:
    """Return what `IndexFile.write` wrote.

    Raises
    ------
    StoreDamagedError
        If there is something else in the file, or it cannot be read.
    """
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

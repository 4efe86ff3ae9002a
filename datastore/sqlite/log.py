"""The write-ahead log of a store's database, also where SQLite passes over it.

https://www.sqlite.org/fileformat2.html#the_write_ahead_log: a header of 32 bytes, then
frames of 24 bytes and a page each. Two random salts in header and frames tell the
frames of this log from what is left of an older one. The checksum of a frame begins
with that of the frame before. SQLite reads as far as checksums are right and a
transaction ends: a crash may have torn the last one.
"""

import contextlib
import functools
import os
import sqlite3
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from datastore.errors import StoreBusyError
from datastore.sqlite.connection import PAGE_BYTES, WAIT_S, log_of

LOG_BYTES = 64 * 2**20
"""How much is written to the log before it is copied into the database. Copying costs
as much as writing; a longer log copies pages less often, and is read slower."""

_HEADER, _FRAME_HEADER = 32, 24
_FRAME = _FRAME_HEADER + PAGE_BYTES
_MARK, _FORMAT = 0x377F0682, 3007000  # The last bit of the mark is the order of bytes.


class Log:
    """Copied into the database now and then, and emptied where that must be.

    Parameters
    ----------
    connection
        The writer's.
    path
        Of the database.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._num_bytes = 0
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")

    def note(self, num_rows: int, num_bytes: int) -> None:
        """Count what a transaction writes, of large rows with so many bytes in all."""
        self._num_bytes += num_bytes + 4 * PAGE_BYTES + 64 * num_rows

    def shorten(self) -> None:
        """Copy the log into the database if much was written; wait for nobody.

        What readers still need of it stays, and is copied another time.
        """
        if self._num_bytes > LOG_BYTES:
            self._num_bytes = 0
            # The transactions are safe in the log; a full disk may keep them there.
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def empty(self) -> None:
        """Copy the log into the database and cut it to nothing.

        Raises
        ------
        StoreBusyError
            If a reader does not let go of an older state for so long.
        """
        deadline = time.monotonic() + WAIT_S
        while self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            if time.monotonic() > deadline:
                raise StoreBusyError(
                    f"another process reads an older state of {self._path.parent}; end "
                    "that process"
                )
        self._num_bytes = 0

    def try_to_empty(self) -> None:
        """Empty the log, or at least leave what is read of it, without waiting.

        What several crashes leave behind each other would look like damage.
        """
        with contextlib.suppress(sqlite3.Error, OSError):
            self._connection.execute("PRAGMA busy_timeout = 0")
            kept, num_frames, _ = self._connection.execute(
                "PRAGMA wal_checkpoint(TRUNCATE)"
            ).fetchone()
            if kept and num_frames > 0:
                os.truncate(log_of(self._path), _HEADER + num_frames * _FRAME)
        self._connection.execute(f"PRAGMA busy_timeout = {1000 * WAIT_S:.0f}")


Pair = tuple[int, int]


@dataclass(frozen=True)
class Frame:
    """One page in the log.

    Attributes
    ----------
    number
        From 1.
    page
        Which page of the database it is, from 1.
    num_pages
        Of the database, where a transaction ends here; else 0.
    content
        The page.
    is_sound
        Whether its checksum is right, and those of all before it.
    """

    number: int
    page: int
    num_pages: int
    content: bytes
    is_sound: bool


def frames(path: Path) -> Iterator[Frame]:
    """Yield the frames of the log in ``path``, sound or not; none without a file.

    What is left of an older log is passed over.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        salts, order, before = _beginning(file)
        number = 0
        while len(read := file.read(_FRAME)) == _FRAME:
            number += 1
            # One flipped bit does not make it one of another log.
            is_of_this_log = _num_different_bits(_pair(read[8:16]), salts) <= 1
            if before is not None:
                found = _checksum(read[:8] + read[24:], before, order)
                is_sound = (_pair(read[8:16]), _pair(read[16:24])) == (salts, found)
                before = found if is_sound else None
            if is_of_this_log:
                page, num_pages = _pair(read[:8])
                yield Frame(number, page, num_pages, read[24:], before is not None)


def damage(path: Path) -> str | None:
    """Return what is wrong with the log in ``path``; None if a crash may leave it so.

    A crash tears the last transaction, which was not acknowledged. If frames of another
    one follow it was, for each is on disk before the next begins.
    """
    first = num_frames = num_ends = num_acknowledged = 0
    for frame in frames(path):
        num_frames += 1
        if not frame.is_sound:
            first = first or num_frames
            num_acknowledged += num_ends > 0
            num_ends += frame.num_pages > 0
    if num_ends and not _has_sound_header(path):
        where = "its header"
    elif num_acknowledged:
        where = f"frame {first} of {num_frames}"
    else:
        return None
    return f"its log is damaged at {where}, and {num_ends} transactions are not read"


def _has_sound_header(path: Path) -> bool:
    with path.open("rb") as file:
        return _beginning(file)[2] is not None


def _beginning(file: BinaryIO) -> tuple[Pair, str, Pair | None]:
    """Return salts, order of bytes and checksum of a log's header; None if damaged."""
    head = file.read(_HEADER)
    for mark, order in ((_MARK, "<"), (_MARK + 1, ">")):
        begun = np.array([mark, _FORMAT, PAGE_BYTES], ">u4").tobytes()
        if len(head) == _HEADER and head.startswith(begun):
            found = _checksum(head[:24], (0, 0), order)
            if found == _pair(head[24:]):
                return _pair(head[16:]), order, found
    # The frames know them too; those at the beginning are the newest.
    salts = [(0, 0)]
    for place in range(3):
        file.seek(_HEADER + place * _FRAME + 8)
        if len(read := file.read(8)) == 8:
            salts.insert(place, _pair(read))
    file.seek(_HEADER)
    return statistics.mode(salts), "<", None


def _pair(content: bytes) -> Pair:
    return int.from_bytes(content[:4], "big"), int.from_bytes(content[4:8], "big")


def _num_different_bits(one: Pair, other: Pair) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def _checksum(content: bytes, before: Pair, order: str) -> Pair:
    """Return the checksum of ``content`` that goes on from that of what is before.

    SQLite does ``a += x + b; b += y + a`` for each two words x and y, modulo 2^32. That
    is linear: a sum of the words, weighted by numbers of Fibonacci's.
    """
    words = np.frombuffer(content, f"{order}u4").astype(np.uint32)
    words = np.concatenate([np.array(before[1:], np.uint32), words])
    words[1:2] += np.uint32(before[0])
    first, second = (words @ _weights(len(words))).tolist()
    return first, second


@functools.cache
def _weights(count: int) -> NDArray[np.uint32]:
    """Return how much each of ``count`` words adds to a and b, shape (count, 2)."""
    weights = np.empty((count, 2), np.uint32)
    a, b = 0, 1
    for place in range(count - 1, -1, -1):
        weights[place] = a, b
        a, b = b, (a + b) % 2**32
    return weights

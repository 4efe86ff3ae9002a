"""The write-ahead log as a file, with the frames that SQLite passes over.

https://www.sqlite.org/fileformat2.html#the_write_ahead_log: a header of 32 bytes, then
frames of 24 bytes and a page each. Two random salts in header and frames tell the
frames of this log from what is left of an older one. The checksum of a frame begins
with that of the frame before. SQLite reads as far as checksums are right and a
transaction ends: a crash may have torn the last one.
"""

import functools
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from datastore.sqlite.connection import PAGE_BYTES

_HEADER, _FRAME_HEADER = 32, 24
_FRAME = _FRAME_HEADER + PAGE_BYTES
_MARK, _FORMAT = 0x377F0682, 3007000  # The last bit of the mark is the order of bytes.

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


def cut(path: Path, num_frames: int) -> None:
    """Take away what lies behind the frames of the log in ``path`` that are read."""
    end = _HEADER + num_frames * _FRAME
    if path.is_file() and path.stat().st_size > end:
        os.truncate(path, end)


def header(path: Path) -> bytes:
    """Return the header of the log in ``path``, which each new log changes."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(_HEADER)


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

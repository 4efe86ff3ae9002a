"""What stands beside a store's database on disk: log, witness, lock of the writer.

SQLite takes a damaged log for one that a crash has cut short: it ignores the damaged
transaction and all that follow, without a word. The witness, a number that is written
after each transaction, tells the two apart. It need not be on disk at once, which would
cost each transaction a second fsync: a killed process leaves it in the system's memory,
and a power cut at worst an older number, which raises no false alarm.
"""

import functools
import json
import logging
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.database import (
    FRAME_HEADER,
    LOG_HEADER,
    PAGE_BYTES,
    StoreRow,
    row_checksum,
)
from knnper.datastore.examples import StoreBusyError, StoreDamagedError, StoreError
from knnper.files import FileLock, LockHeldError, open_plain

_FRAME = FRAME_HEADER + PAGE_BYTES
_MARK, _FORMAT = 0x377F0682, 3007000  # The last bit of the mark is the order of bytes.
Pair = tuple[int, int]


@dataclass(frozen=True)
class Frame:
    """One page in the log."""

    number: int
    page: int
    num_pages: int
    content: bytes
    is_sound: bool


def frames(path: Path) -> Iterator[Frame]:
    """Yield the frames of the log in ``path``, sound or not; none without a file."""
    if not path.is_file():
        return
    with open_plain(path) as file:
        salts, order, before = _beginning(file)
        number = 0
        while len(read := file.read(_FRAME)) == _FRAME:
            number += 1
            # One flipped bit does not make it one of another log.
            flipped = zip(_pair(read[8:16]), salts, strict=True)
            is_of_this_log = sum((a ^ b).bit_count() for a, b in flipped) <= 1
            if before is not None:
                found = _checksum(read[:8] + read[24:], before, order)
                is_sound = (_pair(read[8:16]), _pair(read[16:24])) == (salts, found)
                before = found if is_sound else None
            if is_of_this_log:
                page, num_pages = _pair(read[:8])
                yield Frame(number, page, num_pages, read[24:], before is not None)


def damage(path: Path) -> str | None:
    """Return what is wrong with a log; None if a crash may leave it so."""
    # A crash tears the last transaction, which was not acknowledged. If frames of
    # another one follow it was, for each is on disk before the next begins.
    first = num_frames = num_ends = num_acknowledged = 0
    for frame in frames(path):
        num_frames += 1
        if not frame.is_sound:
            first = first or num_frames
            num_acknowledged += num_ends > 0
            num_ends += frame.num_pages > 0
    where = f"frame {first} of {num_frames}"
    if num_ends:
        with open_plain(path) as file:
            if _beginning(file)[2] is None:
                where, num_acknowledged = "its header", num_ends
    if not num_acknowledged:
        return None
    return f"its log is damaged at {where}, and {num_ends} transactions are not read"


def _beginning(file: IO[bytes]) -> tuple[Pair, str, Pair | None]:
    """Return salts, order of bytes and checksum of a log's header; None if damaged."""
    head = file.read(LOG_HEADER)
    for mark, order in ((_MARK, "<"), (_MARK + 1, ">")):
        begun = np.array([mark, _FORMAT, PAGE_BYTES], ">u4").tobytes()
        if len(head) == LOG_HEADER and head.startswith(begun):
            found = _checksum(head[:24], (0, 0), order)
            if found == _pair(head[24:]):
                return _pair(head[16:]), order, found
    # The frames know them too; those at the beginning are the newest.
    salts = [(0, 0)]
    for place in range(3):
        file.seek(LOG_HEADER + place * _FRAME + 8)
        if len(read := file.read(8)) == 8:
            salts.insert(place, _pair(read))
    file.seek(LOG_HEADER)
    return statistics.mode(salts), "<", None


def _pair(content: bytes) -> Pair:
    return int.from_bytes(content[:4], "big"), int.from_bytes(content[4:8], "big")


def _checksum(content: bytes, before: Pair, order: str) -> Pair:
    """Return the checksum of ``content`` that goes on from that of what is before."""
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


ACKNOWLEDGED = "acknowledged.json"
_NUM_BYTES = 256
"""Of the file: always the same ones are overwritten, within one sector of a disk."""
_ATTEMPTS, _PAUSE_S = 5, 0.005
"""How often the file is read again: it may be overwritten at this moment."""


@dataclass(frozen=True)
class Acknowledged:
    """What the witness says."""

    store_id: str
    num_changes: int
    num_examples: int
    num_offered: int

    @classmethod
    def of(cls, row: StoreRow) -> Self:
        """Return what acknowledges the state that ``row`` says."""
        num_offered = row.stream_state.num_offered
        return cls(row.store_id, row.num_changes, row.num_examples, num_offered)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return what the store in ``folder`` has acknowledged."""
        path = folder / ACKNOWLEDGED
        for _ in range(_ATTEMPTS if path.is_file() else 0):
            try:
                with open_plain(path) as file:
                    content = file.read(_NUM_BYTES + 1)
                found = json.loads(content)
                del found["checksum"]
                acknowledged = cls(**found)
                # Its end may be missing though all that it says is there.
                if acknowledged.encoded() == content:
                    return acknowledged
            except OSError as error:
                reason = error.strerror or error
                raise StoreError(f"{path} cannot be read: {reason}") from error
            except (ValueError, LookupError, TypeError, AttributeError):
                pass
            time.sleep(_PAUSE_S)
        raise StoreDamagedError(
            f"{path} is missing or not what was written, so it cannot be told whether "
            "the database is complete; expected the file that was beside it. Copy the "
            "whole folder from where the store was, or save what is here: knnper store "
            f"salvage {folder} NEW_FOLDER"
        )

    def encoded(self) -> bytes:
        """Return the content of the file."""
        document = dict(vars(self))
        document["checksum"] = row_checksum(*document.values())
        return json.dumps(document).encode().ljust(_NUM_BYTES - 1) + b"\n"


class Witness:
    """The witness's file, open for the one process that writes."""

    def __init__(self, folder: Path) -> None:
        self._file = open_plain(folder / ACKNOWLEDGED, "r+b")

    def write(self, row: StoreRow) -> None:
        """Note a state that is on disk."""
        try:
            os.pwrite(self._file.fileno(), Acknowledged.of(row).encoded(), 0)
        except OSError as error:
            # The change itself is done; an older number only says less.
            logging.getLogger(__name__).warning(
                "%s is not written: %s", ACKNOWLEDGED, error
            )

    def close(self) -> None:
        """Bring it to disk, and close it."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def writer_lock(path: Path) -> FileLock:
    """Return the lock of the one process that writes to a store."""
    try:
        return FileLock(path)
    except LockHeldError as error:
        raise StoreBusyError(
            f"process {error} writes to {path.parent}; a store has one writer and any "
            "number of readers. Stop that process, or open the store to read"
        ) from error
    except OSError as error:
        raise StoreError(
            f"{path.parent} cannot be written ({error}); open the store to read, or "
            "give this user the right to write there"
        ) from error

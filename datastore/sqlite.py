"""SQLite as a store uses it: connections, transactions, errors, the log, the lock."""

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

from knnper.datastore.examples import (
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    to_restore,
)
from knnper.files import FileLock, LockHeldError

PAGE_BYTES = 16384
"""Examples take some kilobytes: larger pages than SQLite's 4096 hold several of them,
and a batch is written almost twice as fast."""

_READ_FAILURES = tuple(
    f"SQLITE_IOERR_{one}" for one in ("READ", "SHORT_READ", "CORRUPTFS", "DATA")
)

_CLOSED = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")

WAIT_S = 10.0
"""How long a statement waits for another process to end its transaction."""


def log_of(path: Path) -> Path:
    """Return where the log of the database in ``path`` is, if there is one."""
    return path.with_name(f"{path.name}-wal")


class Connection(sqlite3.Connection):
    """To a store's database."""

    seen: tuple[object, ...] | None = None

    def is_outdated(self, path: Path) -> bool:
        """Return whether another connection would see something else."""
        return self.seen is not None and self.seen != _seen(path)


def connect(path: Path, *, writable: bool) -> Connection:
    """Return a connection whose transactions are those of `transaction`."""
    # A commit is on disk when it returns (synchronous = FULL), and what is deleted is
    # overwritten with zeros (secure_delete).
    with understood(path):
        if not writable:
            return _reader(path)
        connection = _connection(path, "mode=rwc")
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
        # `Log` says when, so that no commit pays for it by surprise.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
    return connection


def connect_to_memory() -> Connection:
    """Return a connection to an empty database that is gone with it."""
    connection = sqlite3.connect(
        ":memory:",
        isolation_level=None,
        check_same_thread=False,
        factory=Connection,
    )
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    return connection


def _seen(path: Path) -> tuple[object, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, is_unlogged(path)


def _reader(path: Path) -> Connection:
    if path.exists() and path.stat().st_size == 0:
        # SQLite would remove its log, from which much may be saved.
        raise connection_damaged(path, "it is empty")
    connection = _connection(path, "mode=ro")
    try:
        # Tells whether it can be read at all.
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        connection.close()
        if not _name_of(error).startswith(_CLOSED) or os.access(path.parent, os.W_OK):
            raise
        # To read beside a log, SQLite makes a file there. Without one it need not.
        if not is_unlogged(path):
            raise StoreError(
                f"{log_of(path)} holds changes that are not in the database yet, and "
                f"can be read only where {path.parent} can be written; copy the whole "
                "folder to such a place"
            ) from error
        seen = _seen(path)
        connection = _connection(path, "mode=ro&immutable=1")
        connection.seen = seen
    return connection


def _connection(path: Path, options: str) -> Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}",
        uri=True,
        timeout=WAIT_S,
        isolation_level=None,
        # Whoever uses it from several threads takes a lock first.
        check_same_thread=False,
        factory=Connection,
    )


def is_unlogged(path: Path) -> bool:
    """Return whether nothing is in the log of the database in ``path``."""
    try:
        return log_of(path).stat().st_size == 0
    except FileNotFoundError:
        return True


def read_damaged_text(connection: sqlite3.Connection) -> None:
    """Let texts that are no UTF-8 any more be read, as other texts than they were."""
    connection.text_factory = lambda encoded: encoded.decode(errors="replace")


@contextlib.contextmanager
def transaction(
    connection: sqlite3.Connection, path: Path, *, writing: bool
) -> Iterator[None]:
    """Run the block as one transaction: all of it is done, or nothing."""
    with understood(path):
        connection.execute("BEGIN IMMEDIATE" if writing else "BEGIN")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            # Some errors have rolled it back already.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


@contextlib.contextmanager
def understood(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into what they mean to whoever owns the store."""
    try:
        yield
    except sqlite3.ProgrammingError as error:
        raise StoreError(f"the store in {path.parent} was closed; open it") from error
    except sqlite3.Error as error:
        raise _meaning(error, path) from error
    except UnicodeDecodeError as error:
        # SQLite's message quotes what is damaged.
        raise connection_damaged(path, f"the database is damaged ({error})") from error


def _meaning(error: sqlite3.Error, path: Path) -> StoreError:
    name = _name_of(error)
    is_of_the_disk = name.startswith(("SQLITE_FULL", "SQLITE_IOERR"))
    if is_of_the_disk and name not in _READ_FAILURES:
        return StoreFullError(
            f"{path.parent} cannot be written ({error}): the disk is full, a quota is "
            "reached or the disk fails. What was stored before is unharmed; make room "
            "and try again"
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")):
        return StoreBusyError(
            f"another process has used {path} for more than {WAIT_S:g} seconds; try "
            "again when it is done"
        )
    if name.startswith(_CLOSED) and not _is_at_fault(path, name):
        return StoreError(
            f"{path} cannot be opened ({error}); expected permission to read it and to "
            f"write in {path.parent}, which reading the log needs too, and no limit on "
            "open files that is reached"
        )
    # The statements are ours and fit the tables that were written.
    return connection_damaged(path, f"the database is damaged ({error})")


def _is_at_fault(path: Path, name: str) -> bool:
    """Return whether the files of a database keep it from being opened, or written."""
    beside = (path.with_name(path.name + end) for end in ("", "-wal", "-shm"))
    if any(one.exists() and not one.is_file() for one in beside):
        return True
    is_writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return name.startswith("SQLITE_READONLY") and is_writable


def _name_of(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", "")


def connection_damaged(path: Path, found: str) -> StoreDamagedError:
    """Return the error of a store whose database is not what was written."""
    error = StoreDamagedError(
        f"{path} is not what was written: {found}. Nothing was changed; "
        f"{to_restore(path.parent)}"
    )
    error.found = found
    return error


LOG_BYTES = 64 * 2**20
"""How much is written to the log before it is copied into the database. Copying costs
as much as writing; a longer log copies pages less often, and is read slower."""

_HEADER, _FRAME_HEADER = 32, 24

_FRAME = _FRAME_HEADER + PAGE_BYTES

_MARK, _FORMAT = 0x377F0682, 3007000  # The last bit of the mark is the order of bytes.


class Log:
    """Copied into the database now and then, and emptied where that must be."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._num_bytes = 0
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")

    def note(self, num_rows: int, num_bytes: int) -> None:
        """Count what a transaction writes, of large rows with so many bytes in all."""
        self._num_bytes += num_bytes + 4 * PAGE_BYTES + 64 * num_rows

    def shorten(self) -> None:
        """Copy the log into the database if much was written; wait for nobody."""
        if self._num_bytes > LOG_BYTES:
            self._num_bytes = 0
            # The transactions are safe in the log; a full disk may keep them there.
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def empty(self) -> None:
        """Copy the log into the database and cut it to nothing."""
        deadline = time.monotonic() + WAIT_S
        while self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            if time.monotonic() > deadline:
                raise StoreBusyError(
                    f"another process reads an older state of {self._path.parent}; end "
                    "that process"
                )
        self._num_bytes = 0

    def try_to_empty(self) -> None:
        """Empty the log, or at least leave what is read of it, without waiting."""
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

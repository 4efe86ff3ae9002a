"""Rows of numbers in a table of bytes, each with a checksum."""

import contextlib
import fcntl
import functools
import json
import math
import os
import sqlite3
import statistics
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.examples import (
    Contents,
    ExamplesMissingError,
    Ids,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    to_restore,
)

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads all bits

_SHIFT = np.uint64(31)


def row_checksum(*values: object) -> int:
    """Return the CRC-32 of a row's values."""
    # Tells types apart too, which damage may have changed.
    return zlib.crc32(ascii(values).encode())


def damaged_rows(
    connection: sqlite3.Connection, table: str, columns: str
) -> Iterator[object]:
    """Yield the first column of the rows whose ``columns`` are not what was written."""
    for *values, expected in connection.execute(
        f"SELECT {columns}, checksum FROM {table} ORDER BY 1"
    ):
        if row_checksum(*values) != expected:
            yield values[0]


def content_checksum(
    table: str, example: int, label: int, content: bytes | memoryview
) -> int:
    """Return the CRC-32 of bytes, and of which example's they are in which table."""
    place = zlib.crc32(struct.pack("<qq", example, label), zlib.crc32(table.encode()))
    return zlib.crc32(content, place)


def is_intact(table: str, row: tuple[int, object, object, object]) -> bool:
    """Return whether a row of id, label, bytes and checksum is what was written."""
    example, label, content, expected = row
    return (
        # Damage may have changed a type as well.
        isinstance(label, int)
        and isinstance(content, bytes)
        and content_checksum(table, example, label, content) == expected
    )


def digest(contents: Contents) -> int:
    """Return a sum over examples (n) that tells ids, labels and times of arrival."""
    mixed = np.zeros(len(contents), np.uint64)
    for column in (contents.ids, contents.labels, contents.arrivals):
        mixed ^= column.view(np.uint64)
        mixed *= _MULTIPLIER
        mixed ^= mixed >> _SHIFT
    return as_signed(int(mixed.sum(dtype=np.uint64)))


def as_signed(number: int) -> int:
    """Return a number modulo 2^64, from -2^63 on."""
    return (number + 2**63) % 2**64 - 2**63


def insert(
    connection: sqlite3.Connection,
    table: str,
    ids: Ids,
    labels: NDArray[np.int64],
    rows: NDArray[np.generic],
) -> None:
    """Insert ``rows`` (m, ...) under ``ids`` (m,); replace what is there."""
    connection.executemany(
        f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)",
        _encoded(table, ids, labels, rows),
    )


def read(
    connection: sqlite3.Connection,
    table: str,
    column: str,
    ids: Ids,
    empty: NDArray[np.generic],
) -> NDArray[np.generic]:
    """Return the rows of ``ids`` (m,) in their order, shape (m, ...).

    Parameters
    ----------
    connection
        To the database.
    table, column
        Where the bytes are.
    ids
        What to read, each once.
    empty
        No rows, of the right type and of shape (0, ...).

    Raises
    ------
    ExamplesMissingError
        If a row is missing.
    StoreDamagedError
        If a row has another length or fails its checksum.
    """
    found = np.empty((len(ids), *empty.shape[1:]), dtype=empty.dtype)
    order = np.argsort(ids)
    cursor = connection.execute(
        f"SELECT id, label, {column}, {table}.checksum FROM {table} "
        "JOIN examples USING (id) WHERE id IN (SELECT value FROM json_each(?)) "
        "ORDER BY id",
        (json.dumps(ids.tolist()),),
    )
    rows = cursor.fetchall()
    present = [row[0] for row in rows]
    if present != ids[order].tolist():
        missing = sorted(set(ids.tolist()) - set(present))
        raise ExamplesMissingError(
            f"table {table} lacks examples {missing[:10]}; run `knnper store verify`"
        )
    row_bytes = empty.dtype.itemsize * int(np.prod(empty.shape[1:], dtype=np.int64))
    for position, row in zip(order.tolist(), rows, strict=True):
        if not is_intact(table, row) or len(row[2]) != row_bytes:
            raise StoreDamagedError(
                f"example {row[0]} in table {table} is not what was written; restore "
                "the folder from a backup, or delete the example: knnper store delete "
                f"FOLDER --id {row[0]}"
            )
        content = np.frombuffer(row[2], empty.dtype)
        found[position] = content.reshape(empty.shape[1:])
    return found


def damaged(connection: sqlite3.Connection, table: str, column: str) -> list[int]:
    """Return the ids whose bytes or label are not what was written."""
    cursor = connection.execute(
        f"SELECT id, label, {column}, {table}.checksum FROM {table} "
        "LEFT JOIN examples USING (id) ORDER BY id"
    )
    return [row[0] for row in cursor if not is_intact(table, row)]


def _encoded(
    table: str, ids: Ids, labels: NDArray[np.int64], rows: NDArray[np.generic]
) -> Iterator[tuple[int, memoryview, int]]:
    if len(ids) == 0:
        return
    contiguous = np.ascontiguousarray(rows).reshape(len(ids), -1).view(np.uint8)
    for example, label, row in zip(
        ids.tolist(), labels.tolist(), contiguous, strict=True
    ):
        yield example, row.data, content_checksum(table, example, label, row.data)


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


_CELL_BYTES = 24  # Of a row beside its bytes: key, lengths, checksum, its place.

_USABLE = PAGE_BYTES - 8  # Less the header of a page.

_LARGEST = PAGE_BYTES - 35  # A longer row overflows to pages of its own.


def row_bytes(num_bytes: int) -> float:
    """Return what a row of ``num_bytes`` takes, its share of unused space included."""
    size = num_bytes + _CELL_BYTES
    if size <= _LARGEST:
        return PAGE_BYTES / (_USABLE // size)
    overflow = PAGE_BYTES - 4
    least = (PAGE_BYTES - 12) * 32 // 255 - 23
    local = least + (size - least) % overflow
    if local > _LARGEST:
        local = least
    per_page = _USABLE // local
    return PAGE_BYTES / per_page + math.ceil((size - local) / overflow) * PAGE_BYTES


ROWS_AT_ONCE = 256
"""Large rows that are in memory together."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection to read with, closed afterwards."""
    connection = connect(path, writable=False)
    read_damaged_text(connection)
    with contextlib.closing(connection), understood(path):
        yield connection


def blob_columns(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return the tables of inputs and of embeddings, and their columns of bytes."""
    rows = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' "
        "AND name GLOB 'embeddings_[0-9]*' ORDER BY name"
    )
    return [("inputs", "input"), *((name, "vector") for (name,) in rows)]


def rows_of(
    connection: sqlite3.Connection, table: str, column: str, ids: Ids
) -> Iterator[tuple[int, bytes]]:
    """Yield those of ``ids`` (m,) that the table has, and their bytes."""
    cursor = connection.execute(
        f"SELECT id, {column} FROM {table} "
        "WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id",
        (json.dumps(ids.tolist()),),
    )
    for example, content in cursor:
        yield example, _as_bytes(content)


def all_rows(
    connection: sqlite3.Connection, table: str, column: str
) -> Iterator[list[tuple[int, bytes]]]:
    """Yield ids and bytes of all rows, some at once."""
    cursor = connection.execute(f"SELECT id, {column} FROM {table} ORDER BY id")
    while rows := cursor.fetchmany(ROWS_AT_ONCE):
        yield [(example, _as_bytes(content)) for example, content in rows]


def _as_bytes(content: object) -> bytes:
    """Return what stands where bytes were written; damage may have changed the type."""
    return content if isinstance(content, bytes) else str(content).encode()


APPLICATION_ID = 0x6B4E4E50  # "kNNP"

FORMAT = 2

# Ids and labels are apart from the large columns, so that reading them is cheap.
# The checksum of bytes covers id and label too: it ties a label to what it is the label
# of.
_TABLES = {
    "store": """(
    one INTEGER PRIMARY KEY CHECK (one = 1),
    store_id TEXT NOT NULL,
    created REAL NOT NULL,
    spec TEXT NOT NULL,
    settings TEXT NOT NULL,
    active INTEGER NOT NULL,
    stream TEXT NOT NULL,
    previous INTEGER,
    num_removed INTEGER NOT NULL,
    erasing INTEGER NOT NULL,
    index_token TEXT NOT NULL,
    num_examples INTEGER NOT NULL,
    digest INTEGER NOT NULL,
    num_changes INTEGER NOT NULL,
    checksum INTEGER NOT NULL
)""",
    "examples": """(
    id INTEGER PRIMARY KEY,
    external_id TEXT UNIQUE,
    label INTEGER NOT NULL,
    arrival REAL NOT NULL,
    checksum INTEGER NOT NULL
)""",
    "inputs": """(
    id INTEGER PRIMARY KEY,
    input BLOB NOT NULL,
    checksum INTEGER NOT NULL
)""",
    "versions": """(
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    fingerprint TEXT NOT NULL UNIQUE,
    embedding_dim INTEGER NOT NULL,
    checksum INTEGER NOT NULL
)""",
}

EXAMPLE = "id, external_id, label, arrival"
"""What the checksum of a row of ``examples`` covers."""

_VECTORS = """(
    id INTEGER PRIMARY KEY,
    vector BLOB NOT NULL,
    checksum INTEGER NOT NULL
)"""

_MADE_BY_SQLITE = {
    "sqlite_sequence": "CREATE TABLE sqlite_sequence(name,seq)",
    "sqlite_autoindex_examples_1": None,
    "sqlite_autoindex_versions_1": None,
}


def create_tables(connection: sqlite3.Connection) -> None:
    """Make the tables that every store has, in an empty database."""
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    for name, columns in _TABLES.items():
        connection.execute(_statement(name, columns))


def require_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database whose tables are not those of a store."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise connection_damaged(path, "it is a database, but not of a store")
    if 0 < found < FORMAT:
        raise StoreError(
            f"{path} is a store of format {found}, expected {FORMAT}; open it with the "
            "version of this software that wrote it, export it, and add it here"
        )
    if found != FORMAT:
        raise connection_damaged(
            path, f"it is of format {found}, expected {FORMAT}, unless it is newer"
        )
    statements = {name: _statement(name, columns) for name, columns in _TABLES.items()}
    for (number,) in connection.execute("SELECT number FROM versions"):
        name = vectors_table(number)
        statements[name] = _statement(name, _VECTORS)
    present = dict(connection.execute("SELECT name, sql FROM sqlite_master"))
    wrong = {*present.items()} ^ {*statements.items(), *_MADE_BY_SQLITE.items()}
    if wrong:
        names = ", ".join(sorted({str(name) for name, _ in wrong}))
        raise connection_damaged(path, f"tables and versions do not agree: {names}")


def _statement(name: str, columns: str) -> str:
    return f"CREATE TABLE {name} {columns}"


def vectors_table(version: int) -> str:
    """Return the name of the table of one version's embeddings."""
    return f"embeddings_{version:d}"


def insert_examples(
    connection: sqlite3.Connection,
    added: Contents,
    external_ids: Sequence[str | None],
) -> None:
    """Insert examples (n), whose owner has a name for each or none at all."""
    rows = zip(
        added.ids.tolist(),
        external_ids or [None] * len(added),
        added.labels.tolist(),
        added.arrivals.tolist(),
        strict=True,
    )
    connection.executemany(
        "INSERT INTO examples VALUES (?, ?, ?, ?, ?)",
        ((*row, row_checksum(*row)) for row in rows),
    )


def insert_version(
    connection: sqlite3.Connection, fingerprint: str, embedding_dim: int
) -> int:
    """Note a version in the database, make its table, and return its number."""
    cursor = connection.execute(
        "INSERT INTO versions (fingerprint, embedding_dim, checksum) VALUES (?, ?, ?)",
        (fingerprint, embedding_dim, row_checksum(fingerprint, embedding_dim)),
    )
    number = int(cursor.lastrowid or 0)
    connection.execute(_statement(vectors_table(number), _VECTORS))
    return number


ATTEMPTS, PAUSE_S = 3, 0.02
"""How often, and after which pause, a lock that is taken is tried again."""


class WriterLock:
    """Held by the one process that writes; gone with it, however that ends."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise StoreError(
                f"{path.parent} cannot be written ({error}); open the store to read, "
                "or give this user the right to write there"
            ) from error
        if not self._taken():
            self._file.seek(0)
            holder = self._file.read().decode(errors="replace") or "unknown"
            self._file.close()
            raise StoreBusyError(
                f"process {holder} writes to {path.parent}; a store has one writer and "
                "any number of readers. Stop that process, or open the store to read"
            )
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())
        self._file.flush()

    def release(self) -> None:
        """Let others write, also where a forked process has the file open."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    def _taken(self) -> bool:
        """Take the lock; whoever only looks (`lock_holder`) has it for an instant."""
        for attempt in range(ATTEMPTS):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(PAUSE_S if attempt < ATTEMPTS - 1 else 0)
            else:
                return True
        return False


def lock_holder(path: Path) -> str | None:
    """Return the process id of who holds the lock in ``path``; None if nobody does."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return file.read().decode(errors="replace") or "unknown"
    return None

"""The rows of a store, in SQLite on disk or in memory: its truth.

Ids and labels are apart from the large columns, so that reading them is cheap. The
checksum of bytes covers id and label too: it ties a label to what it is the label of.
"""

import contextlib
import dataclasses
import json
import math
import os
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.examples import (
    Contents,
    ExamplesMissingError,
    Ids,
    InputLayout,
    Selection,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreMismatchError,
    StreamState,
    named,
    no_contents,
    to_delete,
    to_restore,
)
from knnper.datastore.index import Vectors

PAGE_BYTES = 16384
"""Examples take some kilobytes: larger pages than SQLite's 4096 hold several of them,
and a batch is written almost twice as fast."""
_READ_FAILURES = tuple(
    f"SQLITE_IOERR_{one}" for one in ("READ", "SHORT_READ", "CORRUPTFS", "DATA")
)
_CLOSED = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")
WAIT_S = 10.0
"""How long a statement waits for another process to end its transaction."""


JOURNAL_BYTES = 2**20
"""How much of a journal stays when its transaction has ended."""


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
    with understood(path):
        if not writable:
            return _reader(path)
        connection = _connection(path, "mode=rwc")
        # A commit is on disk when it returns (synchronous = FULL), what is deleted is
        # overwritten with zeros (secure_delete), and `Log` says when the log is copied
        # (wal_autocheckpoint), so that no commit pays for it by surprise.
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "secure_delete = ON",
            "wal_autocheckpoint = 0",
        ):
            connection.execute(f"PRAGMA {pragma}")
    return connection


def connect_unlogged(path: Path, page_bytes: int) -> Connection:
    """Return a connection that needs no log, whose memory only one machine can share.

    ``page_bytes``: Of a database that is made.
    """
    with contextlib.ExitStack() as stack, understood(path):
        connection = _connection(path, "mode=rwc")
        stack.callback(connection.close)
        # A journal that stays makes a commit cheap: no file comes or goes. It is on
        # disk when it returns also with NORMAL; FULL would wait once more, which the
        # checksums in the journal spare.
        for pragma in (
            f"page_size = {page_bytes}",
            "journal_mode = PERSIST",
            "synchronous = NORMAL",
            "secure_delete = OFF",
            f"journal_size_limit = {JOURNAL_BYTES}",
        ):
            connection.execute(f"PRAGMA {pragma}")
        stack.pop_all()
    return connection


def _connection(path: Path | None, options: str = "") -> Connection:
    """Return a connection; without a path to an empty database that ends with it."""
    connection = sqlite3.connect(
        ":memory:" if path is None else f"{path.absolute().as_uri()}?{options}",
        uri=path is not None,
        timeout=WAIT_S,
        isolation_level=None,
        # Whoever uses it from several threads takes a lock first.
        check_same_thread=False,
        factory=Connection,
    )
    if path is None or options == "mode=rwc":
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


def is_unlogged(path: Path) -> bool:
    """Return whether nothing is in the log of the database in ``path``."""
    try:
        return log_of(path).stat().st_size == 0
    except FileNotFoundError:
        return True


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection to read with, closed afterwards."""
    with contextlib.closing(connect(path, writable=False)) as connection:
        read_damaged_text(connection)
        with understood(path):
            yield connection


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


class Log:
    """Copied into the database now and then, and emptied where that must be."""

    def __init__(self, connection: Connection, path: Path) -> None:
        self.connection = connection
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
                self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def empty(self) -> None:
        """Copy the log into the database and cut it to nothing."""
        deadline = time.monotonic() + WAIT_S
        while self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            if time.monotonic() > deadline:
                raise StoreBusyError(
                    f"another process reads an older state of {self._path.parent}; end "
                    "that process"
                )
        self._num_bytes = 0

    def try_to_empty(self) -> None:
        """Empty the log if nobody reads it now; otherwise leave it for later."""
        with contextlib.suppress(sqlite3.Error, OSError):
            self.connection.execute("PRAGMA busy_timeout = 0")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.connection.execute(f"PRAGMA busy_timeout = {1000 * WAIT_S:.0f}")


APPLICATION_ID = 0x6B4E4E50  # "kNNP"
FORMAT = 2
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

_EXAMPLE = "id, external_id, label, arrival"
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


@dataclass
class StoreRow:
    """The columns of the table ``store``, all of which its checksum covers."""

    store_id: str  # unlike any other store's
    created: float  # seconds since 1970 (UTC)
    spec: str  # JSON of `StoreSpec`
    settings: str  # JSON of `StoreSettings`
    active: int = 0  # number of the version that is searched
    stream: str = ""  # JSON of what the policy remembers
    previous: int | None = None  # number of the version that can be rolled back to
    num_removed: int = 0  # examples that ever left; grows whenever an id disappears
    erasing: int = 0  # 1 where deleted examples may still have left bytes
    index_token: str = ""  # of the last save of the index
    num_examples: int = 0
    digest: int = 0  # see `digest`
    num_changes: int = 0  # transactions that ever changed the store

    @classmethod
    def read(cls, connection: sqlite3.Connection, path: Path) -> Self:
        """Return the row of the database in ``path``."""
        rows = connection.execute(f"SELECT {_COLUMNS}, checksum FROM store").fetchall()
        if len(rows) != 1 or cls(*rows[0][:-1]).checksum != rows[0][-1]:
            raise connection_damaged(
                path,
                "what it says of the store, such as its classes and its capacity, is "
                "not what was written",
            )
        return cls(*rows[0][:-1])

    def write(self, connection: sqlite3.Connection) -> None:
        """Replace the row."""
        statement = _insertion("store", f"one, {_COLUMNS}")
        connection.execute(statement, (1, *vars(self).values(), self.checksum))

    @property
    def checksum(self) -> int:
        """Of all other columns."""
        return row_checksum(*vars(self).values())

    @property
    def stream_state(self) -> StreamState:
        """What the policy remembers."""
        document = json.loads(self.stream)
        return StreamState(
            document["num_offered"],
            np.array(document["num_seen"], dtype=np.int64),
            np.array(document["was_largest"], dtype=np.bool_),
        )

    @stream_state.setter
    def stream_state(self, stream: StreamState) -> None:
        document = {
            "num_offered": stream.num_offered,
            "num_seen": stream.num_seen.tolist(),
            "was_largest": stream.was_largest.tolist(),
        }
        self.stream = json.dumps(document)


_COLUMNS = ", ".join(one.name for one in dataclasses.fields(StoreRow))


def create(
    connection: sqlite3.Connection, row: StoreRow, fingerprint: str, embedding_dim: int
) -> None:
    """Make the tables of a store in an empty database, and its first version."""
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    for name, columns in _TABLES.items():
        connection.execute(_statement(name, columns))
    row.active = _insert_version(connection, fingerprint, embedding_dim)
    row.write(connection)


def _insertion(table: str, columns: str, verb: str = "INSERT OR REPLACE") -> str:
    """Return the statement that inserts these columns, and their checksum."""
    marks = ", ".join("?" * (1 + len(columns.split(","))))
    return f"{verb} INTO {table} ({columns}, checksum) VALUES ({marks})"


def _insert_version(
    connection: sqlite3.Connection, fingerprint: str, embedding_dim: int
) -> int:
    """Note a version in the database, make its table, and return its number."""
    values = fingerprint, embedding_dim
    statement = _insertion("versions", "fingerprint, embedding_dim", "INSERT")
    cursor = connection.execute(statement, (*values, row_checksum(*values)))
    number = int(cursor.lastrowid or 0)
    connection.execute(_statement(vectors_table(number), _VECTORS))
    return number


def _pragma(connection: sqlite3.Connection, path: Path, name: str) -> int:
    with understood(path):
        return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def require_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database whose tables are not those of a store."""
    found = _pragma(connection, path, "user_version")
    if _pragma(connection, path, "application_id") != APPLICATION_ID:
        raise connection_damaged(path, "it is a database, but not of a store")
    if found != FORMAT:
        raise connection_damaged(
            path,
            f"it has the format {found}, expected {FORMAT}, unless another version of "
            "this software wrote it",
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


def _column_of(table: str) -> str:
    """Return the column of bytes of a table of inputs or embeddings."""
    return "input" if table == "inputs" else "vector"


def vectors_table(version: int) -> str:
    """Return the name of the table of one version's embeddings."""
    return f"embeddings_{version:d}"


_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads all bits
_SHIFT = np.uint64(31)


def row_checksum(*values: object) -> int:
    """Return the CRC-32 of a row's values."""
    # Tells types apart too, which damage may have changed.
    return zlib.crc32(ascii(values).encode())


def damaged_examples(connection: sqlite3.Connection) -> list[object]:
    """Return the ids of the rows of ``examples`` that are not what was written."""
    rows = connection.execute(f"SELECT {_EXAMPLE}, checksum FROM examples ORDER BY id")
    return [row[0] for row in rows if row_checksum(*row[:-1]) != row[-1]]


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
    # What is added and removed is added to it and subtracted from it, so it also tells
    # that an example is missing.
    mixed = np.zeros(len(contents), np.uint64)
    for column in (contents.ids, contents.labels, contents.arrivals):
        mixed ^= column.view(np.uint64)
        mixed *= _MULTIPLIER
        mixed ^= mixed >> _SHIFT
    return _as_signed(int(mixed.sum(dtype=np.uint64)))


def _as_signed(number: int) -> int:
    """Return a number modulo 2^64, from -2^63 on."""
    return (number + 2**63) % 2**64 - 2**63


def _insert(
    connection: sqlite3.Connection,
    table: str,
    ids: Ids,
    labels: NDArray[np.int64],
    rows: NDArray[np.generic],
) -> None:
    """Insert ``rows`` (m, ...) under ``ids`` (m,); replace what is there."""
    if len(ids) == 0:
        return
    contents = np.ascontiguousarray(rows).reshape(len(ids), -1).view(np.uint8)
    connection.executemany(
        _insertion(table, f"id, {_column_of(table)}"),
        (
            (one, row.data, content_checksum(table, one, label, row.data))
            for one, label, row in zip(
                ids.tolist(), labels.tolist(), contents, strict=True
            )
        ),
    )


def _read(
    connection: sqlite3.Connection, table: str, ids: Ids, empty: NDArray[np.generic]
) -> NDArray[np.generic]:
    """Return the rows of ``ids`` (m,), each asked for once, in their order.

    Their type and shape are those of ``empty``, shape (0, ...).
    """
    order = np.argsort(ids)
    rows = connection.execute(
        f"SELECT id, label, {_column_of(table)}, {table}.checksum FROM {table} "
        "JOIN examples USING (id) WHERE id IN (SELECT value FROM json_each(?)) "
        "ORDER BY id",
        (_listed(ids),),
    ).fetchall()
    present = [row[0] for row in rows]
    if present != ids[order].tolist():
        missing = sorted(set(ids.tolist()) - set(present))
        raise ExamplesMissingError(
            f"table {table} lacks examples {missing[:10]}; run `knnper store verify`"
        )
    row_bytes = empty.dtype.itemsize * math.prod(empty.shape[1:])
    for row in rows:
        if not is_intact(table, row) or len(row[2]) != row_bytes:
            raise StoreDamagedError(
                f"example {row[0]} in table {table} is not what was written; restore "
                "the folder from a backup, or delete the example: knnper store delete "
                f"FOLDER --id {row[0]}"
            )
    # Memory is taken only now that the rows have the size that the store claims.
    found = np.empty((len(ids), *empty.shape[1:]), dtype=empty.dtype)
    for position, row in zip(order.tolist(), rows, strict=True):
        content = np.frombuffer(row[2], empty.dtype)
        found[position] = content.reshape(empty.shape[1:])
    return found


def damaged(connection: sqlite3.Connection, table: str) -> list[int]:
    """Return the ids whose bytes or label are not what was written."""
    cursor = connection.execute(
        f"SELECT id, label, {_column_of(table)}, {table}.checksum FROM {table} "
        "LEFT JOIN examples USING (id) ORDER BY id"
    )
    return [row[0] for row in cursor if not is_intact(table, row)]


ROWS_AT_ONCE = 256
"""Large rows that are in memory together."""


def blob_tables(connection: sqlite3.Connection) -> list[str]:
    """Return the tables of inputs and of embeddings."""
    rows = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' "
        "AND name GLOB 'embeddings_[0-9]*' ORDER BY name"
    )
    return ["inputs", *(name for (name,) in rows)]


def contents_of(
    connection: sqlite3.Connection, table: str, ids: Ids | None = None
) -> Iterator[list[tuple[int, bytes]]]:
    """Yield ids and bytes of all rows, or those of ``ids`` (m,), some at once."""
    chosen = "" if ids is None else "WHERE id IN (SELECT value FROM json_each(?)) "
    cursor = connection.execute(
        f"SELECT id, {_column_of(table)} FROM {table} {chosen}ORDER BY id",
        () if ids is None else (_listed(ids),),
    )
    while rows := cursor.fetchmany(ROWS_AT_ONCE):
        # Damage may have changed the type.
        yield [
            (one, found if isinstance(found, bytes) else str(found).encode())
            for one, found in rows
        ]


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


@dataclass(frozen=True)
class Version:
    """One model's embeddings of the examples."""

    number: int  # names them; larger is younger
    fingerprint: str  # of the model
    embedding_dim: int  # p


@dataclass(frozen=True)
class Head:
    """What a store is at one moment, in a few words."""

    active: Version  # that is searched
    previous: int | None  # number of the version that can be rolled back to
    num_removed: int  # examples that ever left; grows whenever an id disappears
    stream: StreamState  # what the policy remembers


@dataclass(frozen=True)
class Change:
    """What one transaction does: it happens as a whole or not at all."""

    stream: StreamState  # what the policy remembers afterwards
    added: Contents = field(default_factory=no_contents)  # under new ids
    embeddings: Vectors | None = None  # theirs, shape (n, p), of ``version``
    inputs: NDArray[np.generic] | None = None  # theirs, shape (n, ...)
    external_ids: Sequence[str | None] = ()
    # Ids that leave, from all versions.
    removed: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    version: int | None = None  # must be the active one
    # Whether `Rows.erase_removed` will be called: if that is cut short, it is made up
    # for when the store is opened next.
    must_erase: bool = False


_EXAMPLES = (
    f"SELECT {_EXAMPLE}, checksum FROM examples "
    "WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id"
)


class Rows:
    """Keeps the examples. What a method has done is done for good when it returns."""

    def __init__(
        self,
        path: Path,
        layout: InputLayout | None,
        reader: Connection,
        writer: Connection | None,
        on_change: Callable[[StoreRow], None] = lambda _: None,  # when it is on disk
    ) -> None:
        self._path, self._layout, self._on_change = path, layout, on_change
        self._connection = reader
        # SQLite's connections to a file, and the writer's lock, do not survive a fork.
        self._process = None if reader is writer else os.getpid()
        self._reading = threading.RLock()
        self._writing = self._reading if reader is writer else threading.RLock()
        self._log = None if writer is None else Log(writer, path)
        self._held = None if writer is None else StoreRow.read(writer, path)
        self._known_versions = dict[int, Version]()
        self._data_version = -1
        self.has_changed()

    @classmethod
    def in_memory(
        cls,
        row: StoreRow,
        layout: InputLayout | None,
        fingerprint: str,
        embedding_dim: int,
    ) -> Self:
        """Return no rows, gone with the process: no file, the same behaviour."""
        connection, path = _connection(None), Path("memory")
        with transaction(connection, path, writing=True):
            create(connection, row, fingerprint, embedding_dim)
        return cls(path, layout, connection, connection)

    @classmethod
    def restored(cls, content: bytes, layout: InputLayout | None) -> Self:
        """Return rows in memory, of what `serialized` returned."""
        connection, path = _connection(None), Path("memory")
        with understood(path):
            connection.deserialize(content)
        return cls(path, layout, connection, connection)

    def serialized(self) -> bytes:
        """Return the whole database as the content of its file."""
        with self._reading, contextlib.closing(_connection(None)) as copied:
            self._reader.backup(copied)
            content = bytearray(copied.serialize())
        # "File format version numbers" in SQLite's file format: no log belongs to it.
        content[18:20] = b"\1\1"
        return bytes(content)

    def head(self) -> Head:
        """Return what the store is."""
        row = self.row()
        version = self._version(row.active)
        return Head(version, row.previous, row.num_removed, row.stream_state)

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that opened the files."""
        return self._process not in (None, os.getpid())

    @property
    def _reader(self) -> Connection:
        self._require_own_process()
        return self._connection

    def _require_own_process(self) -> None:
        if self.is_inherited:
            raise StoreError(
                f"process {self._process} opened the store in {self._path.parent}, and "
                f"this is process {os.getpid()}, which was forked from it; expected "
                "the process that opened it. Open the store in this one, after the "
                "other has closed it"
            )

    def has_changed(self) -> bool:
        """Return whether another process changed something since the last call."""
        self._require_own_process()
        if self._log is not None:
            return False
        with self._reading:
            if self._reader.is_outdated(self._path):
                self._reader.close()
                self._connection = connect(self._path, writable=False)
                self._data_version = -1
        before = self._data_version
        self._data_version = self._fetch("PRAGMA data_version")[0][0]
        return before != self._data_version

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read in the block what was there at one moment; blocks may be nested."""
        with self._reading:
            if self._reader.in_transaction:
                yield
                return
            with transaction(self._reader, self._path, writing=False):
                yield

    def contents(self, after: int = 0) -> Contents:
        """Return the examples whose ids are larger than ``after``."""
        with self.reading():
            rows = self._fetch(
                "SELECT id, label, arrival FROM examples WHERE id > ? ORDER BY id",
                after,
            )
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                contents = as_contents(rows)
                row = StoreRow.read(self._reader, self._path)
                expected = row.num_examples, row.digest
                if after > 0 or (len(contents), digest(contents)) == expected:
                    return contents
            raise self._damage()

    def vectors(self, ids: Ids, version: int) -> Vectors:
        """Return the embeddings (m, p) of ``ids`` (m,), all of which are there."""
        empty = np.empty((0, self._version(version).embedding_dim), np.float32)
        return self._content(vectors_table(version), ids, empty)

    def inputs(self, ids: Ids) -> NDArray[np.generic]:
        """Return the raw inputs (m, ...) of ``ids`` (m,), all of which are there."""
        assert self._layout is not None, "the store asks only where inputs are kept"
        empty = np.empty((0, *self._layout.shape), self._layout.dtype)
        return self._content("inputs", ids, empty)

    def _content(self, table: str, ids: Ids, empty: NDArray[np.generic]) -> NDArray:  # type: ignore[type-arg]
        with self._reading, understood(self._path):
            return _read(self._reader, table, ids, empty)

    def external_ids(self, ids: Ids) -> list[str | None]:
        """Return the owner's names of ``ids``; None for one that is not there."""
        rows = self._fetch(_EXAMPLES, _listed(ids))
        if len(list(_sound(rows))) < len(rows):
            raise self._damage()
        names = {row[0]: row[1] for row in rows}
        return [names.get(one) for one in ids.tolist()]

    def labels_as_found(self, ids: Ids) -> list[object]:
        """Return the labels of those of ``ids`` that are there, damaged or not."""
        return [row[2] for row in self._fetch(_EXAMPLES, _listed(ids))]

    def select(self, selection: Selection) -> Ids:
        """Return the ids that the selection describes, ascending."""
        condition, values = _where(selection)
        return self._ids(
            f"SELECT id FROM examples WHERE {condition} ORDER BY id", *values
        )

    def without_vector(self, version: int, after: int, limit: int) -> Ids:
        """Return up to ``limit`` ids above ``after`` that lack an embedding."""
        return self._ids(
            f"SELECT id FROM examples LEFT JOIN {vectors_table(version)} AS held "
            "USING (id) WHERE id > ? AND held.vector IS NULL ORDER BY id LIMIT ?",
            after,
            limit,
        )

    def num_bytes(self) -> int:
        """Return the bytes of the database, free ones included, less its log."""
        return int(self._fetch("PRAGMA page_count")[0][0]) * PAGE_BYTES

    def versions(self) -> list[Version]:
        """Return all versions, oldest first."""
        rows = self._fetch(
            "SELECT number, fingerprint, embedding_dim, checksum FROM versions "
            "ORDER BY number"
        )
        for _, *values, expected in rows:
            if row_checksum(*values) != expected:
                found = f"the model is not what was written: {values[0]}"
                raise connection_damaged(self._path, found)
        return [Version(*row[:3]) for row in rows]

    def apply(self, change: Change) -> None:
        """Make a change; what is removed may be damaged."""
        with self.writing() as (connection, row):
            if len(change.removed):
                self._remove(connection, row, change.removed)
            if len(change.added):
                self._add(connection, row, change)
            row.num_removed += len(change.removed)
            row.stream_state = change.stream
            row.erasing = max(row.erasing, int(change.must_erase))

    def compact(self) -> None:
        """Give unused space back."""
        log = self._written()
        with self._writing, understood(self._path):
            log.connection.execute("VACUUM")
            log.empty()

    def erase_removed(self) -> None:
        """Leave no byte of what was removed in any file."""
        with self._writing:
            self.compact()
            with self.writing() as (_, row):
                row.erasing = 0

    def add_version(self, fingerprint: str, embedding_dim: int) -> Version:
        """Return a new version that holds nothing yet."""
        with self.writing() as (connection, _):
            number = _insert_version(connection, fingerprint, embedding_dim)
        return Version(number, fingerprint, embedding_dim)

    def add_vectors(self, version: int, ids: Ids, vectors: Vectors) -> None:
        """Add embeddings (m, p) to a version; ids that have left are passed over."""
        with self.writing() as (connection, _):
            rows = connection.execute(_EXAMPLES, (_listed(ids),))
            label_of = {row[0]: row[2] for row in rows}
            present = np.array([one in label_of for one in ids.tolist()], dtype=bool)
            left = ids[present]
            labels = np.array([label_of[one] for one in left.tolist()], np.int64)
            _insert(connection, vectors_table(version), left, labels, vectors[present])
            self._written().note(len(ids), vectors.nbytes)

    def activate(self, version: int) -> None:
        """Search ``version`` from now on; keep the one before, drop all others."""
        with self.writing() as (connection, row):
            row.previous, row.active = row.active, version
            others = connection.execute(
                "SELECT number FROM versions WHERE number NOT IN (?, ?)",
                (row.active, row.previous),
            ).fetchall()
            for (number,) in others:
                connection.execute(f"DROP TABLE {vectors_table(number)}")
                connection.execute("DELETE FROM versions WHERE number = ?", (number,))

    def settle(self) -> None:
        """Finish what a writer that was killed has left in the log, for good."""
        with self._writing:
            self._written().try_to_empty()
            self._on_change(self.row())

    def close(self) -> None:
        """Give back whatever is held; nothing in a process that was forked."""
        # Also when it is collected there: it would copy the log, and empty it.
        if self.is_inherited:
            return
        with self._reading:
            if self._log is None or self._reader is not self._log.connection:
                self._reader.close()
        if self._log is not None:
            with self._writing:
                # A reader may keep the log; the next writer will copy it.
                self._log.try_to_empty()
                self._log.connection.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[sqlite3.Connection, StoreRow]]:
        """Run a block as one transaction; the store's row is written with it."""
        log = self._written()
        with self._writing:
            with transaction(log.connection, self._path, writing=True):
                row = replace(self.row())
                # Unknown, should the block be cut short at its end.
                self._held = None
                yield log.connection, row
                row.num_changes += 1
                row.write(log.connection)
            self._held = row
            self._on_change(row)
            log.shorten()

    def _written(self) -> Log:
        self._require_own_process()
        assert self._log is not None, "only a Store writes, and it has a log"
        return self._log

    def _remove(self, connection: sqlite3.Connection, row: StoreRow, ids: Ids) -> None:
        versions = connection.execute("SELECT number FROM versions").fetchall()
        self._written().note(len(ids), len(ids) * PAGE_BYTES)
        gone = connection.execute(_EXAMPLES, (_listed(ids),)).fetchall()
        tables = ["examples", "inputs", *(vectors_table(one) for (one,) in versions)]
        for table in tables:
            connection.executemany(
                f"DELETE FROM {table} WHERE id = ?", ((one,) for one in ids.tolist())
            )
        sound = list(_sound(gone))
        row.num_examples -= len(gone)
        if len(sound) == len(gone):
            row.digest = _as_signed(row.digest - digest(as_contents(sound)))
        else:
            # What was damaged counted as what it had been. Others still do.
            rest = connection.execute(f"SELECT {_EXAMPLE}, checksum FROM examples")
            row.digest = digest(as_contents(_sound(rest)))

    def _add(
        self, connection: sqlite3.Connection, row: StoreRow, change: Change
    ) -> None:
        added, inputs = change.added, change.inputs
        assert change.embeddings is not None, "an example comes with its embedding"
        if change.version != row.active:
            raise StoreMismatchError(
                "the store was embedded by another model meanwhile; embed these "
                "examples by that one, and add them again"
            )
        rows = zip(
            added.ids.tolist(),
            change.external_ids or [None] * len(added),
            added.labels.tolist(),
            added.arrivals.tolist(),
            strict=True,
        )
        connection.executemany(
            _insertion("examples", _EXAMPLE, "INSERT"),
            ((*one, row_checksum(*one)) for one in rows),
        )
        num_bytes = change.embeddings.nbytes + (0 if inputs is None else inputs.nbytes)
        self._written().note(len(added), num_bytes)
        where = added.ids, added.labels
        _insert(connection, vectors_table(row.active), *where, change.embeddings)
        if inputs is not None:
            _insert(connection, "inputs", *where, inputs)
        row.digest = _as_signed(row.digest + digest(added))
        row.num_examples += len(added)

    def row(self) -> StoreRow:
        """Return the store's row; a writer knows it, for nobody else changes it."""
        self._require_own_process()
        if self._held is not None:
            return self._held
        with self._reading, understood(self._path):
            return StoreRow.read(self._reader, self._path)

    def _version(self, number: int) -> Version:
        if number not in self._known_versions:
            self._known_versions = {one.number: one for one in self.versions()}
        if number not in self._known_versions:
            raise connection_damaged(self._path, f"there is no model {number}")
        return self._known_versions[number]

    def _damage(self) -> StoreDamagedError:
        """Return the error of examples that are not what was written."""
        with self._reading, understood(self._path):
            wrong = damaged_examples(self._reader)
        if not wrong:
            return connection_damaged(
                self._path, "examples are missing, or older than they were"
            )
        return StoreDamagedError(
            f"{self._path}: external id, label or time of arrival of {len(wrong)} "
            f"examples is not what was written: {named(wrong)}; "
            f"{to_delete(self._path.parent, wrong)}"
        )

    def _fetch(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._reading, understood(self._path):
            return self._reader.execute(statement, values).fetchall()

    def _ids(self, statement: str, *values: object) -> Ids:
        return np.array([one for (one,) in self._fetch(statement, *values)], np.int64)


def as_contents(rows: Iterable[tuple[int, int, float]]) -> Contents:
    """Return rows of id, label and time of arrival, ascending, as arrays."""
    ids, labels, arrivals = list(zip(*rows, strict=True)) or [(), (), ()]
    return Contents(
        np.array(ids, dtype=np.int64),
        np.array(labels, dtype=np.int64),
        np.array(arrivals, dtype=np.float64),
    )


def _listed(ids: Ids) -> str:
    """Return ids as one text, because the number of values to bind is bounded."""
    return json.dumps(ids.tolist())


def _sound(
    rows: Iterable[tuple[int, str | None, int, float, int]],
) -> Iterator[tuple[int, int, float]]:
    """Yield id, label and arrival of the rows of ``examples`` that are as written."""
    for one, name, label, arrival, expected in rows:
        if row_checksum(one, name, label, arrival) == expected:
            yield one, label, arrival


def _where(selection: Selection) -> tuple[str, list[object]]:
    """Return the condition on the table of examples, and what to bind to it."""
    conditions, values = ["1"], list[object]()
    lists = {
        "id": selection.ids,
        "external_id": selection.external_ids,
        "label": selection.labels,
    }
    for column, allowed in lists.items():
        if allowed is not None:
            # One text, because the number of values that can be bound is bounded.
            # NumPy's integers are no JSON.
            conditions.append(f"{column} IN (SELECT value FROM json_each(?))")
            listed = [one if isinstance(one, str) else int(one) for one in allowed]
            values.append(json.dumps(listed))
    ends = (">=", selection.arrived_from), ("<", selection.arrived_before)
    for sign, end in ends:
        if end is not None:
            conditions.append(f"arrival {sign} ?")
            values.append(end)
    return " AND ".join(conditions), values

"""The one schema of a store's database: tables, what is written to them, checksums.

Ids and labels are apart from the large columns, so that reading them is cheap. The
checksum of bytes covers id and label too: it ties a label to what it is the label of.
"""

import contextlib
import dataclasses
import json
import math
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.examples import (
    Contents,
    ExamplesMissingError,
    Ids,
    StoreDamagedError,
    StoreError,
)
from knnper.datastore.policy import StreamState
from knnper.datastore.sqlite import (
    PAGE_BYTES,
    connect,
    connection_damaged,
    read_damaged_text,
    transaction,
    understood,
)

APPLICATION_ID = 0x6B4E4E50  # "kNNP"

FORMAT = 2

MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}
"""What brings the tables of format n to n + 1; run when a store is opened to write."""

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


@dataclass
class StoreRow:
    """The columns of the table ``store``, all of which its checksum covers."""

    store_id: str  # unlike any other store's
    created: float  # seconds since 1970 (UTC)
    spec: str  # JSON of `StoreSpec`
    settings: str  # JSON of `StoreSettings`
    active: int  # number of the version that is searched
    stream: str  # JSON of what the policy remembers
    previous: int | None = None  # number of the version that can be rolled back to
    num_removed: int = 0  # examples that ever left
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
        statement = insertion("store", f"one, {_COLUMNS}", replace=True)
        connection.execute(statement, (1, *vars(self).values(), self.checksum))

    @property
    def checksum(self) -> int:
        """Of all other columns."""
        return row_checksum(*vars(self).values())

    @property
    def num_offered(self) -> int:
        """The largest id that was given."""
        return int(json.loads(self.stream)["num_offered"])

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
        self.stream = encode_stream(stream)


_NAMES = [field.name for field in dataclasses.fields(StoreRow)]

_COLUMNS = ", ".join(_NAMES)


def encode_stream(stream: StreamState) -> str:
    """Return what a policy remembers as JSON."""
    document = {
        "num_offered": stream.num_offered,
        "num_seen": stream.num_seen.tolist(),
        "was_largest": stream.was_largest.tolist(),
    }
    return json.dumps(document)


def create(
    connection: sqlite3.Connection, row: StoreRow, fingerprint: str, embedding_dim: int
) -> None:
    """Make the tables of a store in an empty database, and its first version."""
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    for name, columns in _TABLES.items():
        connection.execute(_statement(name, columns))
    row.active = insert_version(connection, fingerprint, embedding_dim)
    row.write(connection)


def insertion(table: str, columns: str, *, replace: bool = False) -> str:
    """Return the statement that inserts these columns, and their checksum."""
    marks = ", ".join("?" * (1 + len(columns.split(","))))
    verb = "INSERT OR REPLACE" if replace else "INSERT"
    return f"{verb} INTO {table} ({columns}, checksum) VALUES ({marks})"


def migrate(path: Path) -> None:
    """Bring the tables of an older format to the one of today, where it is known how.

    All steps are one transaction; whoever calls holds the writer's lock.
    """
    # Opening it to write may already change a damaged one.
    with opened(path) as connection:
        steps = range(_pragma(connection, path, "user_version"), FORMAT)
    if not steps or any(one not in MIGRATIONS for one in steps):
        return  # `require_tables` says what is wrong.
    with (
        contextlib.closing(connect(path, writable=True)) as connection,
        transaction(connection, path, writing=True),
    ):
        for number in steps:
            MIGRATIONS[number](connection)
        connection.execute(f"PRAGMA user_version = {FORMAT}")


def _pragma(connection: sqlite3.Connection, path: Path, name: str) -> int:
    with understood(path):
        return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def require_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database whose tables are not those of a store."""
    found = _pragma(connection, path, "user_version")
    if _pragma(connection, path, "application_id") != APPLICATION_ID:
        raise connection_damaged(path, "it is a database, but not of a store")
    if 0 < found < FORMAT:
        how = (
            "open it once to write, as knnper store compact does"
            if all(one in MIGRATIONS for one in range(found, FORMAT))
            else "open it with the version of this software that wrote it, export it, "
            "and add it here"
        )
        raise StoreError(
            f"{path} is a store of format {found}, expected {FORMAT}; {how}"
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


def column_of(table: str) -> str:
    """Return the column of bytes of a table of inputs or embeddings."""
    return "input" if table == "inputs" else "vector"


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
        insertion("examples", EXAMPLE),
        ((*row, row_checksum(*row)) for row in rows),
    )


def insert_version(
    connection: sqlite3.Connection, fingerprint: str, embedding_dim: int
) -> int:
    """Note a version in the database, make its table, and return its number."""
    cursor = connection.execute(
        insertion("versions", "fingerprint, embedding_dim"),
        (fingerprint, embedding_dim, row_checksum(fingerprint, embedding_dim)),
    )
    number = int(cursor.lastrowid or 0)
    connection.execute(_statement(vectors_table(number), _VECTORS))
    return number


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
    # What is added and removed is added to it and subtracted from it, so it also tells
    # that an example is missing.
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
        insertion(table, f"id, {column_of(table)}", replace=True),
        _encoded(table, ids, labels, rows),
    )


def read(
    connection: sqlite3.Connection,
    table: str,
    ids: Ids,
    empty: NDArray[np.generic],
) -> NDArray[np.generic]:
    """Return the rows of ``ids`` (m,), each asked for once, in their order.

    Their type and shape are those of ``empty``, shape (0, ...).
    """
    found = np.empty((len(ids), *empty.shape[1:]), dtype=empty.dtype)
    order = np.argsort(ids)
    cursor = connection.execute(
        f"SELECT id, label, {column_of(table)}, {table}.checksum FROM {table} "
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


def damaged(connection: sqlite3.Connection, table: str) -> list[int]:
    """Return the ids whose bytes or label are not what was written."""
    cursor = connection.execute(
        f"SELECT id, label, {column_of(table)}, {table}.checksum FROM {table} "
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


ROWS_AT_ONCE = 256
"""Large rows that are in memory together."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection to read with, closed afterwards."""
    connection = connect(path, writable=False)
    read_damaged_text(connection)
    with contextlib.closing(connection), understood(path):
        yield connection


def blob_tables(connection: sqlite3.Connection) -> list[str]:
    """Return the tables of inputs and of embeddings."""
    rows = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' "
        "AND name GLOB 'embeddings_[0-9]*' ORDER BY name"
    )
    return ["inputs", *(name for (name,) in rows)]


def rows_of(
    connection: sqlite3.Connection, table: str, ids: Ids
) -> Iterator[tuple[int, bytes]]:
    """Yield those of ``ids`` (m,) that the table has, and their bytes."""
    cursor = connection.execute(
        f"SELECT id, {column_of(table)} FROM {table} "
        "WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id",
        (json.dumps(ids.tolist()),),
    )
    for example, content in cursor:
        yield example, _as_bytes(content)


def all_rows(
    connection: sqlite3.Connection, table: str
) -> Iterator[list[tuple[int, bytes]]]:
    """Yield ids and bytes of all rows, some at once."""
    cursor = connection.execute(
        f"SELECT id, {column_of(table)} FROM {table} ORDER BY id"
    )
    while rows := cursor.fetchmany(ROWS_AT_ONCE):
        yield [(example, _as_bytes(content)) for example, content in rows]


def _as_bytes(content: object) -> bytes:
    """Return what stands where bytes were written; damage may have changed the type."""
    return content if isinstance(content, bytes) else str(content).encode()


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

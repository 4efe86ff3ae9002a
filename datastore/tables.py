"""The tables of a store's database, and the checksums of their rows.

Ids and labels are in a table of their own, apart from the large columns, so that
reading them is cheap. The checksum of an input or embedding also covers the example's
id and label, so that a label cannot be exchanged unnoticed.
"""

import dataclasses
import json
import math
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.connection import PAGE_BYTES, database_damaged, translate_errors
from knnper.datastore.examples import (
    Contents,
    ExamplesMissingError,
    Ids,
    StoreDamagedError,
    StreamState,
)

APPLICATION_ID = 0x6B4E4E50  # "kNNP"
FORMAT = 2
# Large rows (inputs, embeddings) that are held in memory together.
ROWS_AT_ONCE = 256
# The columns of ``examples`` that the checksum of a row covers.
EXAMPLE_COLUMNS = "id, external_id, label, arrival"
# Reads the rows of ids, given as JSON: the number of values to bind is limited.
SELECT_EXAMPLES = (
    f"SELECT {EXAMPLE_COLUMNS}, checksum FROM examples "
    "WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id"
)
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
_EMBEDDINGS = """(
    id INTEGER PRIMARY KEY,
    vector BLOB NOT NULL,
    checksum INTEGER NOT NULL
)"""
# The table of the charges of private answers; the first private answer creates it.
CHARGES = "answer_charges"
CHARGES_COLUMNS = """(
    id INTEGER PRIMARY KEY,
    spent REAL NOT NULL,
    checksum INTEGER NOT NULL
)"""
# Entries of sqlite_master that SQLite adds by itself.
_MADE_BY_SQLITE = {
    "sqlite_sequence": "CREATE TABLE sqlite_sequence(name,seq)",
    "sqlite_autoindex_examples_1": None,
    "sqlite_autoindex_versions_1": None,
}
# Mixing of `digest`: 2^64 / golden ratio spreads a difference over all bits.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(31)
# Layout of a table's page, see "B-tree Pages" in SQLite's file format.
_CELL_BYTES = 24  # of a row beside its bytes: key, lengths, checksum, cell pointer
_USABLE_BYTES = PAGE_BYTES - 8  # without the header of the page
_LARGEST_CELL = PAGE_BYTES - 35  # a larger row continues on overflow pages


@dataclass(frozen=True)
class Version:
    """A set of embeddings of the examples, by one model."""

    number: int  # names its table; a larger number is younger
    fingerprint: str  # of the model
    embedding_dim: int  # p


@dataclass
class StoreRow:
    """The only row of the table ``store``; its checksum covers all columns."""

    store_id: str  # different for each store
    created: float  # seconds since 1970 (UTC)
    spec: str  # JSON of `StoreSpec`
    settings: str  # JSON of `StoreSettings`
    active: int = 0  # number of the version that is searched
    stream: str = ""  # JSON of the policy's `StreamState`
    previous: int | None = None  # number of the version that can be rolled back to
    num_removed: int = 0  # examples that ever left; grows whenever an id disappears
    erasing: int = 0  # 1 if bytes of deleted examples may still be in the files
    index_token: str = ""  # of the last save of the index
    num_examples: int = 0
    digest: int = 0  # see `digest`
    num_changes: int = 0  # transactions that ever changed the store

    @classmethod
    def read(cls, connection: sqlite3.Connection, path: Path) -> Self:
        """Read the row of the database in ``path``."""
        rows = connection.execute(f"SELECT {_COLUMNS}, checksum FROM store").fetchall()
        if len(rows) != 1 or cls(*rows[0][:-1]).checksum != rows[0][-1]:
            raise database_damaged(
                path,
                "the row of the store, with its classes and capacity, is not what was "
                "written",
            )
        return cls(*rows[0][:-1])

    def write(self, connection: sqlite3.Connection) -> None:
        """Replace the row."""
        statement = insert_statement("store", f"one, {_COLUMNS}")
        connection.execute(statement, (1, *vars(self).values(), self.checksum))

    @property
    def checksum(self) -> int:
        """Checksum of all other columns."""
        return row_checksum(*vars(self).values())

    @property
    def stream_state(self) -> StreamState:
        """The state of the eviction policy."""
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


_COLUMNS = ", ".join(column.name for column in dataclasses.fields(StoreRow))


def create_tables(
    connection: sqlite3.Connection, row: StoreRow, fingerprint: str, embedding_dim: int
) -> None:
    """Create the tables of a store in an empty database, and its first version."""
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    for name, columns in _TABLES.items():
        connection.execute(f"CREATE TABLE {name} {columns}")
    row.active = insert_version(connection, fingerprint, embedding_dim)
    row.write(connection)


def require_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Reject a database that does not have exactly the tables of a store."""
    with translate_errors(path):
        application_id = connection.execute("PRAGMA application_id").fetchone()[0]
        file_format = connection.execute("PRAGMA user_version").fetchone()[0]
    if application_id != APPLICATION_ID:
        raise database_damaged(path, "it is a database, but not of a store")
    if file_format != FORMAT:
        raise database_damaged(
            path,
            f"it has the format {file_format}, expected {FORMAT}, unless another "
            "version of this software wrote it",
        )
    statements = {
        name: f"CREATE TABLE {name} {columns}" for name, columns in _TABLES.items()
    }
    for (number,) in connection.execute("SELECT number FROM versions"):
        name = vectors_table(number)
        statements[name] = f"CREATE TABLE {name} {_EMBEDDINGS}"
    present = dict(connection.execute("SELECT name, sql FROM sqlite_master"))
    if CHARGES in present:
        statements[CHARGES] = f"CREATE TABLE {CHARGES} {CHARGES_COLUMNS}"
    wrong = {*present.items()} ^ {*statements.items(), *_MADE_BY_SQLITE.items()}
    if wrong:
        names = ", ".join(sorted({str(name) for name, _ in wrong}))
        raise database_damaged(path, f"tables and versions do not agree: {names}")


def insert_statement(table: str, columns: str, verb: str = "INSERT OR REPLACE") -> str:
    """Return the SQL that inserts these columns and the checksum."""
    marks = ", ".join("?" * (1 + len(columns.split(","))))
    return f"{verb} INTO {table} ({columns}, checksum) VALUES ({marks})"


def insert_version(
    connection: sqlite3.Connection, fingerprint: str, embedding_dim: int
) -> int:
    """Add a version and its empty table; return its number."""
    values = (fingerprint, embedding_dim)
    statement = insert_statement("versions", "fingerprint, embedding_dim", "INSERT")
    cursor = connection.execute(statement, (*values, row_checksum(*values)))
    number = int(cursor.lastrowid or 0)
    connection.execute(f"CREATE TABLE {vectors_table(number)} {_EMBEDDINGS}")
    return number


def vectors_table(version: int) -> str:
    """Return the name of the table of a version's embeddings."""
    return f"embeddings_{version:d}"


def blob_tables(connection: sqlite3.Connection) -> list[str]:
    """Return the names of the tables of inputs and of embeddings."""
    rows = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' "
        "AND name GLOB 'embeddings_[0-9]*' ORDER BY name"
    )
    return ["inputs", *(name for (name,) in rows)]


def _blob_column(table: str) -> str:
    return "input" if table == "inputs" else "vector"


def row_checksum(*values: object) -> int:
    """Return the CRC-32 of a row's values."""
    # Through `ascii`, so that a changed type (1 and "1") changes the checksum too.
    return zlib.crc32(ascii(values).encode())


def blob_checksum(
    table: str, example: int, label: int, content: bytes | memoryview
) -> int:
    """Return the CRC-32 of an input or embedding, its table, example and label."""
    place = zlib.crc32(struct.pack("<qq", example, label), zlib.crc32(table.encode()))
    return zlib.crc32(content, place)


def is_intact(table: str, row: tuple[int, object, object, object]) -> bool:
    """Return whether the checksum of a row (id, label, bytes, checksum) is right."""
    example, label, content, expected = row
    return (
        # Damage may have changed a type as well.
        isinstance(label, int)
        and isinstance(content, bytes)
        and blob_checksum(table, example, label, content) == expected
    )


def digest(contents: Contents) -> int:
    """Return a hash of ids, labels and times of arrival that adds up over examples.

    The store's row keeps the digest of all its examples: additions are added and
    deletions subtracted, so that a missing example is detected as well.
    """
    mixed = np.zeros(len(contents), np.uint64)
    for column in (contents.ids, contents.labels, contents.arrivals):
        mixed ^= column.view(np.uint64)
        mixed *= _MULTIPLIER
        mixed ^= mixed >> _SHIFT
    return as_signed(int(mixed.sum(dtype=np.uint64)))


def as_signed(number: int) -> int:
    """Return a number modulo 2^64 in [-2^63, 2^63), the range of SQLite's integers."""
    return (number + 2**63) % 2**64 - 2**63


def as_contents(rows: Iterable[tuple[int, int, float]]) -> Contents:
    """Convert rows (id, label, arrival), ascending by id, to arrays."""
    ids, labels, arrivals = list(zip(*rows, strict=True)) or [(), (), ()]
    return Contents(
        np.array(ids, dtype=np.int64),
        np.array(labels, dtype=np.int64),
        np.array(arrivals, dtype=np.float64),
    )


def ids_json(ids: Ids) -> str:
    """Encode ids as one JSON text, because the number of values to bind is limited."""
    return json.dumps(ids.tolist())


def damaged_examples(connection: sqlite3.Connection) -> list[object]:
    """Return the ids of the rows of ``examples`` with a wrong checksum."""
    rows = connection.execute(
        f"SELECT {EXAMPLE_COLUMNS}, checksum FROM examples ORDER BY id"
    )
    return [row[0] for row in rows if row_checksum(*row[:-1]) != row[-1]]


def intact_examples(
    rows: Iterable[tuple[int, str | None, int, float, int]],
) -> Iterator[tuple[int, int, float]]:
    """Yield id, label and arrival of the rows of ``examples`` with a right checksum."""
    for example, name, label, arrival, expected in rows:
        if row_checksum(example, name, label, arrival) == expected:
            yield example, label, arrival


def insert_blobs(
    connection: sqlite3.Connection,
    table: str,
    ids: Ids,
    labels: NDArray[np.int64],
    arrays: NDArray[np.generic],
) -> None:
    """Insert or replace inputs or embeddings ``arrays`` (m, ...) of ``ids`` (m,)."""
    if len(ids) == 0:
        return
    contents = np.ascontiguousarray(arrays).reshape(len(ids), -1).view(np.uint8)
    rows = zip(ids.tolist(), labels.tolist(), contents, strict=True)
    connection.executemany(
        insert_statement(table, f"id, {_blob_column(table)}"),
        (
            (example, content.data, blob_checksum(table, example, label, content.data))
            for example, label, content in rows
        ),
    )


def read_arrays(
    connection: sqlite3.Connection, table: str, ids: Ids, empty: NDArray[np.generic]
) -> NDArray[np.generic]:
    """Read the inputs or embeddings (m, ...) of distinct ``ids`` (m,), in their order.

    ``empty`` has their type and shape, (0, ...).
    """
    order = np.argsort(ids)
    rows = connection.execute(
        f"SELECT id, label, {_blob_column(table)}, {table}.checksum FROM {table} "
        "JOIN examples USING (id) WHERE id IN (SELECT value FROM json_each(?)) "
        "ORDER BY id",
        (ids_json(ids),),
    ).fetchall()
    present = [row[0] for row in rows]
    if present != ids[order].tolist():
        missing = sorted(set(ids.tolist()) - set(present))
        raise ExamplesMissingError(
            f"table {table} lacks examples {missing[:10]}; run `knnper store verify`"
        )
    num_bytes = empty.dtype.itemsize * math.prod(empty.shape[1:])
    for row in rows:
        if not is_intact(table, row) or len(row[2]) != num_bytes:
            raise StoreDamagedError(
                f"example {row[0]} in table {table} is not what was written; restore "
                "the folder from a backup, or delete the example: knnper store delete "
                f"FOLDER --id {row[0]}"
            )
    # Allocated only after the check of the sizes: a damaged row of the store may claim
    # embeddings of any size.
    arrays = np.empty((len(ids), *empty.shape[1:]), dtype=empty.dtype)
    for position, row in zip(order.tolist(), rows, strict=True):
        content = np.frombuffer(row[2], empty.dtype)
        arrays[position] = content.reshape(empty.shape[1:])
    return arrays


def read_blobs(
    connection: sqlite3.Connection, table: str
) -> Iterator[tuple[int, bytes]]:
    """Yield id and bytes of all rows of a table of inputs or embeddings, unchecked."""
    cursor = connection.execute(
        f"SELECT id, {_blob_column(table)} FROM {table} ORDER BY id"
    )
    for example, blob in cursor:
        # Damage may have changed the type.
        yield example, blob if isinstance(blob, bytes) else str(blob).encode()


def damaged_blobs(connection: sqlite3.Connection, table: str) -> list[int]:
    """Return the ids of a table of inputs or embeddings with a wrong checksum."""
    cursor = connection.execute(
        f"SELECT id, label, {_blob_column(table)}, {table}.checksum FROM {table} "
        "LEFT JOIN examples USING (id) ORDER BY id"
    )
    return [row[0] for row in cursor if not is_intact(table, row)]


def row_bytes(num_bytes: int) -> float:
    """Return the bytes on disk of a row of ``num_bytes``, unused space included."""
    size = num_bytes + _CELL_BYTES
    if size <= _LARGEST_CELL:
        return PAGE_BYTES / (_USABLE_BYTES // size)
    # "Cell payload overflow pages" in SQLite's file format.
    overflow = PAGE_BYTES - 4
    least = (PAGE_BYTES - 12) * 32 // 255 - 23
    local = least + (size - least) % overflow
    if local > _LARGEST_CELL:
        local = least
    per_page = _USABLE_BYTES // local
    return PAGE_BYTES / per_page + math.ceil((size - local) / overflow) * PAGE_BYTES

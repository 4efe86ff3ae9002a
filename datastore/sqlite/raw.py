"""The bytes in a store's database as they are, unchecked: for what checks them."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from datastore.contents import Ids
from datastore.sqlite.connection import connect, read_damaged_text, understood

ROWS_AT_ONCE = 256
"""Large rows that are in memory together."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection to read with, closed afterwards.

    Raises
    ------
    StoreError
        If the database cannot be read.
    """
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

"""Rows of numbers in a table of bytes, each with a checksum."""

import json
import sqlite3
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from datastore.contents import Ids
from datastore.errors import ExamplesMissingError, StoreDamagedError
from datastore.sqlite.checksums import content_checksum, is_intact


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

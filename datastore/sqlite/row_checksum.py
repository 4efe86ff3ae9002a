"""Checksums of rows of texts and numbers."""

import json
import sqlite3
import zlib
from collections.abc import Iterator


def row_checksum(*values: str | float | None) -> int:
    """Return the CRC-32 of a row's values."""
    # Damage may have changed a type as well.
    return zlib.crc32(json.dumps(values, default=str).encode())


def damaged_rows(
    connection: sqlite3.Connection, table: str, columns: str
) -> Iterator[object]:
    """Yield the first column of the rows whose ``columns`` are not what was written."""
    for *values, expected in connection.execute(
        f"SELECT {columns}, checksum FROM {table} ORDER BY 1"
    ):
        if row_checksum(*values) != expected:
            yield values[0]


def read_damaged_text(connection: sqlite3.Connection) -> None:
    """Let texts that are no UTF-8 any more be read, as other texts than they were."""
    connection.text_factory = lambda encoded: encoded.decode(errors="replace")

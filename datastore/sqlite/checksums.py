"""Checksums: of rows of texts and numbers, of bytes, and of all that is stored."""

import sqlite3
import struct
import zlib
from collections.abc import Iterator

import numpy as np

from datastore.contents import Contents

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
    """Return a sum over examples (n) that tells ids, labels and times of arrival.

    It is a 64-bit number, as SQLite has them. What is added and removed is added to it
    and subtracted from it, so it also tells that an example is missing.
    """
    mixed = np.zeros(len(contents), np.uint64)
    for column in (contents.ids, contents.labels, contents.arrivals):
        mixed ^= column.view(np.uint64)
        mixed *= _MULTIPLIER
        mixed ^= mixed >> _SHIFT
    return as_signed(int(mixed.sum(dtype=np.uint64)))


def as_signed(number: int) -> int:
    """Return a number modulo 2^64, from -2^63 on."""
    return (number + 2**63) % 2**64 - 2**63

"""How many bytes of the database a row takes."""

import math

from datastore.sqlite.connection import PAGE_BYTES

_CELL_BYTES = 24  # Of a row beside its bytes: key, lengths, checksum, its place.
_USABLE = PAGE_BYTES - 8  # Less the header of a page.
_LARGEST = PAGE_BYTES - 35  # A longer row overflows to pages of its own.


def row_bytes(num_bytes: int) -> float:
    """Return what a row of ``num_bytes`` takes, its share of unused space included.

    As SQLite lays out its tables: whole rows on a page; of a row that is longer, a
    part on the page and the rest on pages that hold nothing else.
    """
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

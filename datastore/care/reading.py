"""A store's rows, read without the index: for what looks at the files themselves."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from datastore.contents import Ids
from datastore.folder import DATABASE, Identity, read_identity
from datastore.sqlite.raw import ROWS_AT_ONCE
from datastore.sqlite.rows import SqliteRows


@contextlib.contextmanager
def open_rows(folder: Path) -> Iterator[tuple[Identity, SqliteRows]]:
    """Yield what the store in ``folder`` was made for, and its rows, to be read.

    Raises
    ------
    StoreError
        If there is no store, or it cannot be read.
    """
    identity = read_identity(folder)
    rows = SqliteRows(folder / DATABASE, identity.spec.input, writable=False)
    with contextlib.closing(rows):
        yield identity, rows


def in_parts(ids: Ids) -> Iterator[Ids]:
    """Yield ``ids`` (n,) in parts of `ROWS_AT_ONCE`."""
    for start in range(0, len(ids), ROWS_AT_ONCE):
        yield ids[start : start + ROWS_AT_ONCE]

"""Connections to a store's database, and what their errors mean."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from datastore.errors import (
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
)

PAGE_BYTES = 16384
"""Examples take some kilobytes: larger pages than SQLite's 4096 hold several of them,
and a batch is written almost twice as fast."""

WAIT_S = 10.0
"""How long a statement waits for another process to end its transaction."""


def connect(path: Path, *, writable: bool) -> sqlite3.Connection:
    """Return a connection in which transactions are begun and ended by `transaction`.

    A commit is on disk when it returns (``synchronous = FULL``), and what is deleted is
    overwritten with zeros (``secure_delete``).

    Raises
    ------
    StoreDamagedError
        If the file is no SQLite database.
    """
    mode = "rwc" if writable else "ro"
    with understood(path):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=WAIT_S,
            isolation_level=None,
            # Whoever uses it from several threads takes a lock first.
            check_same_thread=False,
        )
        if writable:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")
            # `Checkpoints` says when, so that no commit pays for it by surprise.
            connection.execute("PRAGMA wal_autocheckpoint = 0")
    return connection


@contextlib.contextmanager
def transaction(
    connection: sqlite3.Connection, path: Path, *, writing: bool
) -> Iterator[None]:
    """Run the block as one transaction: all of it is done, or nothing.

    Raises
    ------
    StoreError
        If the database cannot be written or read; see `understood`.
    """
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
        name = getattr(error, "sqlite_errorname", "")
        if name == "SQLITE_FULL" or name.startswith("SQLITE_IOERR"):
            raise StoreFullError(
                f"{path.parent} cannot be written ({error}): the disk is full, a quota "
                "is reached or the disk fails. What was stored before is unharmed; "
                "make room and try again"
            ) from error
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise StoreBusyError(
                f"another process has used {path} for more than {WAIT_S:g} seconds; "
                "try again when it is done"
            ) from error
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            raise StoreDamagedError(
                f"{path} is not what was written ({error}); restore the folder from a "
                "backup, or create the store anew"
            ) from error
        if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")):
            raise StoreError(
                f"{path} cannot be opened ({error}); expected permission to read it "
                f"and to write in {path.parent}, which reading the log needs too"
            ) from error
        raise

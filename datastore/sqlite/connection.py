"""Connections to a store's database, and what their errors mean."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from datastore.errors import (
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    to_restore,
)

PAGE_BYTES = 16384
"""Examples take some kilobytes: larger pages than SQLite's 4096 hold several of them,
and a batch is written almost twice as fast."""

_READ_FAILURES = tuple(
    f"SQLITE_IOERR_{one}" for one in ("READ", "SHORT_READ", "CORRUPTFS", "DATA")
)

_CLOSED = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")

WAIT_S = 10.0
"""How long a statement waits for another process to end its transaction."""


def log_of(path: Path) -> Path:
    """Return where the log of the database in ``path`` is, if there is one."""
    return path.with_name(f"{path.name}-wal")


class Connection(sqlite3.Connection):
    """To a store's database.

    Attributes
    ----------
    seen
        What the files were when it was opened, if they cannot be written here: what
        others change is not seen then. Else None.
    """

    seen: tuple[object, ...] | None = None

    def is_outdated(self, path: Path) -> bool:
        """Return whether another connection would see something else."""
        return self.seen is not None and self.seen != _seen(path)


def connect(path: Path, *, writable: bool) -> Connection:
    """Return a connection in which transactions are begun and ended by `transaction`.

    A commit is on disk when it returns (``synchronous = FULL``), and what is deleted is
    overwritten with zeros (``secure_delete``).

    Raises
    ------
    StoreDamagedError
        If the file is no SQLite database.
    StoreError
        If it cannot be opened.
    """
    with understood(path):
        if not writable:
            return _reader(path)
        connection = _connection(path, "mode=rwc")
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
        # `Log` says when, so that no commit pays for it by surprise.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
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
        raise damaged(path, "it is empty")
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


def _connection(path: Path, options: str) -> Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}",
        uri=True,
        timeout=WAIT_S,
        isolation_level=None,
        # Whoever uses it from several threads takes a lock first.
        check_same_thread=False,
        factory=Connection,
    )


def is_unlogged(path: Path) -> bool:
    """Return whether nothing is in the log of the database in ``path``."""
    try:
        return log_of(path).stat().st_size == 0
    except FileNotFoundError:
        return True


def read_damaged_text(connection: sqlite3.Connection) -> None:
    """Let texts that are no UTF-8 any more be read, as other texts than they were."""
    connection.text_factory = lambda encoded: encoded.decode(errors="replace")


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
        raise _meaning(error, path) from error
    except UnicodeDecodeError as error:
        # SQLite's message quotes what is damaged.
        raise damaged(path, f"the database is damaged ({error})") from error


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
    return damaged(path, f"the database is damaged ({error})")


def _is_at_fault(path: Path, name: str) -> bool:
    """Return whether the files of a database keep it from being opened, or written."""
    beside = (path.with_name(path.name + end) for end in ("", "-wal", "-shm"))
    if any(one.exists() and not one.is_file() for one in beside):
        return True
    is_writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return name.startswith("SQLITE_READONLY") and is_writable


def _name_of(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", "")


def damaged(path: Path, found: str) -> StoreDamagedError:
    """Return the error of a store whose database in ``path`` is not what was written.

    Parameters
    ----------
    path
        Of the database.
    found
        What is wrong.
    """
    error = StoreDamagedError(
        f"{path} is not what was written: {found}. Nothing was changed; "
        f"{to_restore(path.parent)}"
    )
    error.found = found
    return error

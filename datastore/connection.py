"""Connections to the SQLite database of a store: transactions, errors, the log.

The database of a store is in WAL mode: a commit appends changed pages to the
write-ahead log beside it (``-wal``), and a checkpoint copies them into the database.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from knnper.datastore.examples import (
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    to_restore,
)

# An example takes a few kilobytes. Pages larger than SQLite's default of 4096 bytes
# hold several examples, and a batch is written almost twice as fast.
PAGE_BYTES = 16384
# Seconds that a statement waits for another process to end its transaction.
WAIT_S = 10.0
# Size to which a transaction cuts a rollback journal at its end.
JOURNAL_BYTES = 2**20
# Size of the write-ahead log from which it is copied into the database. Copying costs
# as much as writing; a longer log copies pages less often, and is read more slowly.
LOG_BYTES = 64 * 2**20
# SQLite's names of I/O errors of a read, which a full disk cannot cause.
_READ_FAILURES = tuple(
    f"SQLITE_IOERR_{suffix}" for suffix in ("READ", "SHORT_READ", "CORRUPTFS", "DATA")
)
# SQLite's names of errors of a file that cannot be opened or written.
_NOT_OPENED = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")


class Connection(sqlite3.Connection):
    """A connection to the database of a store."""

    # The files when an immutable connection was opened; None for other connections.
    file_state: tuple[object, ...] | None = None

    def is_outdated(self, path: Path) -> bool:
        """Return whether the files changed after an immutable connection was opened."""
        return self.file_state is not None and self.file_state != _file_state(path)


def connect(path: Path, *, writable: bool) -> Connection:
    """Open a connection; `transaction` runs its transactions."""
    with translate_errors(path):
        if not writable:
            return _connect_reader(path)
        connection = _connect(path, "mode=rwc")
        # A commit is on disk when it returns (synchronous = FULL), and deleted bytes
        # are overwritten with zeros (secure_delete). `WriteAheadLog` decides when to
        # checkpoint (wal_autocheckpoint = 0), so that no commit is unexpectedly slow.
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "secure_delete = ON",
            "wal_autocheckpoint = 0",
        ):
            connection.execute(f"PRAGMA {pragma}")
    return connection


def connect_without_log(path: Path, page_bytes: int) -> Connection:
    """Open a database with a rollback journal, as on network file systems.

    A write-ahead log needs memory shared by all processes, so it works on one machine
    only. ``page_bytes`` is the page size of a new database.
    """
    with contextlib.ExitStack() as stack, translate_errors(path):
        connection = _connect(path, "mode=rwc")
        stack.callback(connection.close)
        # A persistent journal makes a commit cheap: no file is created or deleted. A
        # commit is on disk when it returns also with NORMAL. FULL would sync once
        # more, which the checksums in the journal make unnecessary.
        for pragma in (
            f"page_size = {page_bytes}",
            "journal_mode = PERSIST",
            "synchronous = NORMAL",
            "secure_delete = OFF",
            f"journal_size_limit = {JOURNAL_BYTES}",
        ):
            connection.execute(f"PRAGMA {pragma}")
        stack.pop_all()
    return connection


def connect_memory() -> Connection:
    """Open an empty database in memory, which ends with the connection."""
    return _connect(None)


def _connect(path: Path | None, options: str = "") -> Connection:
    connection = sqlite3.connect(
        ":memory:" if path is None else f"{path.absolute().as_uri()}?{options}",
        uri=path is not None,
        timeout=WAIT_S,
        isolation_level=None,
        # Callers with several threads hold a lock around each use.
        check_same_thread=False,
        factory=Connection,
    )
    if path is None or options == "mode=rwc":
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    return connection


def _connect_reader(path: Path) -> Connection:
    if path.exists() and path.stat().st_size == 0:
        # SQLite would remove the log, from which much may be saved.
        raise database_damaged(path, "it is empty")
    connection = _connect(path, "mode=ro")
    try:
        # SQLite opens the files only with the first statement.
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        connection.close()
        if not _error_name(error).startswith(_NOT_OPENED) or os.access(
            path.parent, os.W_OK
        ):
            raise
        # To read with a log, SQLite creates a file in the folder, which is read-only.
        # With an empty log the database can be opened as immutable instead.
        if log_bytes(path) > 0:
            raise StoreError(
                f"{log_path(path)} holds changes that are not in the database yet, and "
                f"can be read only where {path.parent} can be written; copy the whole "
                "folder to such a place"
            ) from error
        file_state = _file_state(path)
        connection = _connect(path, "mode=ro&immutable=1")
        connection.file_state = file_state
    return connection


def _file_state(path: Path) -> tuple[object, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, log_bytes(path) == 0


@contextlib.contextmanager
def open_reader(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection for reading, and close it after the block."""
    with contextlib.closing(connect(path, writable=False)) as connection:
        decode_damaged_text(connection)
        with translate_errors(path):
            yield connection


def decode_damaged_text(connection: sqlite3.Connection) -> None:
    """Decode texts that are no valid UTF-8 with replacement characters."""
    connection.text_factory = lambda encoded: encoded.decode(errors="replace")


@contextlib.contextmanager
def transaction(
    connection: sqlite3.Connection, path: Path, *, writing: bool
) -> Iterator[None]:
    """Run the block as one transaction, which is rolled back if the block fails."""
    with translate_errors(path):
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
def translate_errors(path: Path) -> Iterator[None]:
    """Translate SQLite's errors in the block to a `StoreError` with a fix."""
    try:
        yield
    except sqlite3.ProgrammingError as error:
        raise StoreError(f"the store in {path.parent} was closed; open it") from error
    except sqlite3.Error as error:
        raise _translated(error, path) from error
    except UnicodeDecodeError as error:
        # SQLite's message quotes the damaged text.
        raise database_damaged(path, f"the database is damaged ({error})") from error


def _translated(error: sqlite3.Error, path: Path) -> StoreError:
    name = _error_name(error)
    is_disk_error = name.startswith(("SQLITE_FULL", "SQLITE_IOERR"))
    if is_disk_error and name not in _READ_FAILURES:
        return StoreFullError(
            f"{path.parent} cannot be written ({error}): the disk is full, a quota is "
            "reached or the disk fails. The stored examples are unharmed; make room "
            "and try again"
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")):
        return StoreBusyError(
            f"another process has used {path} for more than {WAIT_S:g} seconds; try "
            "again when it is done"
        )
    if name.startswith(_NOT_OPENED) and not _is_damage(path, name):
        return StoreError(
            f"{path} cannot be opened ({error}); expected permission to read it and to "
            f"write in {path.parent}, which reading the log needs too, and no limit on "
            "open files that is reached"
        )
    # The statements are correct, so any other error comes from the file.
    return database_damaged(path, f"the database is damaged ({error})")


def _is_damage(path: Path, error_name: str) -> bool:
    """Return whether a database is damaged, rather than forbidden to this user."""
    files = (path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm"))
    if any(file.exists() and not file.is_file() for file in files):
        return True  # something other than a file stands in its place
    # Where this user may write, it is the header: SQLite opens a database with an
    # unknown format version as read-only.
    is_writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return error_name.startswith("SQLITE_READONLY") and is_writable


def _error_name(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", "")


def database_damaged(path: Path, problem: str) -> StoreDamagedError:
    """Create the error of a store with a damaged database."""
    error = StoreDamagedError(
        f"{path} is not what was written: {problem}. Nothing was changed; "
        f"{to_restore(path.parent)}"
    )
    error.problem = problem
    return error


def log_path(path: Path) -> Path:
    """Return the path of the write-ahead log of the database in ``path``."""
    return path.with_name(f"{path.name}-wal")


def log_bytes(path: Path) -> int:
    """Return the size of the log of the database in ``path``; 0 if it has none."""
    try:
        return log_path(path).stat().st_size
    except FileNotFoundError:
        return 0


class WriteAheadLog:
    """Decides when the write-ahead log is copied into the database, or emptied."""

    def __init__(self, connection: Connection, path: Path) -> None:
        self.connection = connection
        self._path = path
        # SQLite cuts the file to this size when it starts the log over.
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")

    def checkpoint_if_long(self) -> None:
        """Copy a long log into the database, as far as no reader prevents it."""
        if log_bytes(self._path) > LOG_BYTES:
            # The transactions are safe in the log, where a full disk may keep them.
            with contextlib.suppress(sqlite3.Error):
                self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def empty(self) -> None:
        """Copy the log into the database and cut it to zero bytes."""
        deadline = time.monotonic() + WAIT_S
        while self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            if time.monotonic() > deadline:
                raise StoreBusyError(
                    f"another process reads an older state of {self._path.parent}; end "
                    "that process"
                )

    def try_to_empty(self) -> None:
        """Empty the log unless another process reads it now."""
        with contextlib.suppress(sqlite3.Error, OSError):
            self.connection.execute("PRAGMA busy_timeout = 0")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.connection.execute(f"PRAGMA busy_timeout = {1000 * WAIT_S:.0f}")

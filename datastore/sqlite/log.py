"""The write-ahead log of a store's database."""

import contextlib
import sqlite3
import time
from pathlib import Path

from datastore.errors import StoreBusyError
from datastore.sqlite.connection import PAGE_BYTES, WAIT_S, log_of
from datastore.sqlite.log_file import cut

LOG_BYTES = 64 * 2**20
"""How much is written to the log before it is copied into the database. Copying costs
as much as writing; a longer log copies pages less often, and is read slower."""


class Log:
    """Copied into the database now and then, and emptied where that must be.

    Parameters
    ----------
    connection
        The writer's.
    path
        Of the database.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._num_bytes = 0
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")

    def note(self, num_rows: int, num_bytes: int) -> None:
        """Count what a transaction writes, of large rows with so many bytes in all."""
        self._num_bytes += num_bytes + 4 * PAGE_BYTES + 64 * num_rows

    def shorten(self) -> None:
        """Copy the log into the database if much was written; wait for nobody.

        What readers still need of it stays, and is copied another time.
        """
        if self._num_bytes > LOG_BYTES:
            self._num_bytes = 0
            # The transactions are safe in the log; a full disk may keep them there.
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def empty(self) -> None:
        """Copy the log into the database and cut it to nothing.

        Raises
        ------
        StoreBusyError
            If a reader does not let go of an older state for so long.
        """
        deadline = time.monotonic() + WAIT_S
        while self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            if time.monotonic() > deadline:
                raise StoreBusyError(
                    f"another process reads an older state of {self._path.parent}; end "
                    "that process"
                )
        self._num_bytes = 0

    def try_to_empty(self) -> None:
        """Empty the log, or at least leave what is read of it, without waiting.

        What several crashes leave behind each other would look like damage.
        """
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA busy_timeout = 0")
            kept, num_frames, _ = self._connection.execute(
                "PRAGMA wal_checkpoint(TRUNCATE)"
            ).fetchone()
            if kept and num_frames > 0:
                cut(log_of(self._path), num_frames)
        self._connection.execute(f"PRAGMA busy_timeout = {1000 * WAIT_S:.0f}")

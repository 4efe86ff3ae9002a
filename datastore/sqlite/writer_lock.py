"""One writer at a time."""

import fcntl
import os
import time
from pathlib import Path

from datastore.errors import StoreBusyError, StoreError

ATTEMPTS, PAUSE_S = 3, 0.02
"""How often, and after which pause, a lock that is taken is tried again."""


class WriterLock:
    """Held by the one process that writes; it goes with the process, however that ends.

    A process that is forked meanwhile shares it.

    Parameters
    ----------
    path
        A file that is used for nothing else; it holds the writer's process id.

    Raises
    ------
    StoreBusyError
        If another process, or this one by another store object, holds it.
    StoreError
        If the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise StoreError(
                f"{path.parent} cannot be written ({error}); open the store to read, "
                "or give this user the right to write there"
            ) from error
        if not self._taken():
            self._file.seek(0)
            holder = self._file.read().decode(errors="replace") or "unknown"
            self._file.close()
            raise StoreBusyError(
                f"process {holder} writes to {path.parent}; a store has one writer and "
                "any number of readers. Stop that process, or open the store to read"
            )
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())
        self._file.flush()

    def release(self) -> None:
        """Let others write, also where a forked process has the file open."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    def _taken(self) -> bool:
        """Take the lock; whoever only looks (`lock_holder`) has it for an instant."""
        for attempt in range(ATTEMPTS):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(PAUSE_S if attempt < ATTEMPTS - 1 else 0)
            else:
                return True
        return False


def lock_holder(path: Path) -> str | None:
    """Return the process id of who holds the lock in ``path``; None if nobody does."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return file.read().decode(errors="replace") or "unknown"
    return None

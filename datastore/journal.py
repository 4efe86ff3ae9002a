"""Files beside a store's database: the record of acknowledged changes, and the lock.

SQLite cannot distinguish a damaged log from one that a crash cut short: in both cases
it drops the first incomplete transaction and all later ones without an error. A store
therefore records its number of acknowledged changes after each transaction; a database
with fewer changes is damaged.

The record is not synced to disk at once, because a second fsync would double the cost
of a transaction. If the process is killed, the operating system still writes the
record. After a power cut an older record may be left, which never causes a false alarm.
"""

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from knnper.datastore.examples import StoreBusyError, StoreDamagedError, StoreError
from knnper.datastore.tables import StoreRow, row_checksum
from knnper.files import FileLock, LockHeldError, open_plain

_LOG = logging.getLogger(__name__)
ACKNOWLEDGED = "acknowledged.json"
# The size of the file: the same bytes are overwritten, within one sector of a disk.
_NUM_BYTES = 256
# The writer may be overwriting the file at the moment of reading.
_ATTEMPTS, _PAUSE_S = 5, 0.005


@dataclass(frozen=True)
class Acknowledged:
    """The number of changes that a store has acknowledged, and its size then."""

    store_id: str
    num_changes: int
    num_examples: int
    num_offered: int

    @classmethod
    def of(cls, row: StoreRow) -> Self:
        """Create the acknowledgement of the state in ``row``."""
        num_offered = row.stream_state.num_offered
        return cls(row.store_id, row.num_changes, row.num_examples, num_offered)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the acknowledgement of the store in ``folder``."""
        path = folder / ACKNOWLEDGED
        for _ in range(_ATTEMPTS if path.is_file() else 0):
            try:
                with open_plain(path) as file:
                    content = file.read(_NUM_BYTES + 1)
                document = json.loads(content)
                del document["checksum"]
                acknowledged = cls(**document)
                # A file without its end may still be valid JSON.
                if acknowledged.encoded() == content:
                    return acknowledged
            except OSError as error:
                reason = error.strerror or error
                raise StoreError(f"{path} cannot be read: {reason}") from error
            except (ValueError, LookupError, TypeError, AttributeError):
                pass
            time.sleep(_PAUSE_S)
        raise StoreDamagedError(
            f"{path} is missing or damaged, so the database may be incomplete. Copy "
            "the whole folder from where the store was, or copy what can be read: "
            f"knnper store rewrite {folder} --to NEW_FOLDER"
        )

    def encoded(self) -> bytes:
        """Encode the file's content."""
        document = dict(vars(self))
        document["checksum"] = row_checksum(*document.values())
        return json.dumps(document).encode().ljust(_NUM_BYTES - 1) + b"\n"


class AcknowledgedFile:
    """The file of acknowledged changes, open for the one process that writes."""

    def __init__(self, folder: Path) -> None:
        self._file = open_plain(folder / ACKNOWLEDGED, "r+b")

    def write(self, row: StoreRow) -> None:
        """Record a state that is on disk."""
        try:
            os.pwrite(self._file.fileno(), Acknowledged.of(row).encoded(), 0)
        except OSError as error:
            # The change itself is safe; an older number only detects less damage.
            _LOG.warning("%s is not written: %s", ACKNOWLEDGED, error)

    def close(self) -> None:
        """Sync the file to disk and close it."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def writer_lock(path: Path) -> FileLock:
    """Take the lock of the one process that writes to a store."""
    try:
        return FileLock(path)
    except LockHeldError as error:
        raise StoreBusyError(
            f"process {error} writes to {path.parent}; a store has one writer and any "
            "number of readers. Stop that process, or open the store to read"
        ) from error
    except OSError as error:
        raise StoreError(
            f"{path.parent} cannot be written ({error}); open the store to read, or "
            "give this user the right to write there"
        ) from error

"""A witness of what was acknowledged, outside the database and its log.

SQLite takes a damaged log for one that a crash has cut short: it ignores the damaged
transaction and all that follow, without a word. A number that is written after each
transaction tells the two apart. It need not be on disk at once, which would cost each
transaction a second fsync: a killed process leaves it in the system's memory, and a
power cut at worst an older number, which raises no false alarm.
"""

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from datastore.errors import StoreDamagedError, StoreError
from datastore.sqlite.checksums import row_checksum
from datastore.sqlite.store_row import StoreRow
from knnper.durable_files import write_atomically

_LOG = logging.getLogger(__name__)

ACKNOWLEDGED = "acknowledged.json"
NUM_BYTES = 256
"""Of the file: always the same ones are overwritten, within one sector of a disk."""

ATTEMPTS, PAUSE_S = 5, 0.005
"""How often the file is read again: it may be overwritten at this moment."""


@dataclass(frozen=True)
class Acknowledged:
    """What the file says.

    Attributes
    ----------
    store_id, num_changes, num_examples
        See `StoreRow`.
    num_offered
        The largest id that was given.
    """

    store_id: str
    num_changes: int
    num_examples: int
    num_offered: int

    @classmethod
    def of(cls, row: StoreRow) -> Self:
        """Return what acknowledges the state that ``row`` says."""
        return cls(row.store_id, row.num_changes, row.num_examples, row.num_offered)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return what the store in ``folder`` has acknowledged.

        It must be read before the database: a process that writes may go on meanwhile.

        Raises
        ------
        StoreDamagedError
            If the file is missing or damaged.
        StoreError
            If it cannot be read.
        """
        path = folder / ACKNOWLEDGED
        for _ in range(ATTEMPTS if path.is_file() else 0):
            try:
                with path.open("rb") as file:
                    found = json.loads(file.read(NUM_BYTES))
                expected = found.pop("checksum")
                if expected == row_checksum(*found.values()):
                    return cls(**found)
            except OSError as error:
                raise StoreError(f"{path} cannot be read: {error.strerror}") from error
            except (ValueError, LookupError, TypeError, AttributeError):
                pass
            time.sleep(PAUSE_S)
        raise StoreDamagedError(
            f"{path} is missing or not what was written, so it cannot be told whether "
            "the database is complete; expected the file that was beside it. Copy the "
            "whole folder from where the store was, or save what is here: knnper store "
            f"salvage {folder} NEW_FOLDER"
        )

    def encoded(self) -> bytes:
        """Return the content of the file."""
        document = dict(vars(self))
        document["checksum"] = row_checksum(*document.values())
        return json.dumps(document).encode().ljust(NUM_BYTES - 1) + b"\n"


def create_acknowledged(folder: Path, row: StoreRow) -> None:
    """Make the file of a new store."""
    write_atomically(folder / ACKNOWLEDGED, Acknowledged.of(row).encoded())


class AcknowledgedFile:
    """The file, open for the one process that writes.

    Parameters
    ----------
    folder
        Of the store.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / ACKNOWLEDGED, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, row: StoreRow) -> None:
        """Note a state that is on disk."""
        try:
            os.pwrite(self._descriptor, Acknowledged.of(row).encoded(), 0)
        except OSError as error:
            # The change itself is done; an older number only says less.
            _LOG.warning("%s is not written: %s", ACKNOWLEDGED, error)

    def close(self) -> None:
        """Bring it to disk, and close it."""
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

"""What is intact of a damaged store, saved as a new one."""

import contextlib
import os
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datastore.contents import Contents
from datastore.core.rows import Change, Version
from datastore.errors import StoreBusyError, StoreDamagedError
from datastore.folder import (
    DATABASE,
    LOCK,
    Identity,
    create_store,
    identity_of,
    new_folder,
    open_rows,
    require_database,
)
from datastore.policy.base import StreamState
from datastore.sqlite.acknowledged import Acknowledged
from datastore.sqlite.checksums import is_intact, row_checksum
from datastore.sqlite.connection import PAGE_BYTES, log_of
from datastore.sqlite.log_file import frames
from datastore.sqlite.raw import ROWS_AT_ONCE, opened
from datastore.sqlite.rows import SqliteRows
from datastore.sqlite.schema import (
    APPLICATION_ID,
    FORMAT,
    require_tables,
    vectors_table,
)
from datastore.sqlite.store_row import StoreRow
from datastore.sqlite.writer_lock import lock_holder


@dataclass(frozen=True)
class Salvage:
    """What can be saved, or was.

    Attributes
    ----------
    num_saved
        Examples that are intact: input, embedding, label, name and time of arrival.
    lost
        Ids of those of which something is left, but not all.
    num_missing
        Acknowledged examples of which nothing is left.
    num_changes_missing
        Acknowledged changes of which nothing is left. What they evicted may be back.
    """

    num_saved: int
    lost: tuple[int, ...]
    num_missing: int
    num_changes_missing: int


def salvage(folder: Path, target: Path) -> Salvage:
    """Save what is intact of the store in ``folder`` as a new store in ``target``.

    The damaged store is only read. What lies in the log behind a damaged place, where
    SQLite does not read it, counts too. Ids, names and times of arrival stay; of the
    embeddings, those that are searched are saved. What `Store.delete` deleted does not
    come back.

    Parameters
    ----------
    folder
        Of the damaged store, which this process must not have open: to copy a database
        gives up the locks that the process holds on it.
    target
        Must not exist, or be empty.

    Raises
    ------
    StoreDamagedError
        If not even the tables, the settings and the model can be read.
    StoreBusyError
        If a process writes to the store.
    StoreError
        If there is no store, or ``target`` holds something.
    """
    with new_folder(target) as draft, _remains(folder, target.parent) as remains:
        spec, version = remains.identity.spec, remains.version
        settings = remains.identity.settings
        create_store(
            draft, spec, version.embedding_dim, version.fingerprint, settings
        ).close()
        with open_rows(draft, writable=True) as (_, rows):
            new_version = rows.head().active.number
            for change in remains.changes():
                rows.apply(replace(change, version=new_version))
    return remains.report()


def what_is_intact(folder: Path) -> Salvage:
    """Return what `salvage` would save; for that it makes a copy in ``TMPDIR``.

    Raises
    ------
    StoreError
        As `salvage`.
    """
    with _remains(folder, None) as remains:
        for _ in remains.changes():
            pass
    return remains.report()


@contextlib.contextmanager
def _remains(folder: Path, scratch: Path | None) -> Iterator["_Remains"]:
    """Yield what is left, as read from a copy somewhere in the folder ``scratch``."""
    require_database(folder)
    if lock_holder(folder / LOCK) is not None:
        raise StoreBusyError(f"a process writes to {folder}; stop it first")
    acknowledged = None
    with contextlib.suppress(StoreDamagedError):
        acknowledged = Acknowledged.read(folder)
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".salvage-") as name:
        image = Path(name) / DATABASE
        found = _composed(folder, image)
        with opened(image) as connection:
            yield _Remains(connection, *found, acknowledged)


def _composed(folder: Path, image: Path) -> tuple[Identity, StoreRow, Version]:
    """Write the database with all that its log holds to ``image``; return what it is.

    Where a damaged page is one of the few that nothing can be read without, an older
    one takes its place.
    """
    log = log_of(folder / DATABASE)
    first_damaged = 1 + max(
        (one.number for one in frames(log) if one.is_sound), default=0
    )
    for left_out in (0, first_damaged):
        _compose(folder, image, left_out)
        try:
            with opened(image) as connection:
                require_tables(connection, image)
                row = StoreRow.read(connection)
            identity = identity_of(row)
            rows = SqliteRows(image, identity.spec.input, writable=False)
            with contextlib.closing(rows):
                return identity, row, rows.head().active
        except StoreDamagedError as error:
            reason = error
    raise StoreDamagedError(
        f"nothing of {folder} can be saved, for its tables, settings or model are "
        "damaged; restore the folder from a backup, or create the store anew"
    ) from reason


def _compose(folder: Path, image: Path, left_out: int) -> None:
    shutil.copyfile(folder / DATABASE, image)
    log = log_of(folder / DATABASE)
    last = max((one.number for one in frames(log) if one.num_pages), default=0)
    # No more pages than that: the number of a page may be damaged.
    most = image.stat().st_size // PAGE_BYTES + last
    with image.open("r+b") as file:
        for frame in frames(log):
            is_whole = frame.number <= last and frame.number != left_out
            if is_whole and 0 < frame.page <= most:
                file.seek((frame.page - 1) * PAGE_BYTES)
                file.write(frame.content)
        num_pages = -(-file.seek(0, os.SEEK_END) // PAGE_BYTES)
        file.truncate(num_pages * PAGE_BYTES)
        file.seek(0)
        file.write(_header(num_pages))


def _header(num_pages: int) -> bytes:
    """Return the first bytes of a store's database that has no log.

    https://www.sqlite.org/fileformat2.html#the_database_header
    """
    begin = struct.pack(
        ">16sH6B", b"SQLite format 3\0", PAGE_BYTES, 1, 1, 0, 64, 32, 32
    )
    counters = struct.pack(">7I", 1, num_pages, 0, 0, 1, 4, 0)
    marks = struct.pack(">5I", 0, 1, FORMAT, 0, APPLICATION_ID)
    return begin + counters + marks + bytes(20) + struct.pack(">2I", 1, 3040000)


class _Example(NamedTuple):
    id: int
    external_id: str | None
    label: int
    arrival: float
    vector: bytes
    input: bytes = b""


class _Remains:
    """What is left of a store; whether it is intact, the checksum of each row says."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        identity: Identity,
        row: StoreRow,
        version: Version,
        acknowledged: Acknowledged | None,
    ) -> None:
        self.identity, self.version = identity, version
        self._connection, self._row = connection, row
        self._expected = acknowledged or Acknowledged.of(row)
        self._num_saved, self._lost = 0, list[int]()
        self._names = set[str]()

    def changes(self) -> Iterator[Change]:
        """Yield additions of what is intact, each of some examples."""
        state = self._row.stream_state
        # No id is given again.
        last = max(state.num_offered, self._expected.num_offered)
        stream = replace(state, num_offered=last)
        for first in range(1, last + 1, ROWS_AT_ONCE):
            found = list(self._intact(first, first + ROWS_AT_ONCE - 1))
            self._num_saved += len(found)
            if found:
                yield self._addition(found, stream)

    def report(self) -> Salvage:
        """Return what was found."""
        expected, num_found = self._expected, self._num_saved + len(self._lost)
        return Salvage(
            self._num_saved,
            tuple(self._lost),
            max(0, expected.num_examples - num_found),
            max(0, expected.num_changes - self._row.num_changes),
        )

    def _intact(self, first: int, last: int) -> Iterator[_Example]:
        """Yield which of some ids are intact, and note the others that are there."""
        vectors, inputs = vectors_table(self.version.number), "inputs"
        sizes = {vectors: 4 * self.version.embedding_dim}
        if self.identity.spec.input is not None:
            sizes[inputs] = self.identity.spec.input_bytes
        small = self._read("external_id, label, arrival", "examples", first, last)
        large = {
            vectors: self._read("vector", vectors, first, last),
            inputs: self._read("input", inputs, first, last),
        }
        for one in sorted(small.keys() | large[vectors].keys() | large[inputs].keys()):
            name, label, arrival, expected = small.get(one, (None, None, None, None))
            contents = {table: large[table].get(one, (b"", None)) for table in sizes}
            if (
                row_checksum(one, name, label, arrival) == expected
                and name not in self._names
                and all(
                    is_intact(table, (one, label, content, found))
                    and len(content) == sizes[table]
                    for table, (content, found) in contents.items()
                )
            ):
                self._names |= {name} - {None}
                content = [content for content, _ in contents.values()]
                yield _Example(one, name, label, arrival, *content)
            else:
                self._lost.append(one)

    def _read(
        self, columns: str, table: str, first: int, last: int
    ) -> dict[int, tuple[Any, ...]]:
        """Return the rows of some ids, by id, that are on pages that can be read."""
        try:
            rows = self._connection.execute(
                f"SELECT id, {columns}, checksum FROM {table} WHERE id BETWEEN ? AND ?",
                (first, last),
            ).fetchall()
        except sqlite3.Error:
            if first == last:
                return {}
            middle = (first + last) // 2
            return {
                **self._read(columns, table, first, middle),
                **self._read(columns, table, middle + 1, last),
            }
        return {row[0]: row[1:] for row in rows if first <= row[0] <= last}

    def _addition(self, found: Sequence[_Example], stream: StreamState) -> Change:
        layout, dim = self.identity.spec.input, self.version.embedding_dim
        vectors = b"".join(one.vector for one in found)
        inputs = None
        if layout is not None:
            content = np.frombuffer(b"".join(one.input for one in found), layout.dtype)
            inputs = content.reshape(-1, *layout.shape)
        return Change(
            stream=stream,
            added=Contents(
                np.array([one.id for one in found], np.int64),
                np.array([one.label for one in found], np.int64),
                np.array([one.arrival for one in found], np.float64),
            ),
            embeddings=np.frombuffer(vectors, np.float32).reshape(-1, dim),
            inputs=inputs,
            external_ids=[one.external_id for one in found],
        )

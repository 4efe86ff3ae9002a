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
from datastore.examples import InputLayout
from datastore.folder import (
    DATABASE,
    LOCK,
    create_store,
    identity_of,
    new_folder,
    open_rows,
    require_database,
)
from datastore.policy.base import StreamState
from datastore.sqlite.acknowledged import Acknowledged
from datastore.sqlite.checksums import is_intact, row_checksum
from datastore.sqlite.connection import PAGE_BYTES, log_of, read_damaged_text
from datastore.sqlite.log_file import frames
from datastore.sqlite.raw import ROWS_AT_ONCE
from datastore.sqlite.schema import vectors_table
from datastore.sqlite.store_row import StoreRow
from datastore.sqlite.writer_lock import lock_holder

_LEAF = b"\r"
"""The first byte of a page of rows: https://www.sqlite.org/fileformat2.html."""

_NUM_PAGES_AT = 28
"""Where the first page has the number of pages, big-endian."""

_MOST_COLUMNS = 15
"""Of a table: that is ``store``."""


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
        If not even the settings and the model can be read.
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
        found, row = _found(folder, image)
        with contextlib.closing(sqlite3.connect(image)) as connection:
            yield _Remains(connection, found, row, acknowledged)


def _found(folder: Path, image: Path) -> tuple["_Found", StoreRow]:
    """Copy a database with all that its log holds to ``image``; return what is there.

    Where a damaged page is one of the few that nothing can be read without, an older
    one takes its place.
    """
    log = log_of(folder / DATABASE)
    sound = [frame.number for frame in frames(log) if frame.is_sound]
    for left_out in (0, max(sound, default=0) + 1):
        _compose(folder, image, left_out)
        with contextlib.closing(sqlite3.connect(image)) as connection:
            read_damaged_text(connection)
            found = _Found()
            for table in _leaves(image, connection):
                found.take(table, connection)
        if found.row is not None and found.row.active in found.versions:
            return found, found.row
    raise StoreDamagedError(
        f"nothing of {folder} can be saved, for what it says of its settings or of its "
        "model is damaged; restore the folder from a backup, or create the store anew"
    )


def _compose(folder: Path, image: Path, left_out: int) -> None:
    """Write the pages as the log has them, but those of frame ``left_out``.

    The first page, which says where the tables are, becomes that of an empty database.
    """
    image.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(image)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("VACUUM")
    first_page = bytearray(image.read_bytes())
    shutil.copyfile(folder / DATABASE, image)
    log = log_of(folder / DATABASE)
    last = max((frame.number for frame in frames(log) if frame.num_pages), default=0)
    # No more pages than that: the number of a page may be damaged.
    most = image.stat().st_size // PAGE_BYTES + last
    with image.open("r+b") as file:
        for frame in frames(log):
            is_wanted = frame.number <= last and frame.number != left_out
            if is_wanted and 0 < frame.page <= most:
                file.seek((frame.page - 1) * PAGE_BYTES)
                file.write(frame.content)
        num_pages = -(-file.seek(0, os.SEEK_END) // PAGE_BYTES)
        file.truncate(num_pages * PAGE_BYTES)
        struct.pack_into(">I", first_page, _NUM_PAGES_AT, num_pages)
        file.seek(0)
        file.write(first_page)


def _leaves(image: Path, connection: sqlite3.Connection) -> list[str]:
    """Make each page of rows in ``image`` a table; return their names.

    So the pages that lead to them need not be sound. Of which table a row was, its
    checksum tells.
    """
    with image.open("rb") as file:
        kinds = list(iter(lambda: file.read(PAGE_BYTES)[:1], b""))
    leaves = [number for number, kind in enumerate(kinds, 1) if kind == _LEAF]
    columns = ", ".join(f"c{number}" for number in range(1, _MOST_COLUMNS))
    with connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.executemany(
            "INSERT INTO sqlite_master VALUES ('table', ?1, ?1, ?2, "
            f"'CREATE TABLE ' || ?1 || ' (id INTEGER PRIMARY KEY, {columns})')",
            ((f"page_{number}", number) for number in leaves),
        )
    connection.execute("PRAGMA writable_schema = RESET")
    return [f"page_{number}" for number in leaves]


def _rows(connection: sqlite3.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    """Yield what can be read: from both ends, where something is damaged in between."""
    for order in ("ORDER BY id", "ORDER BY id DESC"):
        with contextlib.suppress(sqlite3.Error):
            yield from connection.execute(f"{query} {order}")
            return


class _Example(NamedTuple):
    id: int
    external_id: str | None
    label: int
    arrival: float


class _Intact(NamedTuple):
    example: _Example
    vector: bytes
    input: bytes = b""


class _Found:
    """What the pages of rows hold, but for the bytes of inputs and embeddings.

    Attributes
    ----------
    row
        Of the store, the newest that is intact; None without.
    versions, examples
        Those that are intact, by number and id.
    pages
        Tables, each of one page, that have bytes of an example, by its id.
    """

    def __init__(self) -> None:
        self.row: StoreRow | None = None
        self.versions = dict[int, Version]()
        self.examples = dict[int, _Example]()
        self.pages = dict[int, list[str]]()

    def take(self, page: str, connection: sqlite3.Connection) -> None:
        """Note the rows of one page."""
        query = f"SELECT id FROM {page} WHERE typeof(c1) = 'blob'"
        for (number,) in _rows(connection, query):
            self.pages.setdefault(number, []).append(page)
        query = f"SELECT * FROM {page} WHERE typeof(c1) != 'blob'"
        for number, *values in _rows(connection, query):
            while values and values[-1] is None:
                values.pop()
            if values:
                self._take_row(number, values[:-1], values[-1])

    def _take_row(self, number: int, values: list[Any], checksum: object) -> None:
        """Note a row of a table, which the number of its columns tells."""
        if len(values) == _MOST_COLUMNS - 2:
            store_id, created, *others = values
            row = StoreRow(store_id, _as_float(created), *others)
            is_newer = self.row is None or row.num_changes > self.row.num_changes
            if row.checksum == checksum and is_newer:
                self.row = row
        elif len(values) == 3:
            name, label, arrival = values
            example = _Example(number, name, label, _as_float(arrival))
            if row_checksum(*example) == checksum:
                self.examples[number] = example
        elif len(values) == 2 and row_checksum(*values) == checksum:
            self.versions[number] = Version(number, *values)


def _as_float(number: Any) -> Any:
    """Return a number of a column of floats, of which SQLite keeps whole ones so."""
    return float(number) if isinstance(number, int) else number


class _Remains:
    """The examples that are left; whether they are intact, their checksums say."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        found: _Found,
        row: StoreRow,
        acknowledged: Acknowledged | None,
    ) -> None:
        self.identity, self.version = identity_of(row), found.versions[row.active]
        self._connection, self._found, self._row = connection, found, row
        self._expected = acknowledged or Acknowledged.of(row)
        self._num_saved, self._lost = 0, list[int]()
        self._names = set[str | None]()

    def changes(self) -> Iterator[Change]:
        """Yield additions of what is intact, each of some examples."""
        state = self._row.stream_state
        # No id is given again.
        last = max(state.num_offered, self._expected.num_offered)
        stream = replace(state, num_offered=last)
        ids = sorted(self._found.examples.keys() | self._found.pages.keys())
        for first in range(0, len(ids), ROWS_AT_ONCE):
            intact = list(self._intact(ids[first : first + ROWS_AT_ONCE]))
            self._num_saved += len(intact)
            if intact:
                layout = self.identity.spec.input
                yield _addition(intact, self.version.embedding_dim, layout, stream)

    def report(self) -> Salvage:
        """Return what was found."""
        expected, num_found = self._expected, self._num_saved + len(self._lost)
        return Salvage(
            self._num_saved,
            tuple(self._lost),
            max(0, expected.num_examples - num_found),
            max(0, expected.num_changes - self._row.num_changes),
        )

    def _intact(self, ids: Sequence[int]) -> Iterator[_Intact]:
        """Yield the intact ones of some examples, and note the others."""
        sizes = {vectors_table(self.version.number): 4 * self.version.embedding_dim}
        if self.identity.spec.input is not None:
            sizes["inputs"] = self.identity.spec.input_bytes
        for number in ids:
            example = self._found.examples.get(number)
            contents = list[bytes]()
            if example is not None and example.external_id not in self._names:
                rows = self._bytes_of(number)
                for table, size in sizes.items():
                    contents += [
                        content
                        for content, checksum in rows
                        if is_intact(table, (number, example.label, content, checksum))
                        and len(content) == size
                    ][:1]
            if example is not None and len(contents) == len(sizes):
                self._names |= {example.external_id} - {None}
                yield _Intact(example, *contents)
            else:
                self._lost.append(number)

    def _bytes_of(self, number: int) -> list[tuple[Any, Any]]:
        rows = list[tuple[Any, Any]]()
        for page in self._found.pages.get(number, ()):
            with contextlib.suppress(sqlite3.Error):
                query = f"SELECT c1, c2 FROM {page} WHERE id = ?"
                rows += self._connection.execute(query, (number,))
        return rows


def _addition(
    intact: Sequence[_Intact],
    dim: int,
    layout: InputLayout | None,
    stream: StreamState,
) -> Change:
    """Return the change of a new store that adds examples under the ids they had."""
    examples = [one.example for one in intact]
    vectors = np.frombuffer(b"".join(one.vector for one in intact), np.float32)
    inputs = None
    if layout is not None:
        content = np.frombuffer(b"".join(one.input for one in intact), layout.dtype)
        inputs = content.reshape(-1, *layout.shape)
    return Change(
        stream=stream,
        added=Contents(
            np.array([one.id for one in examples], np.int64),
            np.array([one.label for one in examples], np.int64),
            np.array([one.arrival for one in examples], np.float64),
        ),
        embeddings=vectors.reshape(-1, dim),
        inputs=inputs,
        external_ids=[one.external_id for one in examples],
    )

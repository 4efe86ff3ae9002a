"""The rows of a store, in a database on disk or in memory: its truth.

Beside a database on disk lies a witness of what was acknowledged. SQLite takes a
damaged log for one that a crash has cut short: it ignores the damaged transaction and
all that follow, without a word. A number that is written after each transaction tells
the two apart. It need not be on disk at once, which would cost each transaction a
second fsync: a killed process leaves it in the system's memory, and a power cut at
worst an older number, which raises no false alarm.
"""

import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from knnper.datastore import schema
from knnper.datastore.examples import (
    Contents,
    Ids,
    InputLayout,
    Selection,
    StoreDamagedError,
    StoreError,
    StoreMismatchError,
    named,
    no_contents,
    to_delete,
)
from knnper.datastore.index import Vectors
from knnper.datastore.policy import StreamState
from knnper.datastore.schema import (
    EXAMPLE,
    StoreRow,
    as_signed,
    damaged_rows,
    digest,
    insert_examples,
    insert_version,
    row_checksum,
    vectors_table,
)
from knnper.datastore.sqlite import (
    PAGE_BYTES,
    Connection,
    Log,
    connect,
    connect_to_memory,
    connection_damaged,
    transaction,
    understood,
)
from knnper.files import write_atomically


@dataclass(frozen=True)
class Version:
    """One model's embeddings of the examples."""

    number: int  # names them; larger is younger
    fingerprint: str  # of the model
    embedding_dim: int  # p


@dataclass(frozen=True)
class Head:
    """What a store is at one moment, in a few words."""

    active: Version  # that is searched
    previous: int | None  # number of the version that can be rolled back to
    num_removed: int  # examples that ever left; grows whenever an id disappears
    stream: StreamState  # what the policy remembers


@dataclass(frozen=True)
class Change:
    """What one transaction does: it happens as a whole or not at all."""

    stream: StreamState  # what the policy remembers afterwards
    added: Contents = field(default_factory=no_contents)  # under new ids
    embeddings: Vectors | None = None  # theirs, shape (n, p), of ``version``
    inputs: NDArray[np.generic] | None = None  # theirs, shape (n, ...)
    external_ids: Sequence[str | None] = ()
    # Ids that leave, from all versions.
    removed: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    version: int | None = None  # must be the active one
    # Whether `Rows.erase_removed` will be called: if that is cut short, it is made up
    # for when the store is opened next.
    must_erase: bool = False


_LOG = logging.getLogger(__name__)

ACKNOWLEDGED = "acknowledged.json"

NUM_BYTES = 256
"""Of the file: always the same ones are overwritten, within one sector of a disk."""

ATTEMPTS, PAUSE_S = 5, 0.005
"""How often the file is read again: it may be overwritten at this moment."""


@dataclass(frozen=True)
class Acknowledged:
    """What the file says."""

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
        """Return what the store in ``folder`` has acknowledged."""
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
    """The file, open for the one process that writes."""

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


_EXAMPLES = (
    f"SELECT {EXAMPLE}, checksum FROM examples "
    "WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id"
)


class Rows:
    """Keeps the examples. What a method has done is done for good when it returns."""

    def __init__(
        self,
        reader: Connection,
        writer: Connection | None,
        path: Path,
        layout: InputLayout | None,
    ) -> None:
        self._path, self._layout = path, layout
        self._reader, self._writer = reader, writer
        self._reading = threading.RLock()
        self._writing = self._reading if reader is writer else threading.RLock()
        self._log = None if writer is None else Log(writer, path)
        self._held = None if writer is None else StoreRow.read(writer, path)
        self._witness: AcknowledgedFile | None = None
        self._known_versions = dict[int, Version]()
        self._data_version = -1
        self.has_changed()

    @classmethod
    def on_disk(cls, path: Path, layout: InputLayout | None, *, writable: bool) -> Self:
        """Return the rows in ``path``; a writer holds the lock for that."""
        writer = connect(path, writable=True) if writable else None
        rows = cls(connect(path, writable=False), writer, path, layout)
        if writable:
            rows._witness = AcknowledgedFile(path.parent)
        return rows

    @classmethod
    def in_memory(
        cls, row: StoreRow, first: Version, layout: InputLayout | None
    ) -> Self:
        """Return no rows, gone with the process: no file, the same behaviour."""
        connection, path = connect_to_memory(), Path("memory")
        with transaction(connection, path, writing=True):
            schema.create(connection, row, first.fingerprint, first.embedding_dim)
        return cls(connection, connection, path, layout)

    def head(self) -> Head:
        """Return what the store is."""
        row = self._row()
        version = self._version(row.active)
        return Head(version, row.previous, row.num_removed, row.stream_state)

    def has_changed(self) -> bool:
        """See `Rows`; a writer knows what it changed."""
        if self._writer is not None:
            return False
        with self._reading:
            if self._reader.is_outdated(self._path):
                self._reader.close()
                self._reader = connect(self._path, writable=False)
                self._data_version = -1
        before = self._data_version
        self._data_version = self._fetch("PRAGMA data_version")[0][0]
        return before != self._data_version

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read in the block what was there at one moment; blocks may be nested."""
        with self._reading:
            if self._reader.in_transaction:
                yield
                return
            with transaction(self._reader, self._path, writing=False):
                yield

    def contents(self, after: int = 0) -> Contents:
        """Return the examples whose ids are larger than ``after``."""
        with self.reading():
            rows = self._fetch(
                "SELECT id, label, arrival FROM examples WHERE id > ? ORDER BY id",
                after,
            )
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                contents = as_contents(rows)
                row = StoreRow.read(self._reader, self._path)
                expected = row.num_examples, row.digest
                if after > 0 or (len(contents), digest(contents)) == expected:
                    return contents
            raise self._damage()

    def vectors(self, ids: Ids, version: int) -> Vectors:
        """Return the embeddings (m, p) of ``ids`` (m,), all of which are there."""
        dim = self._version(version).embedding_dim
        return self._read(vectors_table(version), ids, np.empty((0, dim), np.float32))

    def inputs(self, ids: Ids) -> NDArray[np.generic]:
        """Return the raw inputs (m, ...) of ``ids`` (m,), all of which are there."""
        assert self._layout is not None, "the store asks only where inputs are kept"
        empty = np.empty((0, *self._layout.shape), self._layout.dtype)
        return self._read("inputs", ids, empty)

    def external_ids(self, ids: Ids) -> list[str | None]:
        """Return the owner's names of ``ids``; None for one that is not there."""
        rows = self._fetch(_EXAMPLES, _listed(ids))
        if len(list(_sound(rows))) < len(rows):
            raise self._damage()
        names = {row[0]: row[1] for row in rows}
        return [names.get(one) for one in ids.tolist()]

    def select(self, selection: Selection) -> Ids:
        """Return the ids that the selection describes, ascending."""
        condition, values = _where(selection)
        rows = self._fetch(
            f"SELECT id FROM examples WHERE {condition} ORDER BY id",
            *values,
        )
        return np.array([row[0] for row in rows], dtype=np.int64)

    def apply(self, change: Change) -> None:
        """See `Rows`; what is removed may be damaged."""
        with self.writing() as (connection, row):
            if len(change.removed):
                self._remove(connection, row, change.removed)
            if len(change.added):
                self._insert(connection, change, row.active)
                row.digest = as_signed(row.digest + digest(change.added))
                row.num_examples += len(change.added)
            row.num_removed += len(change.removed)
            row.stream_state = change.stream
            row.erasing = max(row.erasing, int(change.must_erase))

    def labels_as_found(self, ids: Ids) -> list[object]:
        """Return the labels of those of ``ids`` that are there, damaged or not."""
        return [row[2] for row in self._fetch(_EXAMPLES, _listed(ids))]

    def compact(self) -> None:
        """Give unused space back."""
        with self._writing, understood(self._path):
            self._connection().execute("VACUUM")
            self._written().empty()

    def erase_removed(self) -> None:
        """See `Rows`."""
        with self._writing:
            self.compact()
            with self.writing() as (_, row):
                row.erasing = 0

    def is_erasing(self) -> bool:
        """Return whether something was removed that may have left a trace."""
        return bool(self._row().erasing)

    def index_token(self) -> str:
        """Return the token of the last save of the index; empty without one."""
        return self._row().index_token

    def set_index_token(self, token: str) -> None:
        """Note a save of the index."""
        with self.writing() as (_, row):
            row.index_token = token

    def num_bytes(self) -> int:
        """Return the bytes of the database, free ones included, less its log."""
        return int(self._fetch("PRAGMA page_count")[0][0]) * PAGE_BYTES

    def versions(self) -> list[Version]:
        """Return all versions, oldest first."""
        rows = self._fetch(
            "SELECT number, fingerprint, embedding_dim, checksum FROM versions "
            "ORDER BY number"
        )
        for _, *values, expected in rows:
            if row_checksum(*values) != expected:
                found = f"the model is not what was written: {values[0]}"
                raise connection_damaged(self._path, found)
        return [Version(*row[:3]) for row in rows]

    def add_version(self, fingerprint: str, embedding_dim: int) -> Version:
        """Return a new version that holds nothing yet."""
        with self.writing() as (connection, _):
            number = insert_version(connection, fingerprint, embedding_dim)
        return Version(number, fingerprint, embedding_dim)

    def without_vector(self, version: int, after: int, limit: int) -> Ids:
        """Return up to ``limit`` ids above ``after`` that lack an embedding."""
        rows = self._fetch(
            f"SELECT id FROM examples LEFT JOIN {vectors_table(version)} AS held "
            "USING (id) WHERE id > ? AND held.vector IS NULL ORDER BY id LIMIT ?",
            after,
            limit,
        )
        return np.array([row[0] for row in rows], dtype=np.int64)

    def add_vectors(self, version: int, ids: Ids, vectors: Vectors) -> None:
        """Add embeddings (m, p) to a version; ids that have left are passed over."""
        with self.writing() as (connection, _):
            rows = connection.execute(_EXAMPLES, (_listed(ids),))
            label_of = {row[0]: row[2] for row in rows}
            present = np.array([one in label_of for one in ids.tolist()], dtype=bool)
            labels = np.array(
                [label_of[one] for one in ids[present].tolist()], np.int64
            )
            table = vectors_table(version)
            schema.insert(connection, table, ids[present], labels, vectors[present])
            self._written().note(len(ids), vectors.nbytes)

    def activate(self, version: int) -> None:
        """Search ``version`` from now on; keep the one before, drop all others."""
        with self.writing() as (connection, row):
            row.previous, row.active = row.active, version
            others = connection.execute(
                "SELECT number FROM versions WHERE number NOT IN (?, ?)",
                (row.active, row.previous),
            ).fetchall()
            for (number,) in others:
                connection.execute(f"DROP TABLE {vectors_table(number)}")
                connection.execute("DELETE FROM versions WHERE number = ?", (number,))

    def configure(self, settings: str) -> None:
        """Replace the settings, given as JSON."""
        with self.writing() as (_, row):
            row.settings = settings

    def settle(self) -> None:
        """Finish what a writer that was killed has left in the log, for good."""
        with self._writing:
            self._written().try_to_empty()
            self._acknowledge(self._row())

    def close(self) -> None:
        """Give back whatever is held."""
        with self._reading:
            if self._reader is not self._writer:
                self._reader.close()
        if self._writer is not None:
            with self._writing:
                # A reader may keep the log; the next writer will copy it.
                self._written().try_to_empty()
                self._writer.close()
                if self._witness is not None:
                    self._witness.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[sqlite3.Connection, StoreRow]]:
        """Run a block as one transaction; the store's row is written with it."""
        with self._writing:
            connection = self._connection()
            with transaction(connection, self._path, writing=True):
                row = replace(self._row())
                # Unknown, should the block be cut short at its end.
                self._held = None
                yield connection, row
                row.num_changes += 1
                row.write(connection)
            self._held = row
            self._acknowledge(row)
            self._written().shorten()

    def _acknowledge(self, row: StoreRow) -> None:
        if self._witness is not None:
            self._witness.write(row)

    def _connection(self) -> sqlite3.Connection:
        assert self._writer is not None, "only a Store writes, and it has a writer"
        return self._writer

    def _written(self) -> Log:
        assert self._log is not None, "only a Store writes, and it has a log"
        return self._log

    def _remove(self, connection: sqlite3.Connection, row: StoreRow, ids: Ids) -> None:
        versions = connection.execute("SELECT number FROM versions").fetchall()
        self._written().note(len(ids), len(ids) * PAGE_BYTES)
        gone = connection.execute(_EXAMPLES, (_listed(ids),)).fetchall()
        tables = ["examples", "inputs", *(vectors_table(one) for (one,) in versions)]
        for table in tables:
            connection.executemany(
                f"DELETE FROM {table} WHERE id = ?",
                ((one,) for one in ids.tolist()),
            )
        sound = list(_sound(gone))
        row.num_examples -= len(gone)
        if len(sound) == len(gone):
            row.digest = as_signed(row.digest - digest(as_contents(sound)))
        else:
            # What was damaged counted as what it had been. Others still do.
            rest = connection.execute(f"SELECT {EXAMPLE}, checksum FROM examples")
            row.digest = digest(as_contents(_sound(rest)))

    def _insert(
        self, connection: sqlite3.Connection, change: Change, active: int
    ) -> None:
        added = change.added
        insert_examples(connection, added, change.external_ids)
        assert change.embeddings is not None, "an example comes with its embedding"
        if change.version != active:
            raise StoreMismatchError(
                "the store was embedded by another model meanwhile; embed these "
                "examples by that one, and add them again"
            )
        num_bytes = change.embeddings.nbytes
        num_bytes += 0 if change.inputs is None else change.inputs.nbytes
        self._written().note(len(added), num_bytes)
        table = vectors_table(active)
        schema.insert(connection, table, added.ids, added.labels, change.embeddings)
        if change.inputs is not None:
            schema.insert(connection, "inputs", added.ids, added.labels, change.inputs)

    def _row(self) -> StoreRow:
        """Return the store's row; a writer knows it, for nobody else changes it."""
        if self._held is not None:
            return self._held
        with self._reading, understood(self._path):
            return StoreRow.read(self._reader, self._path)

    def _version(self, number: int) -> Version:
        if number not in self._known_versions:
            self._known_versions = {one.number: one for one in self.versions()}
        if number not in self._known_versions:
            raise connection_damaged(self._path, f"there is no model {number}")
        return self._known_versions[number]

    def _damage(self) -> StoreDamagedError:
        """Return the error of examples that are not what was written."""
        with self._reading, understood(self._path):
            wrong = list(damaged_rows(self._reader, "examples", EXAMPLE))
        if not wrong:
            return connection_damaged(
                self._path, "examples are missing, or older than they were"
            )
        return StoreDamagedError(
            f"{self._path}: external id, label or time of arrival of {len(wrong)} "
            f"examples is not what was written: {named(wrong)}; "
            f"{to_delete(self._path.parent, wrong)}"
        )

    def _fetch(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._reading, understood(self._path):
            return self._reader.execute(statement, values).fetchall()

    def _read(self, table: str, ids: Ids, empty: NDArray[np.generic]) -> NDArray:  # type: ignore[type-arg]
        with self._reading, understood(self._path):
            return schema.read(self._reader, table, ids, empty)


def as_contents(rows: Iterable[tuple[int, int, float]]) -> Contents:
    """Return rows of id, label and time of arrival, ascending, as arrays."""
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    return Contents(
        np.array(columns[0], dtype=np.int64),
        np.array(columns[1], dtype=np.int64),
        np.array(columns[2], dtype=np.float64),
    )


def _listed(ids: Ids) -> str:
    """Return ids as one text, because the number of values to bind is bounded."""
    return json.dumps(ids.tolist())


def _sound(
    rows: Iterable[tuple[int, str | None, int, float, int]],
) -> Iterator[tuple[int, int, float]]:
    """Yield id, label and arrival of the rows of ``examples`` that are as written."""
    for one, name, label, arrival, expected in rows:
        if row_checksum(one, name, label, arrival) == expected:
            yield one, label, arrival


def _where(selection: Selection) -> tuple[str, list[object]]:
    """Return the condition on the table of examples, and what to bind to it."""
    conditions, values = ["1"], list[object]()
    # NumPy's integers are no JSON.
    lists: dict[str, list[int] | list[str] | None] = {
        "id": _integers(selection.ids),
        "external_id": None
        if selection.external_ids is None
        else list(selection.external_ids),
        "label": _integers(selection.labels),
    }
    for column, allowed in lists.items():
        if allowed is not None:
            # One text, because the number of values that can be bound is bounded.
            conditions.append(f"{column} IN (SELECT value FROM json_each(?))")
            values.append(json.dumps(allowed))
    if selection.arrived_from is not None:
        conditions.append("arrival >= ?")
        values.append(selection.arrived_from)
    if selection.arrived_before is not None:
        conditions.append("arrival < ?")
        values.append(selection.arrived_before)
    return " AND ".join(conditions), values


def _integers(numbers: Iterable[int] | None) -> list[int] | None:
    return None if numbers is None else [int(one) for one in numbers]

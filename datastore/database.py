"""The database of a store: `Rows` reads and changes it, on disk or in memory.

The database is the truth; the index is a cache of it.
"""

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.charges import has_charges, read_charges, write_charges
from knnper.datastore.connection import (
    PAGE_BYTES,
    Connection,
    WriteAheadLog,
    connect,
    connect_memory,
    database_damaged,
    transaction,
    translate_errors,
)
from knnper.datastore.examples import (
    Contents,
    Ids,
    InputLayout,
    Selection,
    StoreDamagedError,
    StoreError,
    StoreMismatchError,
    StreamState,
    named,
    no_contents,
    to_delete,
)
from knnper.datastore.index import Vectors
from knnper.datastore.tables import (
    CHARGES,
    EXAMPLE_COLUMNS,
    SELECT_EXAMPLES,
    StoreRow,
    Version,
    as_contents,
    as_signed,
    create_tables,
    damaged_examples,
    digest,
    ids_json,
    insert_blobs,
    insert_statement,
    insert_version,
    intact_examples,
    read_arrays,
    row_checksum,
    vectors_table,
)

# In place of a path, in the messages of a database in memory.
_MEMORY = Path("memory")


@dataclass(frozen=True)
class StoreState:
    """The versions, removals and policy state of a store at one moment."""

    active: Version  # that is searched
    previous: int | None  # number of the version that can be rolled back to
    num_removed: int  # examples that ever left; grows whenever an id disappears
    stream: StreamState  # of the eviction policy


@dataclass(frozen=True)
class Change:
    """The additions and removals of one transaction."""

    stream: StreamState  # of the eviction policy afterwards
    added: Contents = field(default_factory=no_contents)  # under new ids
    embeddings: Vectors | None = None  # of ``added`` by ``version``, shape (n, p)
    inputs: NDArray[np.generic] | None = None  # of ``added``, shape (n, ...)
    external_ids: Sequence[str | None] = ()
    # ids to remove, with their embeddings of all versions
    removed: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    version: int | None = None  # must be the active one
    # Whether `Rows.erase_removed` follows. If the process is killed before it, the
    # next opening of the store does it.
    must_erase: bool = False


class Rows:
    """The rows of a store's database. A change is on disk when its method returns."""

    def __init__(
        self,
        path: Path,
        layout: InputLayout | None,
        reader: Connection,
        writer: Connection | None,
        on_change: Callable[[StoreRow], None] = lambda _: None,  # after each commit
    ) -> None:
        self._path = path
        self._layout = layout
        self._on_change = on_change
        self._connection = reader
        # SQLite's connections to a file, and the writer's lock, do not survive a fork.
        self._process = None if reader is writer else os.getpid()
        self._reading = threading.RLock()
        self._writing = self._reading if reader is writer else threading.RLock()
        # Held while the index is searched or follows a commit, see `writing`. A
        # database in memory has one connection, so there a search waits for the whole
        # transaction.
        self.searching = self._reading if reader is writer else threading.RLock()
        self._log = None if writer is None else WriteAheadLog(writer, path)
        self._current_row = None if writer is None else StoreRow.read(writer, path)
        self._known_versions = dict[int, Version]()
        self._data_version = -1
        self.has_changed()

    @classmethod
    def in_memory(
        cls,
        row: StoreRow,
        layout: InputLayout | None,
        fingerprint: str,
        embedding_dim: int,
    ) -> Self:
        """Create an empty database in memory, with the behaviour of one on disk."""
        connection = connect_memory()
        with transaction(connection, _MEMORY, writing=True):
            create_tables(connection, row, fingerprint, embedding_dim)
        return cls(_MEMORY, layout, connection, connection)

    @classmethod
    def restored(cls, content: bytes, layout: InputLayout | None) -> Self:
        """Create a database in memory from the bytes of `serialized`."""
        connection = connect_memory()
        with translate_errors(_MEMORY):
            connection.deserialize(content)
        return cls(_MEMORY, layout, connection, connection)

    def serialized(self) -> bytes:
        """Return the database as the content of its file."""
        with self._reading, contextlib.closing(connect_memory()) as copied:
            self._reader.backup(copied)
            content = bytearray(copied.serialize())
        # "File format version numbers" in SQLite's file format: no log belongs to it.
        content[18:20] = b"\1\1"
        return bytes(content)

    def state(self) -> StoreState:
        """Return the current state of the store."""
        row = self.row()
        version = self._version(row.active)
        return StoreState(version, row.previous, row.num_removed, row.stream_state)

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that opened the files."""
        return self._process not in (None, os.getpid())

    @property
    def _reader(self) -> Connection:
        self._require_own_process()
        return self._connection

    def _require_own_process(self) -> None:
        if self.is_inherited:
            raise StoreError(
                f"process {self._process} opened the store in {self._path.parent}, and "
                f"this is process {os.getpid()}, which was forked from it; expected "
                "the process that opened it. Open the store in this one, after the "
                "other has closed it"
            )

    def has_changed(self) -> bool:
        """Return whether another process changed the store since the last call."""
        self._require_own_process()
        if self._log is not None:
            return False
        with self._reading:
            self._reconnect_if_outdated()
            before = self._data_version
            try:
                cursor = self._connection.execute("PRAGMA data_version")
                (self._data_version,) = cursor.fetchone()
            except sqlite3.Error:
                # Entering the translation of errors takes as long as the statement.
                with translate_errors(self._path):
                    raise
            return before != self._data_version

    def _reconnect_if_outdated(self) -> None:
        """Open the files again if they changed under an immutable connection."""
        reader = self._connection
        if not reader.in_transaction and reader.is_outdated(self._path):
            reader.close()
            self._connection = connect(self._path, writable=False)
            self._data_version = -1

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read from one snapshot in the block; blocks may be nested."""
        with self._reading:
            if self._reader.in_transaction:
                yield
                return
            self._reconnect_if_outdated()
            with transaction(self._reader, self._path, writing=False):
                yield

    def contents(self, after: int = 0) -> Contents:
        """Read the examples with ids above ``after``.

        `StoreDamagedError` if any of them was changed or, with ``after`` 0, is missing.
        """
        with self.reading():
            rows = self._fetch(
                "SELECT id, label, arrival FROM examples WHERE id > ? ORDER BY id",
                after,
            )
            # Damage may have changed types.
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                contents = as_contents(rows)
                row = StoreRow.read(self._reader, self._path)
                expected = (row.num_examples, row.digest)
                if after > 0 or (len(contents), digest(contents)) == expected:
                    return contents
            raise self._damage()

    def vectors(self, ids: Ids, version: int) -> Vectors:
        """Read the embeddings (m, p) of stored ``ids`` (m,)."""
        empty = np.empty((0, self._version(version).embedding_dim), np.float32)
        return self._arrays(vectors_table(version), ids, empty)

    def inputs(self, ids: Ids) -> NDArray[np.generic]:
        """Read the raw inputs (m, ...) of stored ``ids`` (m,)."""
        assert self._layout is not None, "callers check that the store keeps inputs"
        empty = np.empty((0, *self._layout.shape), self._layout.dtype)
        return self._arrays("inputs", ids, empty)

    def _arrays(self, table: str, ids: Ids, empty: NDArray[np.generic]) -> NDArray:  # type: ignore[type-arg]
        with self._reading, translate_errors(self._path):
            return read_arrays(self._reader, table, ids, empty)

    def external_ids(self, ids: Ids) -> list[str | None]:
        """Return the owner's names of ``ids``; None without a name or example."""
        rows = self._fetch(SELECT_EXAMPLES, ids_json(ids))
        if len(list(intact_examples(rows))) < len(rows):
            raise self._damage()
        names = {row[0]: row[1] for row in rows}
        return [names.get(example) for example in ids.tolist()]

    def unchecked_labels(self, ids: Ids) -> list[object]:
        """Return the labels of the stored examples among ``ids``, damaged or not."""
        return [row[2] for row in self._fetch(SELECT_EXAMPLES, ids_json(ids))]

    def select(self, selection: Selection) -> Ids:
        """Return the ids of the selected examples, ascending."""
        condition, values = _where(selection)
        return self._ids(
            f"SELECT id FROM examples WHERE {condition} ORDER BY id", *values
        )

    def without_vector(self, version: int, after: int, limit: int) -> Ids:
        """Return up to ``limit`` ids above ``after`` that lack an embedding."""
        return self._ids(
            f"SELECT id FROM examples LEFT JOIN {vectors_table(version)} AS held "
            "USING (id) WHERE id > ? AND held.vector IS NULL ORDER BY id LIMIT ?",
            after,
            limit,
        )

    def charges(self, ids: Ids) -> NDArray[np.float64]:
        """See `read_charges`."""
        with self._reading, translate_errors(self._path):
            return read_charges(self._reader, ids)

    def num_bytes(self) -> int:
        """Return the bytes of the database, unused pages included, without its log."""
        return int(self._fetch("PRAGMA page_count")[0][0]) * PAGE_BYTES

    def versions(self) -> list[Version]:
        """Return all versions of the embeddings, oldest first; check their records."""
        rows = self._fetch(
            "SELECT number, fingerprint, embedding_dim, checksum FROM versions "
            "ORDER BY number"
        )
        for _, fingerprint, dim, checksum in rows:
            if row_checksum(fingerprint, dim) != checksum:
                problem = f"the model is not what was written: {fingerprint}"
                raise database_damaged(self._path, problem)
        return [Version(*row[:3]) for row in rows]

    def row(self) -> StoreRow:
        """Return the store's row; a writer need not read it again."""
        self._require_own_process()
        if self._current_row is not None:
            return self._current_row
        with self._reading, translate_errors(self._path):
            return StoreRow.read(self._reader, self._path)

    def apply(
        self, change: Change, follow_up: Callable[[], None] = lambda: None
    ) -> None:
        """Make a change in one transaction; removed examples may be damaged.

        See `writing` for ``follow_up``.
        """
        with self.writing(follow_up) as (connection, row):
            if len(change.removed):
                self._remove(connection, row, change.removed)
            if len(change.added):
                self._add(connection, row, change)
            row.num_removed += len(change.removed)
            row.stream_state = change.stream
            row.erasing = max(row.erasing, int(change.must_erase))

    def charge(self, ids: Ids, spent: NDArray[np.float64]) -> None:
        """Replace the ρ of ``ids`` (m,)."""
        with self.writing() as (connection, _):
            write_charges(connection, ids, spent)

    def compact(self) -> None:
        """Rewrite the database without its unused pages."""
        log = self._writable_log()
        with self._writing, translate_errors(self._path):
            log.connection.execute("VACUUM")
            log.empty()

    def erase_removed(self) -> None:
        """Erase the bytes of removed examples from all files."""
        with self._writing:
            self.compact()
            with self.writing() as (_, row):
                row.erasing = 0

    def add_version(self, fingerprint: str, embedding_dim: int) -> Version:
        """Add a version without embeddings."""
        with self.writing() as (connection, _):
            number = insert_version(connection, fingerprint, embedding_dim)
        return Version(number, fingerprint, embedding_dim)

    def add_vectors(self, version: int, ids: Ids, vectors: Vectors) -> None:
        """Add embeddings (m, p) to a version; skip ids that are no longer stored."""
        with self.writing() as (connection, _):
            rows = connection.execute(SELECT_EXAMPLES, (ids_json(ids),))
            label_of = {row[0]: row[2] for row in rows}
            is_stored = np.array(
                [example in label_of for example in ids.tolist()], bool
            )
            stored = ids[is_stored]
            labels = [label_of[example] for example in stored.tolist()]
            insert_blobs(
                connection,
                table=vectors_table(version),
                ids=stored,
                labels=np.array(labels, np.int64),
                arrays=vectors[is_stored],
            )

    def activate(self, version: int, follow_up: Callable[[], None]) -> None:
        """Make ``version`` the active one; keep the one before, drop all others.

        See `writing` for ``follow_up``.
        """
        with self.writing(follow_up) as (connection, row):
            row.previous, row.active = row.active, version
            others = connection.execute(
                "SELECT number FROM versions WHERE number NOT IN (?, ?)",
                (row.active, row.previous),
            ).fetchall()
            for (number,) in others:
                connection.execute(f"DROP TABLE {vectors_table(number)}")
                connection.execute("DELETE FROM versions WHERE number = ?", (number,))

    def recover(self) -> None:
        """Copy the log of a killed writer into the database and acknowledge it."""
        with self._writing:
            self._writable_log().try_to_empty()
            self._on_change(self.row())

    def close(self) -> None:
        """Close the connections; do nothing in a process that was forked."""
        # Closing there would copy and empty the log of the process that still writes.
        if self.is_inherited:
            return
        with self._reading:
            if self._log is None or self._reader is not self._log.connection:
                self._reader.close()
        if self._log is not None:
            with self._writing:
                # While another process reads the log, it stays; the next writer will
                # copy it.
                self._log.try_to_empty()
                self._log.connection.close()

    @contextlib.contextmanager
    def writing(
        self, follow_up: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[sqlite3.Connection, StoreRow]]:
        """Run the block as one transaction, which also writes the store's row.

        ``follow_up`` is called after the commit, and brings the index up to date. From
        the commit to its end no search runs in this process, so that a search never
        meets an index that differs from the database.
        """
        log = self._writable_log()
        with self._writing:
            log.checkpoint_if_long()
            with contextlib.ExitStack() as searches_wait:
                with transaction(log.connection, self._path, writing=True):
                    row = replace(self.row())
                    # Read again if the commit is interrupted and its outcome unknown.
                    self._current_row = None
                    yield log.connection, row
                    row.num_changes += 1
                    row.write(log.connection)
                    searches_wait.enter_context(self.searching)
                self._current_row = row
                self._on_change(row)
                follow_up()

    def _writable_log(self) -> WriteAheadLog:
        self._require_own_process()
        assert self._log is not None, "only a Store writes, and it has a log"
        return self._log

    def _remove(self, connection: sqlite3.Connection, row: StoreRow, ids: Ids) -> None:
        removed = connection.execute(SELECT_EXAMPLES, (ids_json(ids),)).fetchall()
        versions = connection.execute("SELECT number FROM versions").fetchall()
        tables = ["examples", "inputs", *(vectors_table(row[0]) for row in versions)]
        if has_charges(connection):
            tables.append(CHARGES)
        for table in tables:
            connection.executemany(
                f"DELETE FROM {table} WHERE id = ?",
                ((example,) for example in ids.tolist()),
            )
        intact = list(intact_examples(removed))
        row.num_examples -= len(removed)
        if len(intact) == len(removed):
            row.digest = as_signed(row.digest - digest(as_contents(intact)))
        else:
            # The digest still counts the original values of the damaged examples, which
            # are lost: compute it again from those that stay.
            remaining = connection.execute(
                f"SELECT {EXAMPLE_COLUMNS}, checksum FROM examples"
            )
            row.digest = digest(as_contents(intact_examples(remaining)))

    def _add(
        self, connection: sqlite3.Connection, row: StoreRow, change: Change
    ) -> None:
        added = change.added
        inputs = change.inputs
        embeddings = change.embeddings
        assert embeddings is not None, "an example comes with its embedding"
        if change.version != row.active:
            raise StoreMismatchError(
                "another model has re-embedded the store; embed these examples by that "
                "model, and add them once more"
            )
        rows = zip(
            added.ids.tolist(),
            change.external_ids or [None] * len(added),
            added.labels.tolist(),
            added.arrivals.tolist(),
            strict=True,
        )
        connection.executemany(
            insert_statement("examples", EXAMPLE_COLUMNS, "INSERT"),
            ((*values, row_checksum(*values)) for values in rows),
        )
        insert_blobs(
            connection, vectors_table(row.active), added.ids, added.labels, embeddings
        )
        if inputs is not None:
            insert_blobs(connection, "inputs", added.ids, added.labels, inputs)
        row.digest = as_signed(row.digest + digest(added))
        row.num_examples += len(added)

    def _version(self, number: int) -> Version:
        if number not in self._known_versions:
            self._known_versions = {
                version.number: version for version in self.versions()
            }
        if number not in self._known_versions:
            raise database_damaged(self._path, f"there is no model {number}")
        return self._known_versions[number]

    def _damage(self) -> StoreDamagedError:
        """Create the error of damaged or missing examples."""
        with self._reading, translate_errors(self._path):
            wrong = damaged_examples(self._reader)
        if not wrong:
            return database_damaged(
                self._path, "examples are missing, or older than they were"
            )
        return StoreDamagedError(
            f"{self._path}: external id, label or time of arrival of {len(wrong)} "
            f"examples is not what was written: {named(wrong)}; "
            f"{to_delete(self._path.parent, wrong)}"
        )

    def _fetch(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._reading, translate_errors(self._path):
            return self._reader.execute(statement, values).fetchall()

    def _ids(self, statement: str, *values: object) -> Ids:
        rows = self._fetch(statement, *values)
        return np.array([example for (example,) in rows], np.int64)


def _where(selection: Selection) -> tuple[str, list[object]]:
    """Return the SQL condition on the table of examples, and the values to bind."""
    conditions = ["1"]
    values = list[object]()
    lists = {
        "id": selection.ids,
        "external_id": selection.external_ids,
        "label": selection.labels,
    }
    for column, allowed in lists.items():
        if allowed is not None:
            # One JSON text, because the number of values to bind is limited; JSON does
            # not take NumPy's integers.
            conditions.append(f"{column} IN (SELECT value FROM json_each(?))")
            plain = [
                value if isinstance(value, str) else int(value) for value in allowed
            ]
            values.append(json.dumps(plain))
    if selection.arrived_from is not None:
        conditions.append("arrival >= ?")
        values.append(selection.arrived_from)
    if selection.arrived_before is not None:
        conditions.append("arrival < ?")
        values.append(selection.arrived_before)
    return " AND ".join(conditions), values

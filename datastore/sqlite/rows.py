"""Examples in an SQLite database: they survive the process, and the power."""

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datastore.contents import Contents, Ids
from datastore.core.rows import Change, Head, Version
from datastore.errors import StoreMismatchError
from datastore.examples import InputLayout, Selection
from datastore.index.base import Vectors
from datastore.sqlite import blobs
from datastore.sqlite.connection import (
    PAGE_BYTES,
    connect,
    transaction,
    understood,
)
from datastore.sqlite.log import Log
from datastore.sqlite.schema import insert_examples, insert_version, vectors_table
from datastore.sqlite.selecting import where
from datastore.sqlite.stream_json import decode_stream, encode_stream


class SqliteRows:
    """Rows in a database that exists, see `datastore.core.rows.Rows`.

    Parameters
    ----------
    path
        The database.
    layout
        Of the raw inputs; None where none are kept.
    writable
        Whether this process is the writer; if so it holds the writer's lock.
    """

    def __init__(
        self, path: Path, layout: InputLayout | None, *, writable: bool
    ) -> None:
        self._path = path
        self._layout = layout
        # Reads go on while a transaction is being written.
        self._writer = connect(path, writable=True) if writable else None
        self._log = None if self._writer is None else Log(self._writer, path)
        self._reader = connect(path, writable=False)
        self._writing, self._reading = threading.RLock(), threading.RLock()
        self._data_version = -1
        self.has_changed()

    def head(self) -> Head:
        """See `Rows`."""
        active, previous, num_removed, stream = self._fetch(
            "SELECT active, previous, num_removed, stream FROM store"
        )[0]
        version = next(one for one in self.versions() if one.number == active)
        return Head(version, previous, num_removed, decode_stream(stream))

    def has_changed(self) -> bool:
        """See `Rows`; a writer knows what it changed."""
        if self._writer is not None:
            return False
        before = self._data_version
        self._data_version = self._fetch("PRAGMA data_version")[0][0]
        return before != self._data_version

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """See `Rows`."""
        with self._reading, transaction(self._reader, self._path, writing=False):
            yield

    def contents(self, after: int = 0) -> Contents:
        """See `Rows`."""
        rows = self._fetch(
            "SELECT id, label, arrival FROM examples WHERE id > ? ORDER BY id", after
        )
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        return Contents(
            np.array(columns[0], dtype=np.int64),
            np.array(columns[1], dtype=np.int64),
            np.array(columns[2], dtype=np.float64),
        )

    def vectors(self, ids: Ids, version: int) -> Vectors:
        """See `Rows`."""
        dim = self._fetch(
            "SELECT embedding_dim FROM versions WHERE number = ?", version
        )[0][0]
        return self._read(
            vectors_table(version), "vector", ids, np.empty((0, dim), np.float32)
        )

    def inputs(self, ids: Ids) -> NDArray[np.generic]:
        """See `Rows`."""
        assert self._layout is not None, "the store asks only where inputs are kept"
        empty = np.empty((0, *self._layout.shape), self._layout.dtype)
        return self._read("inputs", "input", ids, empty)

    def external_ids(self, ids: Ids) -> list[str | None]:
        """See `Rows`."""
        rows = self._fetch(
            "SELECT id, external_id FROM examples "
            "WHERE id IN (SELECT value FROM json_each(?))",
            json.dumps(ids.tolist()),
        )
        names = dict(rows)
        return [names.get(one) for one in ids.tolist()]

    def select(self, selection: Selection) -> Ids:
        """See `Rows`."""
        condition, values = where(selection)
        rows = self._fetch(
            f"SELECT id FROM examples WHERE {condition} ORDER BY id",
            *values,
        )
        return np.array([row[0] for row in rows], dtype=np.int64)

    def apply(self, change: Change) -> None:
        """See `Rows`."""
        with self.writing() as connection:
            if len(change.removed):
                self._delete(connection, change.removed)
            if len(change.added):
                self._insert(connection, change)
            connection.execute(
                "UPDATE store SET num_removed = num_removed + ?, stream = ?, "
                "erasing = max(erasing, ?)",
                (
                    len(change.removed),
                    encode_stream(change.stream),
                    change.must_erase,
                ),
            )

    def compact(self) -> None:
        """See `Rows`."""
        with self._writing, understood(self._path):
            self._connection().execute("VACUUM")
            self._written().empty()

    def erase_removed(self) -> None:
        """See `Rows`.

        Zeros take the place of what is deleted, but a page of the database may hold an
        older copy of a row that was moved to another page: only a new database, and an
        empty log, hold no trace.
        """
        with self._writing:
            self.compact()
            with self.writing() as connection:
                connection.execute("UPDATE store SET erasing = 0")

    def is_erasing(self) -> bool:
        """See `Rows`."""
        return bool(self._fetch("SELECT erasing FROM store")[0][0])

    def index_token(self) -> str:
        """See `datastore.core.cache.Tokens`."""
        return str(self._fetch("SELECT index_token FROM store")[0][0])

    def set_index_token(self, token: str) -> None:
        """See `datastore.core.cache.Tokens`."""
        with self.writing() as connection:
            connection.execute("UPDATE store SET index_token = ?", (token,))

    def num_bytes(self) -> int:
        """See `Rows`."""
        return int(self._fetch("PRAGMA page_count")[0][0]) * PAGE_BYTES

    def versions(self) -> list[Version]:
        """See `Rows`."""
        rows = self._fetch(
            "SELECT number, fingerprint, embedding_dim FROM versions ORDER BY number"
        )
        return [Version(*row) for row in rows]

    def add_version(self, fingerprint: str, embedding_dim: int) -> Version:
        """See `Rows`."""
        with self.writing() as connection:
            number = insert_version(connection, fingerprint, embedding_dim)
        return Version(number, fingerprint, embedding_dim)

    def without_vector(self, version: int, after: int, limit: int) -> Ids:
        """See `Rows`."""
        rows = self._fetch(
            f"SELECT id FROM examples LEFT JOIN {vectors_table(version)} AS held "
            "USING (id) WHERE id > ? AND held.vector IS NULL ORDER BY id LIMIT ?",
            after,
            limit,
        )
        return np.array([row[0] for row in rows], dtype=np.int64)

    def add_vectors(self, version: int, ids: Ids, vectors: Vectors) -> None:
        """See `Rows`."""
        with self.writing() as connection:
            rows = connection.execute(
                "SELECT id, label FROM examples "
                "WHERE id IN (SELECT value FROM json_each(?))",
                (json.dumps(ids.tolist()),),
            ).fetchall()
            label_of = dict(rows)
            present = np.array([one in label_of for one in ids.tolist()], dtype=bool)
            labels = np.array(
                [label_of[one] for one in ids[present].tolist()], np.int64
            )
            table = vectors_table(version)
            blobs.insert(connection, table, ids[present], labels, vectors[present])
            self._written().note(len(ids), vectors.nbytes)

    def activate(self, version: int) -> None:
        """See `Rows`."""
        with self.writing() as connection:
            connection.execute(
                "UPDATE store SET previous = active, active = ?", (version,)
            )
            others = connection.execute(
                "SELECT number FROM versions, store "
                "WHERE number NOT IN (active, previous)"
            ).fetchall()
            for (number,) in others:
                connection.execute(f"DROP TABLE {vectors_table(number)}")
                connection.execute("DELETE FROM versions WHERE number = ?", (number,))

    def close(self) -> None:
        """See `Rows`."""
        with self._reading:
            self._reader.close()
        if self._writer is not None:
            with self._writing:
                # A reader may keep the log; the next writer will copy it.
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("PRAGMA busy_timeout = 0")
                    self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._writer.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run a block as one transaction that writes."""
        with self._writing:
            connection = self._connection()
            with transaction(connection, self._path, writing=True):
                yield connection
            self._written().shorten()

    def _connection(self) -> sqlite3.Connection:
        assert self._writer is not None, "only a Store writes, and it has a writer"
        return self._writer

    def _written(self) -> Log:
        assert self._log is not None, "only a Store writes, and it has a log"
        return self._log

    def _delete(self, connection: sqlite3.Connection, ids: Ids) -> None:
        versions = connection.execute("SELECT number FROM versions").fetchall()
        self._written().note(len(ids), len(ids) * PAGE_BYTES)
        tables = ["examples", "inputs", *(vectors_table(one) for (one,) in versions)]
        for table in tables:
            connection.executemany(
                f"DELETE FROM {table} WHERE id = ?",
                ((one,) for one in ids.tolist()),
            )

    def _insert(self, connection: sqlite3.Connection, change: Change) -> None:
        added = change.added
        insert_examples(connection, added, change.external_ids)
        assert change.embeddings is not None, "an example comes with its embedding"
        active = connection.execute("SELECT active FROM store").fetchone()[0]
        if change.version != active:
            raise StoreMismatchError(
                "the store was embedded by another model meanwhile; embed these "
                "examples by that one, and add them again"
            )
        num_bytes = change.embeddings.nbytes
        num_bytes += 0 if change.inputs is None else change.inputs.nbytes
        self._written().note(len(added), num_bytes)
        table = vectors_table(active)
        blobs.insert(connection, table, added.ids, added.labels, change.embeddings)
        if change.inputs is not None:
            blobs.insert(connection, "inputs", added.ids, added.labels, change.inputs)

    def _fetch(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._reading, understood(self._path):
            return self._reader.execute(statement, values).fetchall()

    def _read(
        self, table: str, column: str, ids: Ids, empty: NDArray[np.generic]
    ) -> NDArray:  # type: ignore[type-arg]
        with self._reading, understood(self._path):
            return blobs.read(self._reader, table, column, ids, empty)

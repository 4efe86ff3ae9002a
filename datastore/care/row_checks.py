"""Whether a store's database is what was written."""

import itertools
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datastore.care.finding import Finding
from datastore.errors import StoreDamagedError, named, to_delete, to_restore
from datastore.examples import StoreSpec
from datastore.sqlite import blobs
from datastore.sqlite.checksums import damaged_rows
from datastore.sqlite.raw import all_rows, blob_columns
from datastore.sqlite.rows import SqliteRows
from datastore.sqlite.schema import EXAMPLE


@dataclass(frozen=True)
class DatabaseCheck:
    """The checks of one database, all of which see the same moment.

    Attributes
    ----------
    folder
        Of the store.
    spec
        What it was made for.
    connection
        To read with, inside a transaction.
    rows
        The same, for what is read with its checksum.
    """

    folder: Path
    spec: StoreSpec
    connection: sqlite3.Connection
    rows: SqliteRows

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong; of a broken database, nothing but that it is."""
        broken = [row[0] for row in self._query("PRAGMA integrity_check(10)")]
        if broken != ["ok"]:
            found = f"the database is damaged: {'; '.join(broken)}"
            yield Finding(found, to_restore(self.folder))
            return
        for table, column in blob_columns(self.connection):
            yield from self._content(table, column)
        for table in self._complete_tables():
            yield from self._gaps(table)
        yield from self._small_rows()

    def num_examples(self) -> int:
        """Return N."""
        return int(self._query("SELECT count(*) FROM examples")[0][0])

    def num_rows(self) -> int:
        """Return the number of inputs and of embeddings of all versions."""
        return sum(
            int(self._query(f"SELECT count(*) FROM {table}")[0][0])
            for table, _ in blob_columns(self.connection)
        )

    def erasure(self) -> Iterator[Finding]:
        """Yield that deleted examples may have left bytes, if so."""
        if self._query("SELECT erasing FROM store")[0][0]:
            yield Finding(
                "an erasure was cut short: bytes of deleted examples may be in the "
                "files",
                f"end whoever reads the store, then knnper store compact {self.folder}",
            )

    def _small_rows(self) -> Iterator[Finding]:
        wrong = list(damaged_rows(self.connection, "examples", EXAMPLE))
        if wrong:
            yield self._damage(
                "external id, label or time of arrival is not what was written", wrong
            )
            return
        try:
            self.rows.contents()
            self.rows.versions()
        except StoreDamagedError as error:
            yield Finding(error.found, to_restore(self.folder))

    def _content(self, table: str, column: str) -> Iterator[Finding]:
        orphans = self._ids(
            f"SELECT id FROM {table} WHERE id NOT IN (SELECT id FROM examples)"
        )
        if orphans:
            found = f"{table} has rows of no example: {named(orphans)}"
            yield Finding(found, to_restore(self.folder))
        wrong = {
            *blobs.damaged(self.connection, table, column),
            *self._misfits(table, column),
        }
        wrong -= set(orphans)
        if wrong:
            yield self._damage(f"{table} is not what was written", sorted(wrong))

    def _misfits(self, table: str, column: str) -> Iterator[int]:
        """Yield the ids of rows of a wrong length, or with numbers not finite."""
        expected = self.spec.input_bytes
        if column == "vector":
            dim = self._query(
                "SELECT embedding_dim FROM versions WHERE number = ?", table[11:]
            )
            expected = 4 * dim[0][0] if dim else -1
        parts = all_rows(self.connection, table, column)
        for example, content in itertools.chain.from_iterable(parts):
            if len(content) != expected or (
                column == "vector"
                and not np.isfinite(np.frombuffer(content, np.float32)).all()
            ):
                yield example

    def _complete_tables(self) -> Iterator[str]:
        """Yield the tables that have a row of every example."""
        yield f"embeddings_{self._query('SELECT active FROM store')[0][0]}"
        if self.spec.input is not None:
            yield "inputs"

    def _gaps(self, table: str) -> Iterator[Finding]:
        lacking = self._ids(
            f"SELECT id FROM examples WHERE id NOT IN (SELECT id FROM {table})"
        )
        if lacking:
            yield self._damage(f"{table} lacks a row", lacking)

    def _damage(self, what: str, ids: Sequence[object]) -> Finding:
        found = f"{len(ids)} examples: {what}: {named(ids)}"
        return Finding(found, to_delete(self.folder, ids))

    def _ids(self, statement: str) -> list[int]:
        return [row[0] for row in self._query(statement)]

    def _query(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        return self.connection.execute(statement, values).fetchall()

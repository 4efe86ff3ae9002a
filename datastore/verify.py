"""Checks of a store on disk, and deletion of examples that are damaged."""

import contextlib
import itertools
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from knnper.datastore.database import (
    EXAMPLE,
    Change,
    Rows,
    blob_tables,
    contents_of,
    damaged,
    damaged_rows,
    opened,
)
from knnper.datastore.examples import (
    Ids,
    Selection,
    StoreDamagedError,
    StoreError,
    StoreSpec,
    named,
    to_delete,
    to_restore,
)
from knnper.datastore.index import VectorIndex
from knnper.datastore.journal import ACKNOWLEDGED
from knnper.datastore.policy import forget
from knnper.datastore.salvage import Salvage, what_is_intact
from knnper.datastore.search import MANIFEST, IndexCache, file_sha256
from knnper.datastore.store import (
    DATABASE,
    INDEX,
    LOCK,
    Identity,
    open_rows,
    open_store,
)

_LOG = logging.getLogger(__name__)


def delete_examples(folder: Path, ids: Ids) -> None:
    """Delete stored examples, and every trace of them; see `Store.delete`.

    An example whose embedding or label is damaged may keep the store from being opened,
    or from deleting anything. It is then taken out of the database alone, and the index
    is built anew when the store is opened next.
    """
    try:
        with open_store(folder, writable=True) as store:
            store.delete(Selection(ids=tuple(ids.tolist())))
            return
    except StoreDamagedError as error:
        _LOG.info("the store is not opened to delete from it: %s", error)
    _delete_unopened(folder, ids)


def _delete_unopened(folder: Path, ids: Ids) -> None:
    with open_rows(folder, writable=True) as (_, rows):
        stream, labels = rows.head().stream, rows.labels_as_found(ids)
        num_classes = len(stream.num_seen)
        # As far as its labels can be believed.
        known = [
            one for one in labels if isinstance(one, int) and 0 <= one < num_classes
        ]
        counts = np.bincount(np.array(known, np.int64), minlength=num_classes)
        counts = np.minimum(counts, stream.num_seen)
        left = forget(stream, np.repeat(np.arange(num_classes), counts))
        rows.apply(Change(stream=left, removed=ids, must_erase=True))
        IndexCache(folder / INDEX, rows).clear()
        rows.erase_removed()


OWN = frozenset(
    (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", ACKNOWLEDGED, INDEX, LOCK)
)

OWN_OF_INDEX = (MANIFEST, f".{MANIFEST}.draft", "*.index")
"""Some may be of a save that was cut short; whoever writes next removes them."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    what: str
    mend: str


@dataclass(frozen=True)
class Verdict:
    """What `verify` found."""

    findings: tuple[Finding, ...]
    num_examples: int = 0
    num_rows: int = 0
    saving: Salvage | None = None


def verify(folder: Path) -> Verdict:
    """Check the database, all checksums, labels, embeddings, the saved index, files."""
    verdict = _verdict(folder)
    return replace(verdict, findings=(*verdict.findings, *check_files(folder)))


def _verdict(folder: Path) -> Verdict:
    try:
        with (
            open_rows(folder) as (identity, rows),
            opened(folder / DATABASE) as connection,
        ):
            connection.execute("BEGIN")
            check = DatabaseCheck(folder, identity.spec, connection, rows)
            findings = tuple(check.findings())
            counted = check.num_examples(), check.num_rows()
            connection.execute("ROLLBACK")
            if not findings:
                other = (*check.erasure(), *check_index(folder, identity, rows))
                return Verdict(other, *counted)
    except StoreDamagedError as error:
        findings = (Finding(error.found or str(error), to_restore(folder)),)
        counted = 0, 0
    saving = None
    # Somebody may write, TMPDIR be full, or nothing be left.
    with contextlib.suppress(StoreError, OSError):
        saving = what_is_intact(folder)
    return Verdict(findings, *counted, saving)


@dataclass(frozen=True)
class DatabaseCheck:
    """The checks of one database, all of which see the same moment."""

    folder: Path
    spec: StoreSpec
    connection: sqlite3.Connection
    rows: Rows

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong; of a broken database, nothing but that it is."""
        broken = [row[0] for row in self._query("PRAGMA integrity_check(10)")]
        if broken != ["ok"]:
            yield self._lost(f"the database is damaged: {'; '.join(broken)}")
            return
        for table in blob_tables(self.connection):
            yield from self._content(table)
        complete = [f"embeddings_{self._query('SELECT active FROM store')[0][0]}"]
        if self.spec.input is not None:
            complete.append("inputs")
        for table in complete:
            lacking = self._ids(
                f"SELECT id FROM examples WHERE id NOT IN (SELECT id FROM {table})"
            )
            if lacking:
                yield self._damage(f"{table} lacks a row", lacking)
        yield from self._small_rows()

    def num_examples(self) -> int:
        """Return N."""
        return int(self._query("SELECT count(*) FROM examples")[0][0])

    def num_rows(self) -> int:
        """Return the number of inputs and of embeddings of all versions."""
        return sum(
            int(self._query(f"SELECT count(*) FROM {table}")[0][0])
            for table in blob_tables(self.connection)
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
            yield self._lost(error.found)

    def _content(self, table: str) -> Iterator[Finding]:
        orphans = self._ids(
            f"SELECT id FROM {table} WHERE id NOT IN (SELECT id FROM examples)"
        )
        if orphans:
            yield self._lost(f"{table} has rows of no example: {named(orphans)}")
        wrong = {*damaged(self.connection, table), *self._misfits(table)}
        wrong -= set(orphans)
        if wrong:
            yield self._damage(f"{table} is not what was written", sorted(wrong))

    def _misfits(self, table: str) -> Iterator[int]:
        """Yield the ids of rows of a wrong length, or with numbers not finite."""
        expected = self.spec.input_bytes
        is_vector = table != "inputs"
        if is_vector:
            dim = self._query(
                "SELECT embedding_dim FROM versions WHERE number = ?", table[11:]
            )
            expected = 4 * dim[0][0] if dim else -1
        parts = contents_of(self.connection, table)
        for example, content in itertools.chain.from_iterable(parts):
            if len(content) != expected or (
                is_vector and not np.isfinite(np.frombuffer(content, np.float32)).all()
            ):
                yield example

    def _damage(self, what: str, ids: Sequence[object]) -> Finding:
        found = f"{len(ids)} examples: {what}: {named(ids)}"
        return Finding(found, to_delete(self.folder, ids))

    def _lost(self, what: str) -> Finding:
        return Finding(what, to_restore(self.folder))

    def _ids(self, statement: str) -> list[int]:
        return [row[0] for row in self._query(statement)]

    def _query(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        return self.connection.execute(statement, values).fetchall()


def is_own(folder: Path, path: Path) -> bool:
    """Return whether what lies at ``path`` in a store's folder is the store's."""
    parts = path.relative_to(folder).parts
    if parts[0] != INDEX or len(parts) == 1:
        return parts[0] in OWN and len(parts) == 1
    is_file = len(parts) == 2 and not path.is_dir()
    return is_file and any(path.match(pattern) for pattern in OWN_OF_INDEX)


def check_files(folder: Path) -> Iterator[Finding]:
    """Yield the files that are not the store's own."""
    inside = folder / INDEX
    found = [*folder.iterdir(), *(inside.iterdir() if inside.is_dir() else ())]
    for path in sorted(path for path in found if not is_own(folder, path)):
        yield Finding(f"{path} is not the store's", "move it elsewhere, or remove it")


def check_index(folder: Path, identity: Identity, rows: Rows) -> Iterator[Finding]:
    """Yield what is wrong with the saved index."""
    mend = f"knnper store compact {folder} builds it anew"
    for what in _index_faults(folder / INDEX, identity, rows):
        yield Finding(f"the saved index {what}", mend)


def _index_faults(folder: Path, identity: Identity, rows: Rows) -> Iterator[str]:
    cache = IndexCache(folder, rows)
    try:
        manifest = cache.manifest()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        yield f"has a manifest that cannot be read: {error}"
        return
    file = folder / f"{manifest.get('token')}.index"
    if not file.is_file():
        return
    if file_sha256(file) != manifest.get("sha256"):
        yield "is not what was written"
        return
    with rows.reading():
        active = rows.head().active
        settings = identity.settings.index
        if cache.distrust(active, settings) is not None:
            return
        try:
            index = settings.read(file, active.embedding_dim)
        except StoreDamagedError as error:
            yield f"cannot be read: {error}"
            return
        yield from _content_faults(index, rows)


def _content_faults(index: VectorIndex, rows: Rows) -> Iterator[str]:
    """Yield how an index contradicts the rows; it may lack some, or have old ones."""
    unknown = index.ids[index.ids > rows.head().stream.num_offered]
    if len(unknown):
        yield f"has examples that never were: {named(unknown.tolist())}"
    if not index.keeps_vectors:
        return
    ids = np.intersect1d(index.ids, rows.contents().ids)
    for part in np.array_split(ids, 1 + len(ids) // 1024):
        stored = rows.vectors(part, rows.head().active.number)
        differs = (index.vectors(part) != stored).any(axis=1)
        if differs.any():
            found = named(part[differs].tolist())
            yield f"has other embeddings than the database: {found}"
            return

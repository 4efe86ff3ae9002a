"""Checks of a store on disk, and a copy of the intact examples of a damaged one."""

import contextlib
import itertools
import logging
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from knnper.datastore.connection import decode_damaged_text, log_path, open_reader
from knnper.datastore.database import Change, Rows
from knnper.datastore.examples import (
    Ids,
    Selection,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreSpec,
    named,
    to_delete,
    to_restore,
)
from knnper.datastore.index import VectorIndex
from knnper.datastore.journal import ACKNOWLEDGED, Acknowledged
from knnper.datastore.policy import forget
from knnper.datastore.search import MANIFEST, IndexCache, file_sha256
from knnper.datastore.store import (
    DATABASE,
    INDEX,
    LOCK,
    Identity,
    create_store,
    identity_of,
    new_folder,
    open_rows,
    open_store,
    require_database,
)
from knnper.datastore.tables import (
    ROWS_AT_ONCE,
    StoreRow,
    Version,
    as_contents,
    blob_tables,
    damaged_blobs,
    damaged_examples,
    is_intact,
    read_blobs,
    row_checksum,
    vectors_table,
)
from knnper.files import lock_holder

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Salvage:
    """The outcome of copying the readable part of a store.

    Attributes
    ----------
    num_saved
        Examples whose every byte is as written.
    lost
        Ids of examples of which something is damaged or missing.
    num_missing
        Acknowledged examples of which nothing is left.
    num_changes_missing
        Acknowledged changes that are not in the database.
    """

    num_saved: int
    lost: tuple[int, ...]
    num_missing: int
    num_changes_missing: int


def salvage(folder: Path, target: Path) -> Salvage:
    """Copy the examples that SQLite can still read to a new store in ``target``.

    Raises
    ------
    StoreBusyError
        If another process writes to the store.
    StoreDamagedError
        If the tables, the settings or the model cannot be read.
    """
    with new_folder(target) as draft, _remains(folder, target.parent) as remains:
        identity, version = identity_of(remains.row), remains.version
        create_store(
            draft,
            identity.spec,
            version.embedding_dim,
            version.fingerprint,
            identity.settings,
        ).close()
        with open_rows(draft, writable=True) as (_, rows):
            new_version = rows.state().active.number
            for change in remains.changes():
                rows.apply(replace(change, version=new_version))
    return remains.report()


def readable_part(folder: Path) -> Salvage:
    """Report what `salvage` would copy; needs room for a copy in ``TMPDIR``."""
    with _remains(folder, None) as remains:
        for _ in remains.changes():
            pass
    return remains.report()


@contextlib.contextmanager
def _remains(folder: Path, scratch: Path | None) -> Iterator["_Remains"]:
    """Read a damaged store from a copy in ``scratch``, as SQLite changes the log."""
    require_database(folder)
    if lock_holder(folder / LOCK) is not None:
        raise StoreBusyError(f"a process writes to {folder}; stop it first")
    acknowledged = None
    with contextlib.suppress(StoreDamagedError):
        acknowledged = Acknowledged.read(folder)
    with contextlib.ExitStack() as stack:
        copy = stack.enter_context(
            tempfile.TemporaryDirectory(dir=scratch, prefix=".salvage-")
        )
        path = Path(copy) / DATABASE
        shutil.copyfile(folder / DATABASE, path)
        if log_path(folder / DATABASE).is_file():
            shutil.copyfile(log_path(folder / DATABASE), log_path(path))
        connection = stack.enter_context(contextlib.closing(sqlite3.connect(path)))
        # SQLite then reads a file that is shorter than its header claims.
        connection.execute("PRAGMA writable_schema = ON")
        decode_damaged_text(connection)
        try:
            remains = _Remains(connection, path, acknowledged)
        except (sqlite3.Error, StoreDamagedError) as error:
            raise StoreDamagedError(
                f"nothing of {folder} can be copied, because its tables, its settings "
                "or its model cannot be read; restore the folder from a backup, or "
                "create the store anew"
            ) from error
        yield remains


class _Remains:
    """The readable rows of a damaged database; checksums tell which are as written."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        acknowledged: Acknowledged | None,
    ) -> None:
        self._connection, self._acknowledged = connection, acknowledged
        self.row = StoreRow.read(connection, path)
        values = connection.execute(
            "SELECT fingerprint, embedding_dim, checksum FROM versions "
            "WHERE number = ?",
            (self.row.active,),
        ).fetchone()
        if values is None or row_checksum(*values[:2]) != values[2]:
            raise StoreDamagedError("the model is not what was written")
        self.version = Version(self.row.active, *values[:2])
        self._num_saved, self._lost = 0, list[int]()

    def changes(self) -> Iterator[Change]:
        """Yield additions of the examples that are as written, some at a time."""
        spec, dim = identity_of(self.row).spec, self.version.embedding_dim
        layout = spec.input
        table = vectors_table(self.version.number)
        sizes = {table: 4 * dim}
        if layout is not None:
            sizes["inputs"] = spec.input_bytes
        stream = self.row.stream_state
        if self._acknowledged is not None:
            # No id is given again.
            last = max(stream.num_offered, self._acknowledged.num_offered)
            stream = replace(stream, num_offered=last)
        examples = {
            number: (name, label, arrival)
            for number, name, label, arrival, checksum in self._rows(
                "id, external_id, label, arrival, checksum", "examples"
            )
            if row_checksum(number, name, label, arrival) == checksum
        }
        ids = set(examples)
        for name in ("examples", *sizes):
            ids.update(number for (number,) in self._rows("id", name))
        ordered = sorted(ids)
        for first in range(0, len(ordered), ROWS_AT_ONCE):
            intact = list[int]()
            contents = {name: list[bytes]() for name in sizes}
            for number in ordered[first : first + ROWS_AT_ONCE]:
                parts = None
                if number in examples:
                    parts = self._contents(number, examples[number][1], sizes)
                if parts is None:
                    self._lost.append(number)
                    continue
                intact.append(number)
                for name, content in parts.items():
                    contents[name].append(content)
            self._num_saved += len(intact)
            if not intact:
                continue
            vectors = np.frombuffer(b"".join(contents[table]), np.float32)
            inputs = None
            if layout is not None:
                flat = np.frombuffer(b"".join(contents["inputs"]), layout.dtype)
                inputs = flat.reshape(-1, *layout.shape)
            yield Change(
                stream=stream,
                added=as_contents((one, *examples[one][1:]) for one in intact),
                embeddings=vectors.reshape(-1, dim),
                inputs=inputs,
                external_ids=[examples[number][0] for number in intact],
            )

    def report(self) -> Salvage:
        """Report the outcome once `changes` has run to its end."""
        expected = self._acknowledged or self.row
        num_known = self._num_saved + len(self._lost)
        return Salvage(
            self._num_saved,
            tuple(self._lost),
            max(0, expected.num_examples - num_known),
            max(0, expected.num_changes - self.row.num_changes),
        )

    def _rows(self, columns: str, table: str) -> Iterator[tuple[Any, ...]]:
        """Read rows from both ends of a table, up to its damaged part."""
        for order in ("ASC", "DESC"):
            query = f"SELECT {columns} FROM {table} ORDER BY id {order}"
            with contextlib.suppress(sqlite3.Error):
                yield from self._connection.execute(query)
                return

    def _contents(
        self, number: int, label: int, sizes: Mapping[str, int]
    ) -> dict[str, bytes] | None:
        """Read the bytes of an example by table; None if any are not as written."""
        contents = {}
        for table, size in sizes.items():
            column = "input" if table == "inputs" else "vector"
            query = f"SELECT {column}, checksum FROM {table} WHERE id = ?"
            try:
                row = self._connection.execute(query, (number,)).fetchone()
            except sqlite3.Error:
                return None
            if row is None or not is_intact(table, (number, label, *row)):
                return None
            if len(row[0]) != size:
                return None
            contents[table] = row[0]
        return contents


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
        stream, labels = rows.state().stream, rows.unchecked_labels(ids)
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
    verdict, inside = _verdict(folder), folder / INDEX
    found = [*folder.iterdir(), *(inside.iterdir() if inside.is_dir() else ())]
    strange = (
        Finding(f"{path} is not the store's", "move it elsewhere, or remove it")
        for path in sorted(path for path in found if not is_own(folder, path))
    )
    return replace(verdict, findings=(*verdict.findings, *strange))


def _verdict(folder: Path) -> Verdict:
    try:
        with (
            open_rows(folder) as (identity, rows),
            open_reader(folder / DATABASE) as connection,
        ):
            connection.execute("BEGIN")
            check = DatabaseCheck(folder, identity.spec, connection, rows)
            findings = tuple(check.findings())
            counted = check.num_examples(), check.num_rows()
            connection.execute("ROLLBACK")
            if not findings:
                mend = f"knnper store rewrite {folder} builds it anew"
                of_index = (
                    Finding(f"the saved index {what}", mend)
                    for what in _index_faults(folder / INDEX, identity, rows)
                )
                return Verdict((*check.erasure(), *of_index), *counted)
    except StoreDamagedError as error:
        findings = (Finding(error.problem or str(error), to_restore(folder)),)
        counted = 0, 0
    saving = None
    # A process may write, or nothing can be read.
    with contextlib.suppress(StoreError, OSError):
        saving = readable_part(folder)
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
                f"end whoever reads the store, then knnper store rewrite {self.folder}",
            )

    def _small_rows(self) -> Iterator[Finding]:
        wrong = damaged_examples(self.connection)
        if wrong:
            yield self._damage(
                "external id, label or time of arrival is not what was written", wrong
            )
            return
        try:
            self.rows.contents()
            self.rows.versions()
        except StoreDamagedError as error:
            yield self._lost(error.problem)

    def _content(self, table: str) -> Iterator[Finding]:
        orphans = self._ids(
            f"SELECT id FROM {table} WHERE id NOT IN (SELECT id FROM examples)"
        )
        if orphans:
            yield self._lost(f"{table} has rows of no example: {named(orphans)}")
        wrong = {*damaged_blobs(self.connection, table), *self._misfits(table)}
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
        parts = read_blobs(self.connection, table)
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
        active = rows.state().active
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
    unknown = index.ids[index.ids > rows.state().stream.num_offered]
    if len(unknown):
        yield f"has examples that never were: {named(unknown.tolist())}"
    if not index.keeps_vectors:
        return
    ids = np.intersect1d(index.ids, rows.contents().ids)
    for part in np.array_split(ids, 1 + len(ids) // 1024):
        stored = rows.vectors(part, rows.state().active.number)
        differs = (index.vectors(part) != stored).any(axis=1)
        if differs.any():
            found = named(part[differs].tolist())
            yield f"has other embeddings than the database: {found}"
            return

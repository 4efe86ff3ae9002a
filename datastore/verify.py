"""Checks of a store on disk, and a copy of the intact examples of a damaged one."""

import contextlib
import logging
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.charges import read_charges
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
from knnper.datastore.index import FlatIndex, VectorIndex
from knnper.datastore.journal import ACKNOWLEDGED, Acknowledged
from knnper.datastore.policy import forget
from knnper.datastore.search import MANIFEST, IndexCache, file_sha256
from knnper.datastore.store import (
    DATABASE,
    INDEX,
    LOCK,
    StoreIdentity,
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
# The files of a store's folder.
_STORE_FILES = frozenset(
    (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", ACKNOWLEDGED, INDEX, LOCK)
)
# The files of its index folder. An interrupted save may leave several; the next process
# that opens the store for writing removes them.
_INDEX_FILES = (MANIFEST, f".{MANIFEST}.draft", "*.index")


@dataclass(frozen=True)
class Salvage:
    """The outcome of copying the readable part of a store.

    Attributes
    ----------
    num_saved
        Intact examples, which were copied.
    lost
        Ids of damaged or incomplete examples.
    num_missing
        Acknowledged examples without any row left.
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
            ids = rows.contents().ids
            spent = remains.charges(ids)
            if spent.any():
                rows.charge(ids, spent)
    return remains.report()


def readable_part(folder: Path) -> Salvage:
    """Report what `salvage` would copy; needs room for a copy in ``TMPDIR``."""
    with _remains(folder, None) as remains:
        for _ in remains.changes():
            pass
    return remains.report()


@contextlib.contextmanager
def _remains(folder: Path, scratch: Path | None) -> Iterator["_Remains"]:
    """Read a damaged store from a copy in ``scratch``: SQLite changes the log."""
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
                "create a new store"
            ) from error
        yield remains


class _Remains:
    """The readable rows of a damaged database; checksums show which are intact."""

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
        """Yield additions of the intact examples, `ROWS_AT_ONCE` at a time."""
        spec = identity_of(self.row).spec
        dim = self.version.embedding_dim
        layout = spec.input
        table = vectors_table(self.version.number)
        sizes = {table: 4 * dim}
        if layout is not None:
            sizes["inputs"] = spec.input_bytes
        stream = self.row.stream_state
        if self._acknowledged is not None:
            # Ids of lost examples are not used again.
            last = max(stream.num_offered, self._acknowledged.num_offered)
            stream = replace(stream, num_offered=last)
        examples = {
            number: (name, label, arrival)
            for number, name, label, arrival, checksum in self._readable_rows(
                "id, external_id, label, arrival, checksum", "examples"
            )
            if row_checksum(number, name, label, arrival) == checksum
        }
        ids = set(examples)
        for name in ("examples", *sizes):
            ids.update(number for (number,) in self._readable_rows("id", name))
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
                added=as_contents((number, *examples[number][1:]) for number in intact),
                embeddings=vectors.reshape(-1, dim),
                inputs=inputs,
                external_ids=[examples[number][0] for number in intact],
            )

    def charges(self, ids: Ids) -> NDArray[np.float64]:
        """Return the ρ spent on private answers, infinite where it is damaged."""
        try:
            spent = read_charges(self._connection, ids)
        except sqlite3.Error:
            return np.full(len(ids), np.inf)
        return np.where(np.isnan(spent), np.inf, spent)

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

    def _readable_rows(self, columns: str, table: str) -> Iterator[tuple[Any, ...]]:
        """Read rows from both ends of a table, up to its damaged part."""
        for order in ("ASC", "DESC"):
            query = f"SELECT {columns} FROM {table} ORDER BY id {order}"
            with contextlib.suppress(sqlite3.Error):
                yield from self._connection.execute(query)
                return

    def _contents(
        self, number: int, label: int, sizes: Mapping[str, int]
    ) -> dict[str, bytes] | None:
        """Read the bytes of an example by table; None if any are damaged."""
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
    """Delete stored examples and erase their bytes; see `Store.delete`.

    A damaged embedding or label may prevent opening the store, or deleting from it. The
    examples are then removed from the database without opening the index, and the next
    opening rebuilds that.
    """
    try:
        with open_store(folder, writable=True) as store:
            store.delete(Selection(ids=tuple(ids.tolist())))
            return
    except StoreDamagedError as error:
        _LOG.info("examples are deleted without opening the store: %s", error)
    _delete_unopened(folder, ids)


def _delete_unopened(folder: Path, ids: Ids) -> None:
    with open_rows(folder, writable=True) as (_, rows):
        stream = rows.state().stream
        num_classes = len(stream.num_seen)
        # Labels may be damaged: the policy forgets only possible numbers of examples.
        labels = [
            label
            for label in rows.unchecked_labels(ids)
            if isinstance(label, int) and 0 <= label < num_classes
        ]
        counts = np.bincount(np.array(labels, np.int64), minlength=num_classes)
        counts = np.minimum(counts, stream.num_seen)
        stream = forget(stream, np.repeat(np.arange(num_classes), counts))
        rows.apply(Change(stream=stream, removed=ids, must_erase=True))
        IndexCache(folder / INDEX, rows).clear()
        rows.erase_removed()


@dataclass(frozen=True)
class StoreFinding:
    """A problem of a store, and its fix."""

    problem: str
    fix: str


@dataclass(frozen=True)
class StoreReport:
    """The problems that `verify` found, and the numbers that it counted."""

    findings: tuple[StoreFinding, ...]
    num_examples: int = 0
    num_rows: int = 0
    salvage: Salvage | None = None  # the outcome of copying the readable part


def verify(folder: Path) -> StoreReport:
    """Check the database with all checksums, the saved index, and all files."""
    report = _check_content(folder)
    index_folder = folder / INDEX
    paths = list(folder.iterdir())
    if index_folder.is_dir():
        paths.extend(index_folder.iterdir())
    foreign = (
        StoreFinding(
            f"{path} does not belong to the store", "move it elsewhere, or remove it"
        )
        for path in sorted(paths)
        if not belongs_to_store(folder, path)
    )
    return replace(report, findings=(*report.findings, *foreign))


def _check_content(folder: Path) -> StoreReport:
    try:
        with (
            open_rows(folder) as (identity, rows),
            open_reader(folder / DATABASE) as connection,
        ):
            connection.execute("BEGIN")
            check = DatabaseCheck(folder, identity.spec, connection, rows)
            findings = tuple(check.findings())
            counts = (check.num_examples(), check.num_rows())
            connection.execute("ROLLBACK")
            if not findings:
                of_index = (
                    StoreFinding(
                        f"the saved index {problem}",
                        f"knnper store rewrite {folder} rebuilds it",
                    )
                    for problem in _index_problems(folder / INDEX, identity, rows)
                )
                return StoreReport((*check.erasure(), *of_index), *counts)
    except StoreDamagedError as error:
        findings = (StoreFinding(error.problem or str(error), to_restore(folder)),)
        counts = (0, 0)
    salvageable = None
    # Another process may be writing, or no row can be read.
    with contextlib.suppress(StoreError, OSError):
        salvageable = readable_part(folder)
    return StoreReport(findings, *counts, salvageable)


@dataclass(frozen=True)
class DatabaseCheck:
    """The checks of a database, all on one snapshot."""

    folder: Path
    spec: StoreSpec
    connection: sqlite3.Connection
    rows: Rows

    def findings(self) -> Iterator[StoreFinding]:
        """Yield the problems, but none of examples where SQLite finds a broken file."""
        broken = [row[0] for row in self._query("PRAGMA integrity_check(10)")]
        if broken != ["ok"]:
            yield self._lost(f"the database is damaged: {'; '.join(broken)}")
            return
        for table in blob_tables(self.connection):
            yield from self._content(table)
        # Other versions lack new examples, or are not filled yet.
        without_gaps = [f"embeddings_{self._query('SELECT active FROM store')[0][0]}"]
        if self.spec.input is not None:
            without_gaps.append("inputs")
        for table in without_gaps:
            lacking = self._ids(
                f"SELECT id FROM examples WHERE id NOT IN (SELECT id FROM {table})"
            )
            if lacking:
                yield self._damage(f"{table} lacks a row", lacking)
        yield from self._small_rows()
        yield from self._charges()

    def num_examples(self) -> int:
        """Return the number of stored examples."""
        return int(self._query("SELECT count(*) FROM examples")[0][0])

    def num_rows(self) -> int:
        """Return the number of inputs and of embeddings, over all versions."""
        return sum(
            int(self._query(f"SELECT count(*) FROM {table}")[0][0])
            for table in blob_tables(self.connection)
        )

    def erasure(self) -> Iterator[StoreFinding]:
        """Yield a problem if bytes of deleted examples may be left."""
        if self._query("SELECT erasing FROM store")[0][0]:
            yield StoreFinding(
                "an erasure was interrupted: bytes of deleted examples may be in the "
                "files",
                "end all processes that read the store, then knnper store rewrite "
                f"{self.folder}",
            )

    def _small_rows(self) -> Iterator[StoreFinding]:
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

    def _charges(self) -> Iterator[StoreFinding]:
        ids = np.array(self._ids("SELECT id FROM examples ORDER BY id"), np.int64)
        damaged = ids[np.isnan(read_charges(self.connection, ids))].tolist()
        if damaged:
            yield self._lost(
                f"the charges of {named(damaged)} are not what was written"
            )

    def _content(self, table: str) -> Iterator[StoreFinding]:
        orphans = self._ids(
            f"SELECT id FROM {table} WHERE id NOT IN (SELECT id FROM examples)"
        )
        if orphans:
            yield self._lost(f"{table} has rows without an example: {named(orphans)}")
        wrong = {*damaged_blobs(self.connection, table), *self._misfits(table)}
        wrong -= set(orphans)
        if wrong:
            yield self._damage(f"{table} is not what was written", sorted(wrong))

    def _misfits(self, table: str) -> Iterator[int]:
        """Yield the ids of rows with a wrong length or a number that is not finite."""
        expected = self.spec.input_bytes
        is_vector = table != "inputs"
        if is_vector:
            dim = self._query(
                "SELECT embedding_dim FROM versions WHERE number = ?", table[11:]
            )
            expected = 4 * dim[0][0] if dim else -1
        for example, content in read_blobs(self.connection, table):
            if len(content) != expected or (
                is_vector and not np.isfinite(np.frombuffer(content, np.float32)).all()
            ):
                yield example

    def _damage(self, problem: str, ids: Sequence[object]) -> StoreFinding:
        return StoreFinding(
            f"{len(ids)} examples: {problem}: {named(ids)}",
            to_delete(self.folder, ids),
        )

    def _lost(self, problem: str) -> StoreFinding:
        return StoreFinding(problem, to_restore(self.folder))

    def _ids(self, statement: str) -> list[int]:
        return [row[0] for row in self._query(statement)]

    def _query(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        return self.connection.execute(statement, values).fetchall()


def belongs_to_store(folder: Path, path: Path) -> bool:
    """Return whether ``path`` in a store's folder is one of the store's files."""
    parts = path.relative_to(folder).parts
    if parts[0] != INDEX or len(parts) == 1:
        return parts[0] in _STORE_FILES and len(parts) == 1
    is_file = len(parts) == 2 and not path.is_dir()
    return is_file and any(path.match(pattern) for pattern in _INDEX_FILES)


def _index_problems(folder: Path, identity: StoreIdentity, rows: Rows) -> Iterator[str]:
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
        if cache.problem(active, settings) is not None:
            return
        try:
            index = settings.read(file, active.embedding_dim)
        except StoreDamagedError as error:
            yield f"cannot be read: {error}"
            return
        yield from _content_problems(index, rows)


def _content_problems(index: VectorIndex, rows: Rows) -> Iterator[str]:
    """Yield contradictions between an index and the database.

    The index may lack new examples and contain deleted examples: opening corrects that.
    """
    unknown = index.ids[index.ids > rows.state().stream.num_offered]
    if len(unknown):
        yield f"has examples that were never stored: {named(unknown.tolist())}"
    if not isinstance(index, FlatIndex):
        return
    ids = np.intersect1d(index.ids, rows.contents().ids)
    for part in np.array_split(ids, 1 + len(ids) // 1024):
        stored = rows.vectors(part, rows.state().active.number)
        differs = (index.vectors(part) != stored).any(axis=1)
        if differs.any():
            examples = named(part[differs].tolist())
            yield f"has other embeddings than the database: {examples}"
            return

"""Checks of a store on disk, salvage from a damaged one, and its removal."""

import contextlib
import itertools
import logging
import os
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from knnper.datastore.database import (
    PAGE_BYTES,
    ROWS_AT_ONCE,
    Change,
    Rows,
    StoreRow,
    Version,
    as_contents,
    blob_tables,
    contents_of,
    damaged,
    damaged_examples,
    is_intact,
    log_of,
    opened,
    read_damaged_text,
    row_checksum,
    vectors_table,
)
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
from knnper.datastore.journal import ACKNOWLEDGED, Acknowledged, frames
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
from knnper.files import lock_holder

_LEAF = b"\r"
"""The first byte of a page of rows: https://www.sqlite.org/fileformat2.html."""
_NUM_PAGES_AT = 28
"""Where the first page has the number of pages, big-endian."""
_NUM_COLUMNS = len(fields(StoreRow)) + 2
"""Of the table with the most: ``store``."""


@dataclass(frozen=True)
class Salvage:
    """What can be saved, or was."""

    num_saved: int
    lost: tuple[int, ...]
    num_missing: int
    num_changes_missing: int


def salvage(folder: Path, target: Path) -> Salvage:
    """Save what is intact of the store in ``folder`` as a new store in ``target``."""
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
            new_version = rows.head().active.number
            for change in remains.changes():
                rows.apply(replace(change, version=new_version))
    return remains.report()


def what_is_intact(folder: Path) -> Salvage:
    """Return what `salvage` would save; for that it makes a copy in ``TMPDIR``."""
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
    log = log_of(folder / DATABASE)
    sound = [frame.number for frame in frames(log) if frame.is_sound]
    first_damaged = 1 + max(sound, default=0)
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".salvage-") as name:
        image = Path(name) / DATABASE
        # Where the damaged page is one that nothing can be read without, an older one
        # takes its place.
        for left_out in (0, first_damaged):
            _compose(folder, image, left_out)
            with contextlib.closing(_opened_by_page(image)) as connection:
                remains = _Remains(connection, acknowledged)
                if remains.say_what_they_are:
                    yield remains
                    return
    raise StoreDamagedError(
        f"nothing of {folder} can be saved, for what it says of its settings or of its "
        "model is damaged; restore the folder from a backup, or create the store anew"
    )


def _compose(folder: Path, image: Path, left_out: int) -> None:
    """Write the pages as the log has them, but those of frame ``left_out``."""
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


def _opened_by_page(image: Path) -> sqlite3.Connection:
    """Return a connection to ``image``, in which each page of rows is a table."""
    with image.open("rb") as file:
        kinds = list(iter(lambda: file.read(PAGE_BYTES)[:1], b""))
    leaves = [number for number, kind in enumerate(kinds, 1) if kind == _LEAF]
    columns = ", ".join(f"c{number}" for number in range(1, _NUM_COLUMNS))
    with contextlib.closing(sqlite3.connect(image)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.executemany(
            "INSERT INTO sqlite_master VALUES ('table', ?1, ?1, ?2, "
            f"'CREATE TABLE ' || ?1 || ' (id INTEGER PRIMARY KEY, {columns})')",
            ((f"page_{number}", number) for number in leaves),
        )
    connection = sqlite3.connect(image)
    read_damaged_text(connection)
    return connection


class _Example(NamedTuple):
    id: int
    external_id: str | None
    label: int
    arrival: float


class _Remains:
    """What is left; whether it is intact, the checksum of each row says."""

    def __init__(
        self, connection: sqlite3.Connection, acknowledged: Acknowledged | None
    ) -> None:
        self._connection, self._acknowledged = connection, acknowledged
        self._row: StoreRow | None = None
        self._versions = dict[int, Version]()
        self._examples = dict[int, _Example]()
        self._pages = dict[int, list[str]]()  # that have bytes of an example
        for (page,) in connection.execute("SELECT name FROM sqlite_master").fetchall():
            self._note(page)
        self._num_saved, self._lost = 0, list[int]()

    @property
    def say_what_they_are(self) -> bool:
        return self._row is not None and self._row.active in self._versions

    @property
    def row(self) -> StoreRow:
        """The store's, the newest that is intact."""
        assert self._row is not None, "who asks has looked"
        return self._row

    @property
    def version(self) -> Version:
        """The model that is searched."""
        return self._versions[self.row.active]

    def changes(self) -> Iterator[Change]:
        """Yield additions of what is intact, each of some examples."""
        spec, dim = identity_of(self.row).spec, self.version.embedding_dim
        layout = spec.input
        sizes = {vectors_table(self.version.number): 4 * dim}
        if layout is not None:
            sizes["inputs"] = spec.input_bytes
        stream = self.row.stream_state
        if self._acknowledged is not None:
            # No id is given again.
            last = max(stream.num_offered, self._acknowledged.num_offered)
            stream = replace(stream, num_offered=last)
        ids = sorted(self._examples.keys() | self._pages.keys())
        for first in range(0, len(ids), ROWS_AT_ONCE):
            part = ids[first : first + ROWS_AT_ONCE]
            contents = {one: self._contents(one, sizes) for one in part}
            kept = [one for one in part if len(contents[one]) == len(sizes)]
            self._lost += [one for one in part if len(contents[one]) < len(sizes)]
            self._num_saved += len(kept)
            if not kept:
                continue
            examples = [self._examples[one] for one in kept]
            columns = zip(*(contents[one] for one in kept), strict=True)
            vectors, *inputs = (b"".join(column) for column in columns)
            yield Change(
                stream=stream,
                added=as_contents((one.id, *one[2:]) for one in examples),
                embeddings=np.frombuffer(vectors, np.float32).reshape(-1, dim),
                inputs=None
                if layout is None
                else np.frombuffer(inputs[0], layout.dtype).reshape(-1, *layout.shape),
                external_ids=[one.external_id for one in examples],
            )

    def report(self) -> Salvage:
        """Return what was found."""
        expected = self._acknowledged or self.row
        num_found = self._num_saved + len(self._lost)
        return Salvage(
            self._num_saved,
            tuple(self._lost),
            max(0, expected.num_examples - num_found),
            max(0, expected.num_changes - self.row.num_changes),
        )

    def _contents(self, number: int, sizes: Mapping[str, int]) -> list[bytes]:
        """Return the bytes of an example, of those tables where they are intact."""
        example, rows = self._examples.get(number), list[tuple[Any, Any]]()
        if example is None:
            return []
        for page in self._pages.get(number, ()):
            with contextlib.suppress(sqlite3.Error):
                query = f"SELECT c1, c2 FROM {page} WHERE id = ?"
                rows += self._connection.execute(query, (example.id,))
        intact = {
            table: content
            for table, size in sizes.items()
            for content, checksum in rows
            if is_intact(table, (example.id, example.label, content, checksum))
            and len(content) == size
        }
        return list(intact.values())

    def _note(self, page: str) -> None:
        for (number,) in self._read(f"SELECT id FROM {page} WHERE typeof(c1) = 'blob'"):
            self._pages.setdefault(number, []).append(page)
        query = f"SELECT * FROM {page} WHERE typeof(c1) != 'blob'"
        for number, *values in self._read(query):
            while values and values[-1] is None:
                values.pop()
            if values:
                self._note_row(number, values[:-1], values[-1])

    def _read(self, query: str) -> Iterator[tuple[Any, ...]]:
        """Yield rows from both ends, where something is damaged in between."""
        for order in ("ORDER BY id", "ORDER BY id DESC"):
            with contextlib.suppress(sqlite3.Error):
                yield from self._connection.execute(f"{query} {order}")
                return

    def _note_row(self, number: int, values: list[Any], checksum: object) -> None:
        """Note a row if it is intact; the number of columns tells its table."""
        if len(values) == _NUM_COLUMNS - 2:
            row = StoreRow(values[0], _as_float(values[1]), *values[2:])
            is_newer = self._row is None or row.num_changes > self._row.num_changes
            if row.checksum == checksum and is_newer:
                self._row = row
        elif len(values) == 3:
            example = _Example(number, values[0], values[1], _as_float(values[2]))
            if row_checksum(*example) == checksum:
                self._examples[number] = example
        elif len(values) == 2 and row_checksum(*values) == checksum:
            self._versions[number] = Version(number, *values)


def _as_float(number: Any) -> Any:
    """Return a number of a column of floats, where SQLite keeps whole ones short."""
    return float(number) if isinstance(number, int) else number


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
            opened(folder / DATABASE) as connection,
        ):
            connection.execute("BEGIN")
            check = DatabaseCheck(folder, identity.spec, connection, rows)
            findings = tuple(check.findings())
            counted = check.num_examples(), check.num_rows()
            connection.execute("ROLLBACK")
            if not findings:
                mend = f"knnper store compact {folder} builds it anew"
                of_index = (
                    Finding(f"the saved index {what}", mend)
                    for what in _index_faults(folder / INDEX, identity, rows)
                )
                return Verdict((*check.erasure(), *of_index), *counted)
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

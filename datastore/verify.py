"""Deletion of examples from a store on disk, also of those that are damaged."""

import contextlib
import hashlib
import itertools
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knnper.datastore import schema
from knnper.datastore.database import ACKNOWLEDGED, Change, Rows
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
from knnper.datastore.index_cache import MANIFEST, IndexCache, file_sha256
from knnper.datastore.policy import StreamState, forget
from knnper.datastore.salvage import Salvage, what_is_intact
from knnper.datastore.schema import (
    EXAMPLE,
    all_rows,
    blob_tables,
    damaged_rows,
    opened,
    rows_of,
)
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

    Parameters
    ----------
    folder
        Of the store.
    ids
        What to delete, int64 of shape (m,).

    Raises
    ------
    StoreError
        As `open_store` and `Store.delete`.
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
        stream = _without(rows.head().stream, rows.labels_as_found(ids))
        rows.apply(Change(stream=stream, removed=ids, must_erase=True))
        IndexCache(folder / INDEX, rows).clear()
        rows.erase_removed()


def _without(stream: StreamState, labels: Iterable[object]) -> StreamState:
    """Return the state less what is gone, as far as its labels can be believed."""
    num_classes = len(stream.num_seen)
    known = [one for one in labels if isinstance(one, int) and 0 <= one < num_classes]
    counts = np.bincount(np.array(known, np.int64), minlength=num_classes)
    counts = np.minimum(counts, stream.num_seen)
    return forget(stream, np.repeat(np.arange(num_classes), counts))


Bytes = NDArray[np.uint8]

FRAGMENT_BYTES = 16
"""By chance, the same 16 bytes are nowhere else."""

STRIDE_BYTES = 256
"""There is one fragment in each such part of a row."""

FEWEST_DISTINCT = 6
"""A fragment has so many different bytes at least: a black border says nothing."""

FEWEST_DISTINCT_FIRST = 4
"""And so many in its first half, which is what is looked for at first."""

HEAD_BYTES = 8
"""The first half; what is shorter is not looked for."""

_TABLE_BITS = 22  # a table that fits a processor's cache

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads all bits


class Fragments:
    """The fragments of some secrets."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        self._owners: dict[bytes, list[int]] = {}
        self.num_secrets = 0
        self.unprovable: list[int] = []
        for number, secret in enumerate(secrets):
            self._take(number, secret)
            self.num_secrets += 1
        self._lengths = sorted({len(fragment) for fragment in self._owners})
        heads = b"".join(fragment[:HEAD_BYTES] for fragment in self._owners)
        self._heads = np.unique(np.frombuffer(heads, np.uint64))
        self._table = np.zeros(1 << _TABLE_BITS, np.bool_)
        self._table[_hashed(self._heads)] = True

    @property
    def all(self) -> set[bytes]:
        """Every fragment."""
        return set(self._owners)

    def owners(self, fragment: bytes) -> list[int]:
        """Return the numbers of the secrets that the fragment is of."""
        return self._owners[fragment]

    def find(self, content: Bytes) -> Iterator[tuple[int, bytes]]:
        """Yield where in ``content``, shape (n,), a fragment begins, and which."""
        if not self._owners:
            return
        places = [
            self._likely(content, shift) * HEAD_BYTES + shift
            for shift in range(HEAD_BYTES)
        ]
        for place in np.sort(np.concatenate(places)).tolist():
            for length in self._lengths:
                fragment = content[place : place + length].tobytes()
                if fragment in self._owners:
                    yield place, fragment

    def _take(self, number: int, secret: bytes) -> None:
        found = distinctive(secret)
        if not found:
            self.unprovable.append(number)
        for fragment in found:
            self._owners.setdefault(fragment, []).append(number)

    def _likely(self, content: Bytes, shift: int) -> NDArray[np.intp]:
        """Return which 8 bytes, counted from ``shift`` on, begin a fragment."""
        count = max(0, len(content) - shift) // HEAD_BYTES
        words = content[shift : shift + count * HEAD_BYTES].view(np.uint64)
        possible = np.flatnonzero(self._table[_hashed(words)])
        found = words[possible]
        nearest = np.searchsorted(self._heads, found)
        # What is larger than all of them is compared with the last.
        certain = self._heads[np.minimum(nearest, len(self._heads) - 1)] == found
        places: NDArray[np.intp] = possible[certain]
        return places


def distinctive(secret: bytes) -> list[bytes]:
    """Return one distinctive fragment of each part of ``secret`` that has one."""
    if len(secret) < FRAGMENT_BYTES:
        padded = np.frombuffer(secret, np.uint8)[None]
        long_enough = len(secret) >= HEAD_BYTES
        return [secret] if long_enough and _is_distinctive(padded)[0] else []
    content = np.frombuffer(secret, np.uint8)
    num_windows = len(content) // FRAGMENT_BYTES
    windows = content[: num_windows * FRAGMENT_BYTES].reshape(-1, FRAGMENT_BYTES)
    good = np.flatnonzero(_is_distinctive(windows))
    parts = good * FRAGMENT_BYTES // STRIDE_BYTES
    first = np.unique(parts, return_index=True)[1]
    return [windows[place].tobytes() for place in good[first].tolist()]


def _is_distinctive(windows: Bytes) -> NDArray[np.bool_]:
    enough: NDArray[np.bool_] = _num_distinct(windows) >= FEWEST_DISTINCT
    return enough & (_num_distinct(windows[:, :HEAD_BYTES]) >= FEWEST_DISTINCT_FIRST)


def _num_distinct(rows: Bytes) -> NDArray[np.intp]:
    ordered = np.sort(rows, axis=1)
    steps = ordered[:, 1:] != ordered[:, :-1]
    counts: NDArray[np.intp] = 1 + steps.sum(axis=1, dtype=np.intp)
    return counts


def _hashed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (words * _MULTIPLIER) >> np.uint64(64 - _TABLE_BITS)


CHUNK_BYTES = 1 << 20
"""What is read of a file at once."""


@dataclass(frozen=True)
class Trace:
    """A piece of a secret in a file."""

    file: Path
    offset: int
    secret: int


@dataclass(frozen=True)
class Search:
    """What was looked through, and what was found."""

    found: dict[bytes, set[tuple[Path, int]]]
    num_files: int
    num_bytes: int


@dataclass(frozen=True)
class Proof:
    """What is left of some secrets in a store's folder."""

    num_secrets: int
    traces: tuple[Trace, ...]
    copies: dict[int, int]
    unprovable: tuple[int, ...]
    num_files: int
    num_bytes: int

    @property
    def holds(self) -> bool:
        """Whether nothing is left of those that can be told apart from others."""
        return not self.traces and not self.copies

    @property
    def is_absent(self) -> bool | None:
        """Whether nothing is left of any; None where that cannot be proven of all."""
        if not self.holds:
            return False
        return None if self.unprovable else True


class Secrets:
    """Rows of bytes that must not be found, as far as they must be remembered."""

    def __init__(self, rows: Iterable[bytes]) -> None:
        self.number_of: dict[bytes, int] = {}
        self.fragments = Fragments(self._noted(rows))

    def _noted(self, rows: Iterable[bytes]) -> Iterator[bytes]:
        for number, row in enumerate(rows):
            self.number_of[_digest(row)] = number
            yield row

    def copy_of(self, row: bytes) -> int | None:
        """Return the number of the secret that ``row`` equals."""
        return self.number_of.get(_digest(row))


def traces(folder: Path, secrets: Sequence[bytes]) -> list[Trace]:
    """Return where in the files of ``folder`` a fragment of a secret is."""
    fragments = Fragments(secrets)
    return list(_traces(search(folder, fragments), fragments, set()))


def search(folder: Path, fragments: Fragments) -> Search:
    """Return where fragments are in the files of ``folder``, at any place."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found: dict[bytes, set[tuple[Path, int]]] = {}
    num_bytes = 0
    for path in files:
        for start, chunk in _chunks(path):
            for place, fragment in fragments.find(chunk):
                found.setdefault(fragment, set()).add((path, start + place))
        num_bytes += path.stat().st_size
    return Search(found, len(files), num_bytes)


def stored_bytes(folder: Path, ids: Ids) -> Iterator[bytes]:
    """Yield the bytes of the inputs, and of all embeddings, of ``ids`` (m,)."""
    for _, content in stored_rows(folder, ids):
        yield content


def stored_rows(folder: Path, ids: Ids) -> Iterator[tuple[str, bytes]]:
    """Yield what `stored_bytes` does, each with what it is of which example."""
    with opened(folder / DATABASE) as connection:
        for table in blob_tables(connection):
            what = "input" if table == "inputs" else "embedding"
            for example, content in rows_of(connection, table, ids):
                yield f"the {what} of example {example}", content


def prove_absence(folder: Path, secrets: Secrets) -> Proof:
    """Look for what is left of ``secrets`` in the folder of a store."""
    fragments = secrets.fragments
    result = search(folder, fragments)
    shared, copies = set[bytes](), dict[int, int]()
    if result.found or fragments.unprovable:
        shared, copies = _in_stored(folder, secrets, set(result.found))
    return Proof(
        fragments.num_secrets,
        tuple(_traces(result, fragments, shared)),
        copies,
        tuple(sorted(_without_own(fragments, shared) - copies.keys())),
        result.num_files,
        result.num_bytes,
    )


def _traces(
    result: Search, fragments: Fragments, shared: set[bytes]
) -> Iterator[Trace]:
    for fragment in result.found.keys() - shared:
        for file, offset in result.found[fragment]:
            for secret in fragments.owners(fragment):
                yield Trace(file, offset, secret)


def _in_stored(
    folder: Path, secrets: Secrets, found: set[bytes]
) -> tuple[set[bytes], dict[int, int]]:
    """Return which fragments are in stored examples, and which secrets are one."""
    wanted = Fragments(found)
    shared, copies = set[bytes](), dict[int, int]()
    with opened(folder / DATABASE) as connection:
        for table in blob_tables(connection):
            for rows in all_rows(connection, table):
                shared |= _within(wanted, [row for _, row in rows])
                for example, row in rows:
                    secret = secrets.copy_of(row)
                    if secret is not None:
                        copies[secret] = example
    return shared, copies


def _within(wanted: Fragments, rows: Sequence[bytes]) -> set[bytes]:
    """Return the fragments that one of the rows contains, not two of them together."""
    ends = np.cumsum([len(row) for row in rows])
    content = np.frombuffer(b"".join(rows), np.uint8)
    return {
        fragment
        for place, fragment in wanted.find(content)
        if place + len(fragment) <= ends[np.searchsorted(ends, place, side="right")]
    }


def _without_own(fragments: Fragments, shared: set[bytes]) -> set[int]:
    """Return the secrets that have no fragment but in stored examples."""
    lost = set(fragments.unprovable)
    touched = {number for one in shared for number in fragments.owners(one)}
    if touched:
        provable = {
            number
            for fragment in fragments.all - shared
            for number in fragments.owners(fragment)
        }
        lost |= touched - provable
    return lost


def _chunks(path: Path) -> Iterator[tuple[int, Bytes]]:
    """Yield the content of a file, in chunks that overlap, and where each begins."""
    overlap = FRAGMENT_BYTES - 1
    with path.open("rb") as file:
        start, tail = 0, b""
        while block := file.read(CHUNK_BYTES):
            content = tail + block
            yield start, np.frombuffer(content, np.uint8)
            tail = content[-overlap:]
            start += len(content) - len(tail)


def _digest(row: bytes) -> bytes:
    return hashlib.blake2b(row, digest_size=16).digest()


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
        findings, counted = (
            (Finding(error.found or str(error), to_restore(folder)),),
            (0, 0),
        )
    return Verdict(findings, *counted, _saving(folder))


def _saving(folder: Path) -> Salvage | None:
    # Somebody may write, TMPDIR be full, or nothing be left.
    with contextlib.suppress(StoreError, OSError):
        return what_is_intact(folder)
    return None


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
            found = f"the database is damaged: {'; '.join(broken)}"
            yield Finding(found, to_restore(self.folder))
            return
        for table in blob_tables(self.connection):
            yield from self._content(table)
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
            yield Finding(error.found, to_restore(self.folder))

    def _content(self, table: str) -> Iterator[Finding]:
        orphans = self._ids(
            f"SELECT id FROM {table} WHERE id NOT IN (SELECT id FROM examples)"
        )
        if orphans:
            found = f"{table} has rows of no example: {named(orphans)}"
            yield Finding(found, to_restore(self.folder))
        wrong = {
            *schema.damaged(self.connection, table),
            *self._misfits(table),
        }
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
        parts = all_rows(self.connection, table)
        for example, content in itertools.chain.from_iterable(parts):
            if len(content) != expected or (
                is_vector and not np.isfinite(np.frombuffer(content, np.float32)).all()
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

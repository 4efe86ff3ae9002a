"""Whether bytes of deleted examples are left in any file of a store's folder.

A distinctive fragment of each part of each secret is looked for, at any place.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.database import blob_tables, contents_of, opened
from knnper.datastore.examples import Ids
from knnper.datastore.store import DATABASE

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
    """The fragments of some secrets; what is kept of each is a sixteenth."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        # Numbers, from 0, of the secrets that a fragment is of.
        self.owners: dict[bytes, list[int]] = {}
        self.num_secrets = 0
        # Those without a distinctive fragment, such as an image of one colour: their
        # bytes are found anywhere.
        self.unprovable: list[int] = []
        for number, secret in enumerate(secrets):
            found = distinctive(secret)
            if not found:
                self.unprovable.append(number)
            for fragment in found:
                self.owners.setdefault(fragment, []).append(number)
            self.num_secrets += 1
        self._lengths = sorted({len(fragment) for fragment in self.owners})
        heads = b"".join(fragment[:HEAD_BYTES] for fragment in self.owners)
        self._begins = np.zeros(1 << _TABLE_BITS, np.bool_)
        self._begins[_hashed(np.frombuffer(heads, np.uint64))] = True

    def find(self, content: Bytes) -> Iterator[tuple[int, bytes]]:
        """Yield where in ``content``, shape (n,), a fragment begins, and which."""
        if not self.owners:
            return
        places = []
        for shift in range(HEAD_BYTES):
            # Which 8 bytes, counted from there on, may begin a fragment.
            count = max(0, len(content) - shift) // HEAD_BYTES
            words = content[shift : shift + count * HEAD_BYTES].view(np.uint64)
            likely = np.flatnonzero(self._begins[_hashed(words)])
            places.append(likely * HEAD_BYTES + shift)
        for place in np.sort(np.concatenate(places)).tolist():
            for length in self._lengths:
                fragment = content[place : place + length].tobytes()
                if fragment in self.owners:
                    yield place, fragment


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
Places = dict[bytes, set[tuple[Path, int]]]
"""Each fragment that was found, and where: files and offsets."""


@dataclass(frozen=True)
class Trace:
    """A piece of a secret in a file."""

    file: Path
    offset: int
    secret: int  # number, from 0, of what it is a piece of


@dataclass(frozen=True)
class Proof:
    """What is left of some secrets in a store's folder."""

    num_secrets: int
    traces: tuple[Trace, ...]  # what a stored example contains as well is none
    copies: dict[int, int]  # secrets that a stored example consists of, and its id
    # Secrets without a fragment of their own: each is an image of one colour or the
    # like, or every fragment of it is in some stored example as well.
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
    """Inputs or embeddings that must not be found, as far as must be remembered."""

    def __init__(self, rows: Iterable[tuple[str, bytes]]) -> None:
        self.names: list[str] = []
        self.number_of: dict[bytes, int] = {}  # by what stands for a row's bytes

        def noted() -> Iterator[bytes]:
            for number, (name, row) in enumerate(rows):
                self.names.append(name)
                self.number_of[_digest(row)] = number
                yield row

        self.fragments = Fragments(noted())


def search(folder: Path, fragments: Fragments) -> tuple[Places, int, int]:
    """Return where fragments are, and how many files and bytes were read."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found: Places = {}
    for path in files:
        for start, chunk in _chunks(path):
            for place, fragment in fragments.find(chunk):
                found.setdefault(fragment, set()).add((path, start + place))
    return found, len(files), sum(path.stat().st_size for path in files)


def stored_rows(folder: Path, ids: Ids) -> Iterator[tuple[str, bytes]]:
    """Yield the inputs, and all embeddings, of ``ids`` (m,), damaged or not."""
    with opened(folder / DATABASE) as connection:
        for table in blob_tables(connection):
            what = "input" if table == "inputs" else "embedding"
            for rows in contents_of(connection, table, ids):
                for example, content in rows:
                    yield f"the {what} of example {example}", content


def prove_absence(folder: Path, secrets: Secrets) -> Proof:
    """Look for what is left of ``secrets`` in the folder of a store.

    Deleted examples share fragments with others: duplicates, white borders. What is
    found and is in a stored example too is no trace, but if a stored example *is* the
    secret, it is named.
    """
    fragments = secrets.fragments
    found, num_files, num_bytes = search(folder, fragments)
    shared, copies = set[bytes](), dict[int, int]()
    if found or fragments.unprovable:
        shared, copies = _in_stored(folder, secrets, set(found))
    traces = (
        Trace(file, offset, secret)
        for fragment in found.keys() - shared
        for file, offset in found[fragment]
        for secret in fragments.owners[fragment]
    )
    return Proof(
        fragments.num_secrets,
        tuple(traces),
        copies,
        tuple(sorted(_without_own(fragments, shared) - copies.keys())),
        num_files,
        num_bytes,
    )


def _in_stored(
    folder: Path, secrets: Secrets, found: set[bytes]
) -> tuple[set[bytes], dict[int, int]]:
    """Return which fragments are in stored examples, and which secrets are one."""
    wanted = Fragments(found)
    shared, copies = set[bytes](), dict[int, int]()
    with opened(folder / DATABASE) as connection:
        for table in blob_tables(connection):
            for rows in contents_of(connection, table):
                shared |= _within(wanted, [row for _, row in rows])
                for example, row in rows:
                    if (digest := _digest(row)) in secrets.number_of:
                        copies[secrets.number_of[digest]] = example
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
    touched = {number for one in shared for number in fragments.owners[one]}
    if touched:
        own = fragments.owners.keys() - shared
        lost |= touched - {number for one in own for number in fragments.owners[one]}
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

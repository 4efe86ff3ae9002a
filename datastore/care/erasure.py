"""The proof that deleted examples are gone: every byte of every file is looked at."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datastore.care.fragments import FRAGMENT_BYTES, Bytes, Fragments
from datastore.contents import Ids
from datastore.folder import DATABASE
from datastore.sqlite.raw import all_rows, blob_columns, opened, rows_of

CHUNK_BYTES = 1 << 20
"""What is read of a file at once."""


@dataclass(frozen=True)
class Trace:
    """A piece of a secret in a file.

    Attributes
    ----------
    file
        Where it is.
    offset
        Bytes before it.
    secret
        Number, from 0, of what it is a piece of.
    """

    file: Path
    offset: int
    secret: int


@dataclass(frozen=True)
class Search:
    """What was looked through, and what was found.

    Attributes
    ----------
    found
        Each fragment that was found, and where: files and offsets.
    num_files, num_bytes
        Of the folder.
    """

    found: dict[bytes, set[tuple[Path, int]]]
    num_files: int
    num_bytes: int


@dataclass(frozen=True)
class Proof:
    """What is left of some secrets in a store's folder.

    Attributes
    ----------
    num_secrets
        How many were looked for.
    traces
        Of them. What a stored example contains as well is none.
    copies
        Secrets that a stored example consists of, and its id.
    unprovable
        Secrets without a fragment of their own: each is an image of one colour or the
        like, or every fragment of it is in some stored example as well.
    num_files, num_bytes
        Of the folder.
    """

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
    """Rows of bytes that must not be found, as far as they must be remembered.

    Parameters
    ----------
    rows
        The bytes of inputs or embeddings; read once, one after the other.
    """

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
    """Return where in the files of ``folder`` a fragment of a secret is.

    Parameters
    ----------
    folder
        Whose files, and those of all folders in it, are read from end to end.
    secrets
        Such as the bytes of raw inputs. See `Fragments` for those that cannot be
        looked for.
    """
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
    """Yield the bytes of the inputs, and of all embeddings, of ``ids`` (m,).

    They are read as they are, also where they are damaged.
    """
    for _, content in stored_rows(folder, ids):
        yield content


def stored_rows(folder: Path, ids: Ids) -> Iterator[tuple[str, bytes]]:
    """Yield what `stored_bytes` does, each with what it is of which example."""
    with opened(folder / DATABASE) as connection:
        for table, column in blob_columns(connection):
            what = "input" if column == "input" else "embedding"
            for example, content in rows_of(connection, table, column, ids):
                yield f"the {what} of example {example}", content


def prove_absence(folder: Path, secrets: Secrets) -> Proof:
    """Look for what is left of ``secrets`` in the folder of a store.

    Deleted examples share fragments with others: duplicates, white borders. What is
    found and is in a stored example too is no trace, but if a stored example *is* the
    secret, it is named.

    Parameters
    ----------
    folder
        Of a store.
    secrets
        What must not be there.

    Raises
    ------
    StoreError
        If there is no store, or it cannot be read.
    """
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
        for table, column in blob_columns(connection):
            for rows in all_rows(connection, table, column):
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

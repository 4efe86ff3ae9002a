"""Client states between rounds, in a bounded number of databases."""

import contextlib
import hashlib
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from knnper.datastore.database import (
    PAGE_BYTES,
    Connection,
    connect_unlogged,
    transaction,
    understood,
)
from knnper.datastore.examples import StoreDamagedError
from knnper.errors import CheckpointError, RunError
from knnper.files import parse_json
from knnper.records import Parts, canonical, put_together, take_apart

R = TypeVar("R")
MOST_BYTES = 999_000_000
"""Of one state: SQLite takes rows of less than 10^9 bytes."""
# With states of many pages, larger ones are written and read in half the time.
_LARGE_BYTES, _LARGE_PAGE_BYTES = 2**20, 2**16
_TABLE = """states (
    client TEXT NOT NULL,
    aside INTEGER NOT NULL,
    round INTEGER NOT NULL,
    state BLOB NOT NULL,
    UNIQUE (client, aside, round)
)"""
_OWN = "client = ? AND aside = 0"
_ASIDE = "aside"
_CHECKSUM = "crc32"  # in the metadata of a state


class ClientStateStore:
    """Client states in a folder, by client and round.

    Workers of several machines may use it at once, each client being run by one. What
    `save` has written is on disk when it returns, and whole or not there after a kill.
    """

    # After a kill a client resumes from the state it had at the server's checkpoint.
    # Newer ones are put aside until the run has passed their round: the server may go
    # back to them.
    # A client's name says which of 256 databases has its states: a million clients are
    # no million files, and workers seldom wait for each other.

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, record_type: type[R], client: str, after_round: int) -> R | None:
        """Return the newest state of a round or before; None if there is none."""
        if not (self._path(client).exists() or self._former(client)):
            return None
        with self._opened(client) as connection:
            self._go_to(connection, client, after_round)
            newest = f"SELECT round, state FROM states WHERE {_OWN} ORDER BY round DESC"
            found = connection.execute(f"{newest} LIMIT 1", (client,)).fetchone()
        if found is None:
            return None
        server_round, content = found
        try:
            parts = _parts(content, client, server_round)
            return canonical(put_together(record_type, parts))
        except Exception as error:
            raise self._unreadable(client, error) from error

    def save(
        self, client: str, server_round: int, state: object, keep: Collection[int]
    ) -> None:
        """Write the client's state; those stay that the rounds ``keep`` go back to."""
        parts = take_apart(state)
        tensors = {name: tensor.contiguous() for name, tensor in parts.tensors.items()}
        metadata = {
            "structure": parts.structure,
            _CHECKSUM: _checksum(client, server_round, parts.structure, tensors),
        }
        content = save(tensors, metadata)
        if len(content) > MOST_BYTES:
            raise RunError(
                f"the state of client {client!r} has {len(content):,} bytes, expected "
                f"at most {MOST_BYTES:,}; choose a method whose clients keep less, or "
                "train less of the network (model.trained)"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        with (
            self._opened(client, len(content)) as connection,
            transaction(connection, self._path(client), writing=True),
        ):
            # Before others are deleted: pages that are freed in a transaction would be
            # copied to its journal before they are used again.
            connection.execute(
                "INSERT OR REPLACE INTO states VALUES (?, 0, ?, ?)",
                (client, server_round, content),
            )
            _prune(connection, client, keep)

    def _go_to(self, connection: Connection, client: str, server_round: int) -> None:
        """Put aside what is newer than a round; restore what was put aside of it."""
        own, aside = _rounds(connection, client)
        is_missing = server_round in aside and server_round not in own
        if not (is_missing or any(one > server_round for one in own)):
            return
        with transaction(connection, self._path(client), writing=True):
            connection.execute(
                f"UPDATE OR REPLACE states SET aside = 1 WHERE {_OWN} AND round > ?",
                (client, server_round),
            )
            if is_missing:
                connection.execute(
                    "UPDATE states SET aside = 0 WHERE client = ? AND round = ?",
                    (client, server_round),
                )

    @contextlib.contextmanager
    def _opened(self, client: str, num_bytes: int = 0) -> Iterator[Connection]:
        """Yield a connection to the client's database, made for states of this size."""
        path = self._path(client)
        page_bytes = _LARGE_PAGE_BYTES if num_bytes > _LARGE_BYTES else PAGE_BYTES
        try:
            # Not kept open: a process that is forked may not use its parent's.
            with (
                contextlib.closing(connect_unlogged(path, page_bytes)) as connection,
                understood(path),
            ):
                connection.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE}")
                self._take_over(connection, client)
                yield connection
        except StoreDamagedError as error:
            raise self._unreadable(client, error.found) from error

    def _take_over(self, connection: Connection, client: str) -> None:
        """Move here what version 0.1.0 has written."""
        if not (former := self._former(client)):
            return
        rows = (
            (client, path.parent.name == _ASIDE, _round_of(path), path.read_bytes())
            for path in former
        )
        with transaction(connection, self._path(client), writing=True):
            connection.executemany(
                "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)", rows
            )
        for path in former:
            path.unlink()
        for folder in (self._folder / client / _ASIDE, self._folder / client):
            with contextlib.suppress(OSError):  # it may hold something else
                folder.rmdir()

    def _former(self, client: str) -> list[Path]:
        """Return the files that version 0.1.0 has written, one a state."""
        folder = self._folder / client
        if not folder.is_dir():
            return []
        name = "round-*.safetensors"
        return [*folder.glob(name), *folder.glob(f"{_ASIDE}/{name}")]

    def _unreadable(self, client: str, why: object) -> CheckpointError:
        return CheckpointError(
            f"the state of client {client!r} in {self._path(client)} cannot be read "
            f"({why}); remove the run's folder and start again"
        )

    def _path(self, client: str) -> Path:
        digits = hashlib.sha256(client.encode()).hexdigest()[:2]
        return self._folder / f"{digits}.sqlite"


def _round_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _checksum(
    client: str, server_round: int, structure: str, tensors: Mapping[str, Tensor]
) -> str:
    """Return the CRC-32 of a state together with its client and round."""
    checksum = zlib.crc32(f"{client} {server_round} {structure}".encode())
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(tensor.numpy().data, checksum)
    return f"{checksum:08x}"


def _parts(content: bytes, client: str, server_round: int) -> Parts:
    size = int.from_bytes(content[:8], "little")
    if size > len(content):
        raise SafetensorError(f"its header would be {size} bytes long")
    metadata = parse_json(content[8 : 8 + size])["__metadata__"]
    structure, tensors = metadata["structure"], load(content)
    found = _checksum(client, server_round, structure, tensors)
    # Version 0.1.0 wrote none.
    if metadata.get(_CHECKSUM, found) != found:
        raise ValueError("it is not what was written")
    return Parts(tensors, structure)


def _rounds(connection: Connection, client: str) -> tuple[list[int], list[int]]:
    """Return the rounds of which there is a state, and those that are put aside."""
    found = connection.execute(
        "SELECT aside, round FROM states WHERE client = ?", (client,)
    ).fetchall()
    own, aside = ([one for put, one in found if put == kind] for kind in (0, 1))
    return own, aside


def _prune(connection: Connection, client: str, keep: Collection[int]) -> None:
    latest = max(keep, default=0)
    own, aside = _rounds(connection, client)
    needed = {max((r for r in own if r <= one), default=0) for one in keep}
    unneeded = [(client, r) for r in own if r <= latest and r not in needed]
    if unneeded:
        connection.executemany(
            f"DELETE FROM states WHERE {_OWN} AND round = ?", unneeded
        )
    if aside and max(aside) <= latest:
        connection.execute(
            "DELETE FROM states WHERE client = ? AND aside = 1", (client,)
        )

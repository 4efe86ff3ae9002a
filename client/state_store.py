"""States that clients keep between rounds, in a bounded number of SQLite databases."""

import contextlib
import hashlib
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from knnper.datastore.connection import (
    PAGE_BYTES,
    Connection,
    connect_without_log,
    transaction,
    translate_errors,
)
from knnper.datastore.examples import StoreDamagedError
from knnper.errors import CheckpointError, RunError
from knnper.files import parse_json
from knnper.records import Parts, canonical, put_together, take_apart

R = TypeVar("R")

MOST_BYTES = 999_000_000  # of a state: SQLite takes rows of less than 10^9 bytes
# Larger pages halve the time to write and read states of many pages.
_LARGE_BYTES = 2**20
_LARGE_PAGE_BYTES = 2**16
_TABLE = """states (
    client TEXT NOT NULL,
    round INTEGER NOT NULL,
    state BLOB NOT NULL,
    UNIQUE (client, round)
)"""
_CHECKSUM = "crc32"  # in the metadata of a state


class ClientStateStore:
    """Client states in a folder, by client and round.

    Workers of several machines may use the folder at once, each client being run by one
    worker. A state that `save` has written is on disk when it returns; after a kill it
    exists as a whole or not at all.

    After a kill a client resumes from the state it had at the server's checkpoint, and
    newer states are deleted when it trains. A client's name decides which of 256
    databases holds its states: so a million clients do not need a million files, and
    workers seldom wait for a lock.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(
        self,
        record_type: type[R],
        client: str,
        after_round: int,
        *,
        delete_later: bool = False,
    ) -> R | None:
        """Return the newest state of a round or before; None if there is none.

        ``delete_later`` is for training, with which the run continues from
        ``after_round``. An evaluation may use an older state than the newest one.
        """
        if not self._path(client).exists():
            return None
        with self._opened(client) as connection:
            newest = max(_rounds(connection, client), default=0)
            if delete_later and newest > after_round:
                with transaction(connection, self._path(client), writing=True):
                    connection.execute(
                        "DELETE FROM states WHERE client = ? AND round > ?",
                        (client, after_round),
                    )
            row = connection.execute(
                "SELECT round, state FROM states WHERE client = ? AND round <= ? "
                "ORDER BY round DESC LIMIT 1",
                (client, after_round),
            ).fetchone()
        if row is None:
            return None
        server_round, content = row
        try:
            parts = _read_parts(content, client, server_round)
            return canonical(put_together(record_type, parts))
        except Exception as error:
            raise self._unreadable(client, error) from error

    def save(
        self, client: str, server_round: int, state: object, keep: Collection[int]
    ) -> None:
        """Write a client's state; the rounds ``keep`` and what they need stay."""
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
                f"at most {MOST_BYTES:,}; choose a method with smaller states, or "
                "train less of the network (model.trained)"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        with (
            self._opened(client, len(content)) as connection,
            transaction(connection, self._path(client), writing=True),
        ):
            # Inserted before others are deleted: pages that are freed in a transaction
            # would be copied to its journal before they are used again.
            connection.execute(
                "INSERT OR REPLACE INTO states VALUES (?, ?, ?)",
                (client, server_round, content),
            )
            _prune(connection, client, keep)

    @contextlib.contextmanager
    def _opened(self, client: str, num_bytes: int = 0) -> Iterator[Connection]:
        """Yield a connection to the client's database, made for states of this size."""
        path = self._path(client)
        page_bytes = _LARGE_PAGE_BYTES if num_bytes > _LARGE_BYTES else PAGE_BYTES
        try:
            # Not kept open: a process that is forked may not use its parent's.
            with (
                contextlib.closing(connect_without_log(path, page_bytes)) as connection,
                translate_errors(path),
            ):
                connection.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE}")
                yield connection
        except StoreDamagedError as error:
            raise self._unreadable(client, error.problem) from error

    def _unreadable(self, client: str, why: object) -> CheckpointError:
        return CheckpointError(
            f"the state of client {client!r} in {self._path(client)} cannot be read "
            f"({why}); remove the run's folder and start again"
        )

    def _path(self, client: str) -> Path:
        digits = hashlib.sha256(client.encode()).hexdigest()[:2]
        return self._folder / f"{digits}.sqlite"


def _checksum(
    client: str, server_round: int, structure: str, tensors: Mapping[str, Tensor]
) -> str:
    """Compute the CRC-32 of a state together with its client and round."""
    checksum = zlib.crc32(f"{client} {server_round} {structure}".encode())
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(tensor.numpy().data, checksum)
    return f"{checksum:08x}"


def _read_parts(content: bytes, client: str, server_round: int) -> Parts:
    size = int.from_bytes(content[:8], "little")
    if size > len(content):
        raise SafetensorError(f"its header would be {size} bytes long")
    metadata = parse_json(content[8 : 8 + size])["__metadata__"]
    structure = metadata["structure"]
    tensors = load(content)
    if metadata[_CHECKSUM] != _checksum(client, server_round, structure, tensors):
        raise ValueError("its checksum differs from what was written")
    return Parts(tensors, structure)


def _rounds(connection: Connection, client: str) -> list[int]:
    rows = connection.execute("SELECT round FROM states WHERE client = ?", (client,))
    return [number for (number,) in rows]


def _prune(connection: Connection, client: str, keep: Collection[int]) -> None:
    """Delete states that no round of ``keep`` needs."""
    latest = max(keep, default=0)
    rounds = _rounds(connection, client)
    needed = {
        max((number for number in rounds if number <= kept_round), default=0)
        for kept_round in keep
    }
    unneeded = [
        (client, number)
        for number in rounds
        if number <= latest and number not in needed
    ]
    if unneeded:
        connection.executemany(
            "DELETE FROM states WHERE client = ? AND round = ?", unneeded
        )

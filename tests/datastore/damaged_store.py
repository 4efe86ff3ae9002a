"""Stores whose process was killed, and what becomes of their files."""

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from knnper.datastore.connection import PAGE_BYTES, log_path
from knnper.datastore.examples import Selection
from knnper.datastore.store import DATABASE, Store, open_store
from tests.datastore.small_store import small_store, some

FRAME = 24 + PAGE_BYTES
COUNT = 30
"""Examples that `small_store` begins with."""


def left_by_a_kill(folder: Path, work: Callable[[Store], object]) -> Path:
    """Return a store that a process has worked on, and was killed."""
    if not folder.exists():
        small_store(folder).close()
    child = os.fork()
    if child == 0:
        try:
            with open_store(folder, writable=True) as store:
                work(store)
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the process failed before it was killed"
    return folder


def a_history(store: Store) -> None:
    """Do what stores do, with frames of an older log behind those of the newest."""
    store.delete(Selection(ids=(3, 4)))
    for number in range(6):
        store.add(some(1 + number, number, f"first/{number}"))
    log = store._rows._log
    assert log is not None
    log.connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    for number in range(4):
        store.add(some(1 + number % 2, number, f"second/{number}"))


def rows_of(folder: Path) -> dict[int, tuple[object, ...]]:
    """Return all that a store holds, by id."""
    with open_store(folder) as store:
        held = store.contents()
        columns: list[Iterable[object]] = [
            held.labels.tolist(),
            held.arrivals.tolist(),
            store.external_ids(held.ids),
            (row.tobytes() for row in store.vectors(held.ids).numpy()),
            (row.tobytes() for row in store.inputs(held.ids).numpy()),
            [store.fingerprint] * len(held),
        ]
        return dict(zip(held.ids.tolist(), zip(*columns, strict=True), strict=True))


def write_flipped(path: Path, content: bytes, bit: int) -> None:
    """Write ``content`` with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)


def log_in(folder: Path) -> Path:
    """Return the log of a store."""
    return log_path(folder / DATABASE)

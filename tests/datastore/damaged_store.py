"""Stores whose process was killed, and what becomes of their files."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from knnper.datastore.database import PAGE_BYTES, log_of
from knnper.datastore.examples import Selection, StoreDamagedError
from knnper.datastore.store import DATABASE, Store, open_store
from knnper.datastore.verify import verify
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
    log = store._rows._writer
    assert log is not None
    log.execute("PRAGMA wal_checkpoint(PASSIVE)")
    for number in range(4):
        store.add(some(1 + number % 2, number, f"second/{number}"))


def state(folder: Path) -> tuple[object, ...]:
    """Return all that a store holds."""
    with open_store(folder) as store:
        held = store.contents()
        return (
            held.ids.tolist(),
            held.labels.tolist(),
            held.arrivals.tolist(),
            store.external_ids(held.ids),
            store.vectors(held.ids).numpy().tobytes(),
            store.inputs(held.ids).numpy().tobytes(),
            store.fingerprint,
        )


@dataclass(frozen=True)
class Damaged:
    """A folder to which something was done."""

    folder: Path
    changed: str

    def outcome(self, expected: tuple[object, ...]) -> str:
        """Return "same", "refused" or "silent": what opening and reading comes to."""
        try:
            found = state(self.folder)
        except StoreDamagedError:
            return "refused"
        return "same" if found == expected else "silent"

    def is_found(self) -> bool:
        """Return whether `verify` finds something."""
        return bool(verify(self.folder).findings)


def flipped(
    folder: Path, name: str, num_flips: int, num_bytes: int | None = None
) -> Iterator[Damaged]:
    """Yield copies of a store with one random bit of a file changed."""
    copy = folder.with_name("flipped")
    content = (folder / name).read_bytes()
    generator = np.random.default_rng(num_flips)
    for _ in range(num_flips):
        bit = int(generator.integers(0, 8 * (num_bytes or len(content))))
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        write_flipped(copy / name, content, bit)
        yield Damaged(copy, f"bit {bit % 8} of byte {bit // 8} of {name}")


def write_flipped(path: Path, content: bytes, bit: int) -> None:
    """Write ``content`` with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)


def log_in(folder: Path) -> Path:
    """Return the log of a store."""
    return log_of(folder / DATABASE)

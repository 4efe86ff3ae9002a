"""A store on disk belongs to the process that opened it."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.datastore.examples import StoreError
from knnper.datastore.local_memory import LocalMemory
from knnper.datastore.store import Store, StoreReader, open_store
from knnper.files import FileLock, LockHeldError
from tests.datastore.small_store import examples, forked, new_store

COUNT = 60
FEATURES = np.random.default_rng(0).normal(size=(COUNT, 4)).astype(np.float32)
LABELS = np.arange(COUNT) % 3
NAMES = [f"person-{row}" for row in range(COUNT)]


def _use(attempts: list[Callable[[], object]], pipe: Any) -> None:
    """Send the error of each attempt."""
    refused = []
    for attempt in attempts:
        try:
            attempt()
        except StoreError as error:
            refused.append(str(error))
    pipe.send(refused)


def refusals(attempts: list[Callable[[], object]]) -> list[str]:
    """Return the errors of attempts in a forked process, its id first."""
    child, pipe = forked(_use, attempts)
    errors = [str(child.pid), *pipe.recv()]
    child.join()
    return errors


def test_a_forked_process_cannot_use_a_memory(tmp_path: Path) -> None:
    LocalMemory().fit(FEATURES, LABELS, names=NAMES).save(tmp_path / "memory")
    with LocalMemory.load(tmp_path / "memory") as memory:
        child, *refused = refusals(
            [
                lambda: memory.partial_fit(FEATURES[:3] + 9, [1, 1, 1]),
                lambda: memory.forget(names=["person-0"]),
                lambda: memory.predict(FEATURES),
                lambda: memory.neighbors(FEATURES[:1]),
                lambda: memory.save(tmp_path / "copy"),
                memory.close,
            ]
        )
        assert len(refused) == 5
        assert all(f"process {child}, which was forked from it" in it for it in refused)
        # The lock is still held, and nothing has changed.
        with pytest.raises(StoreError, match="writes to"):
            LocalMemory.load(tmp_path / "memory")
        memory.partial_fit(FEATURES[:2] - 9, [0, 0], names=["new-1", "new-2"])
        assert memory.neighbors(FEATURES[:1]).names[0, 0] == NAMES[0]
    with LocalMemory.load(tmp_path / "memory") as again:
        assert len(again.store_) == COUNT + 2


def _leave(store: Store, pipe: Any) -> None:
    # What is collected here must not copy or empty the log, nor release the lock.
    store.__dict__.clear()
    pipe.send(None)


def test_what_a_forked_process_leaves_is_left_alone(tmp_path: Path) -> None:
    with new_store(tmp_path / "s", 3) as store:
        child, pipe = forked(_leave, store)
        pipe.recv()
        child.join()
        with pytest.raises(StoreError, match="writes to"):
            open_store(tmp_path / "s", writable=True)
        store.add(examples(2, seed=1))
    with open_store(tmp_path / "s") as again:
        assert len(again) == 5


def test_a_forked_process_cannot_use_a_reader(tmp_path: Path) -> None:
    new_store(tmp_path / "s", 3).close()
    with open_store(tmp_path / "s") as reader:
        queries = examples(1).embeddings
        attempts: list[Callable[[], object]] = [
            reader.contents,
            lambda: reader.search(queries, 1),
            lambda: reader.external_ids(np.array([1])),
            reader.close,
        ]
        assert len(refusals(attempts)) == 1 + 3
        assert len(reader) == 3


def _open(folder: Path, pipe: Any) -> None:
    with open_store(folder) as store:
        pipe.send(len(store))


def test_a_forked_process_may_open_the_store_itself(tmp_path: Path) -> None:
    store: StoreReader = new_store(tmp_path / "s", 3)
    with store:
        child, pipe = forked(_open, tmp_path / "s")
        assert pipe.recv() == 3
        child.join()


def _answer(memory: LocalMemory) -> float:
    return memory.score(FEATURES, LABELS)


def test_a_memory_in_memory_answers_in_a_forked_process() -> None:
    memory = LocalMemory().fit(FEATURES, LABELS)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_answer, (memory,)) == memory.score(FEATURES, LABELS)


def _release(lock: FileLock, pipe: Any) -> None:
    lock.release()
    pipe.send(None)


def test_a_forked_process_does_not_release_a_lock(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock") as lock:
        child, pipe = forked(_release, lock)
        pipe.recv()
        child.join()
        with pytest.raises(LockHeldError):
            FileLock(tmp_path / "lock")
    FileLock(tmp_path / "lock").release()

"""Full disks, failed erasures, readers in the way: what is kept and what is said."""

import contextlib
import resource
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from knnper.datastore.database import Rows, transaction
from knnper.datastore.examples import (
    NotErasedError,
    Selection,
    StoreBusyError,
    StoreDamagedError,
    StoreFullError,
)
from knnper.datastore.search import LiveView
from knnper.datastore.store import DATABASE, INDEX, open_store
from knnper.datastore.verify import verify
from tests.datastore.small_store import examples, forked, ids, new_store


def _fill_a_full_disk(folder: Path, room: int, pipe) -> None:  # type: ignore[no-untyped-def]
    """Add batches until a file cannot grow, then say what was acknowledged."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open_store(folder, writable=True) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        try:
            while True:
                store.add(examples(50, dim=6))
        except StoreFullError as error:
            pipe.send((ids(store), str(error)))


def test_a_full_disk_leaves_the_last_good_state(tmp_path: Path) -> None:
    new_store(tmp_path / "s", 10).close()
    child, ours = forked(_fill_a_full_disk, tmp_path / "s", 400_000)
    acknowledged, message = ours.recv()
    child.join()
    assert child.exitcode == 0
    assert len(acknowledged) > 60
    assert "the disk is full" in message
    assert "unharmed" in message
    with open_store(tmp_path / "s", writable=True) as store:
        assert ids(store) == acknowledged
        assert torch.equal(
            store.vectors(store.contents().ids)[:10], examples(10).embeddings
        )
        store.add(examples(1))


def test_an_erasure_that_fails_is_said_and_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = examples(3).embeddings[1].numpy().tobytes()

    def is_left() -> bool:
        files = (path for path in (tmp_path / "s").rglob("*") if path.is_file())
        return any(secret in path.read_bytes() for path in files)

    with new_store(tmp_path / "s", 3) as store:
        store.save()
        with monkeypatch.context() as patched:

            def no_room(self: Rows) -> None:
                raise StoreFullError("the disk is full")

            patched.setattr(Rows, "compact", no_room)
            with pytest.raises(NotErasedError, match="not erased yet: the disk"):
                store.delete(Selection(ids=(2,)))
            assert ids(store) == [1, 3]
            assert is_left()
            with pytest.raises(NotErasedError):
                store.delete(Selection(ids=(2,)))
        assert len(store.delete(Selection(ids=(2,)))) == 0
        assert not is_left()


def test_keeping_a_budget_does_not_pass_for_an_erasure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_store(tmp_path / "s", policy="fifo", budget_mb=2.0) as store:
        store.add(examples(30))
        with monkeypatch.context() as patched:
            patched.setattr(LiveView, "forget", lambda self: None)
            store.delete(Selection(ids=(2,)))
            patched.setattr(Rows, "num_bytes", lambda self: 10**9)
            store.add(examples(1))
        assert store._rows.row().erasing


def test_upkeep_that_fails_is_no_error_of_the_addition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(self: Rows) -> None:
        raise StoreBusyError("a reader")

    with new_store(tmp_path / "s", policy="fifo", budget_mb=2.0) as store:
        monkeypatch.setattr(Rows, "num_bytes", lambda self: 10**9)
        monkeypatch.setattr(Rows, "compact", busy)
        store.add(examples(2))
        assert ids(store) == [1, 2]
    assert "not tidied up: a reader" in caplog.text


def test_a_reader_that_lingers_does_not_hold_up_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knnper.datastore.database.LOG_BYTES", 10_000)
    store = new_store(tmp_path / "s", 3)
    with open_store(tmp_path / "s") as reader, reader._rows.reading():
        assert len(reader._rows.contents()) == 3
        began = time.monotonic()
        for _ in range(20):
            store.add(examples(1))
        assert time.monotonic() - began < 8
    store.close()


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    new_store(tmp_path / "s", 5).close()
    with sqlite3.connect(tmp_path / "s" / DATABASE) as connection:
        connection.execute("UPDATE examples SET label = 3 WHERE id = 2")
    connection.close()
    shutil.rmtree(tmp_path / "s" / INDEX)
    with pytest.raises(StoreDamagedError, match=r"of 1 examples .*: 2; .* --id 2"):
        open_store(tmp_path / "s")


def test_a_damaged_example_that_leaves_is_forgotten(tmp_path: Path) -> None:
    with new_store(tmp_path / "s", 5, policy="fifo", capacity=5) as store:
        with contextlib.closing(sqlite3.connect(tmp_path / "s" / DATABASE)) as other:
            other.execute("UPDATE examples SET label = 'x', arrival = 7 WHERE id = 2")
            other.commit()
        store.add(examples(2))
        assert ids(store) == [3, 4, 5, 6, 7]
    assert verify(tmp_path / "s").findings == ()


@contextlib.contextmanager
def _cut_short(
    connection: sqlite3.Connection, path: Path, *, writing: bool
) -> Iterator[None]:
    with transaction(connection, path, writing=writing):
        yield
    if writing:
        raise KeyboardInterrupt


def test_an_interrupt_after_a_commit_leaves_a_sound_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_store(tmp_path / "s", 5) as store:
        with monkeypatch.context() as patched:
            patched.setattr("knnper.datastore.database.transaction", _cut_short)
            with pytest.raises(KeyboardInterrupt):
                store.add(examples(2))
        store.add(examples(1))
        assert ids(store) == list(range(1, 9))
    assert verify(tmp_path / "s").findings == ()

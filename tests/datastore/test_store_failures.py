import contextlib
import resource
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from knnper.datastore.connection import transaction
from knnper.datastore.database import Rows
from knnper.datastore.examples import (
    InputLayout,
    NewExamples,
    NotErasedError,
    Selection,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreMismatchError,
    StoreSpec,
)
from knnper.datastore.index import VectorIndex
from knnper.datastore.policy import StoreSettings
from knnper.datastore.search import LiveView
from knnper.datastore.store import (
    DATABASE,
    Store,
    StoreReader,
    create_store,
    empty_memory_store,
    open_store,
)
from knnper.datastore.tables import Version
from knnper.datastore.verify import verify
from tests.datastore.index_kinds import GRAPH, KINDS, RERANKED
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
    child, parent_end = forked(_fill_a_full_disk, tmp_path / "s", 400_000)
    acknowledged, message = parent_end.recv()
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


def test_failed_erasure_is_reported_and_repeated(
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
    assert "not compacted: a reader" in caplog.text


def test_a_reader_that_lingers_does_not_hold_up_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knnper.datastore.connection.LOG_BYTES", 10_000)
    store = new_store(tmp_path / "s", 3)
    with open_store(tmp_path / "s") as reader, reader._rows.reading():
        assert len(reader._rows.contents()) == 3
        began = time.monotonic()
        for _ in range(20):
            store.add(examples(1))
        assert time.monotonic() - began < 8
    store.close()


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


DIM = 16
SPEC = StoreSpec(10, InputLayout((DIM,), "float32"))


def batch(first: int, count: int) -> NewExamples:
    """Examples whose every number is their id, labelled by the id's last digit."""
    ids = torch.arange(first, first + count)
    inputs = ids.float()[:, None].repeat(1, DIM)
    return NewExamples(inputs, ids % 10, inputs)


def made(folder: Path, is_on_disk: bool = True, **settings: Any) -> Store:
    given = SPEC, DIM, "model", StoreSettings(**settings)
    return (
        create_store(folder / "s", *given) if is_on_disk else empty_memory_store(*given)
    )


def nearest(store: StoreReader, queries: Tensor) -> list[int]:
    ids: list[int] = store.search(queries, 1).ids[:, 0].tolist()
    return ids


def search_until(
    done: threading.Event, begun: threading.Barrier, store: StoreReader
) -> None:
    """Search again and again; fail if an answer was never true of the store."""
    begun.wait(60)
    queries = batch(1, 30).embeddings
    while not done.is_set():
        neighbors = store.search(queries, 5)
        assert torch.equal(neighbors.labels, neighbors.ids % 10)
        expected = DIM * (queries[:, :1].double() - neighbors.ids).square()
        torch.testing.assert_close(neighbors.squared_distances, expected)


@contextlib.contextmanager
def searched(store: StoreReader) -> Iterator[None]:
    """Let three threads search while the block runs."""
    done, begun = threading.Event(), threading.Barrier(4)
    with ThreadPoolExecutor(3) as threads:
        searches = [threads.submit(search_until, done, begun, store) for _ in range(3)]
        begun.wait(60)
        try:
            yield
        finally:
            done.set()
        for search in searches:
            search.result(60)


class Waiting:
    """Negates inputs when it may, and says when it was asked first."""

    def __init__(self) -> None:
        self.started, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, inputs: Tensor) -> Tensor:
        self.started.set()
        assert self.may_go_on.wait(20)
        return -inputs


@pytest.mark.parametrize(
    ("kind", "is_on_disk"),
    [("flat", True), ("graph", True), ("lists", True), ("graph", False)],
)
def test_searches_go_on_while_the_store_changes(
    tmp_path: Path, kind: str, is_on_disk: bool
) -> None:
    index = KINDS[kind]
    with made(tmp_path, is_on_disk, policy="fifo", capacity=60, index=index) as store:
        with searched(store):
            for first in range(1, 200, 20):
                store.add(batch(first, 20))
                store.delete(Selection(ids=(first, first + 7)))
        assert store.contents().ids.tolist()[-3:] == [198, 199, 200]


def test_additions_from_several_threads_are_all_kept(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        with ThreadPoolExecutor(4) as threads:
            adding = [threads.submit(store.add, batch(1, 5)) for _ in range(12)]
            ids = [
                example_id
                for each in adding
                for example_id in each.result().ids.tolist()
            ]
        assert sorted(ids) == store.contents().ids.tolist() == list(range(1, 61))


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_reembedding_in_the_background(tmp_path: Path, is_on_disk: bool) -> None:
    negated = Waiting()
    with made(tmp_path, is_on_disk) as store, ThreadPoolExecutor(1) as thread:
        store.add(batch(1, 300))
        future = thread.submit(store.reembed, negated, "negated")
        assert negated.started.wait(20)
        # Searched, added to and deleted from as if nothing happened.
        assert nearest(store, batch(7, 1).embeddings) == [7]
        store.add(batch(301, 10))
        store.delete(Selection(ids=(5, 306)))
        assert store.fingerprint == "model"
        for call in (store.roll_back, lambda: store.reembed(torch.neg, "other")):
            with pytest.raises(StoreError, match="is being re-embedded"):
                call()
        negated.may_go_on.set()
        future.result(20)
        assert (store.fingerprint, len(store)) == ("negated", 308)
        assert nearest(store, -batch(303, 1).embeddings) == [303]


def test_closing_ends_the_work_in_the_background(tmp_path: Path) -> None:
    store = made(tmp_path)
    store.add(batch(1, 2000))
    started = threading.Event()

    def slow(inputs: Tensor) -> Tensor:
        started.set()
        time.sleep(0.1)
        return -inputs

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(store.reembed, slow, "negated")
        assert started.wait(20)
        store.close()
        with pytest.raises(StoreError, match="closed while it was re-embedded"):
            future.result(20)
    with open_store(tmp_path / "s", writable=True) as store:
        assert store.fingerprint == "model"
        store.reembed(lambda inputs: -inputs, "negated")
        assert nearest(store, -batch(9, 1).embeddings) == [9]


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_a_change_that_is_cut_short_half_way_is_made_up_for(
    tmp_path: Path, is_on_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rows have the change, the index has half of it.
    def removed_only(ids: object, vectors: object) -> None:
        raise MemoryError

    with made(tmp_path, is_on_disk) as store:
        store.add(batch(1, 5))
        with monkeypatch.context() as patched:
            patched.setattr(store._live.view.index, "add", removed_only)
            with pytest.raises(MemoryError):
                store.add(batch(6, 3))
        assert store.contents().ids.tolist() == list(range(1, 9))
        assert nearest(store, batch(7, 1).embeddings) == [7]
        store.add(batch(9, 1))
        assert sorted(store._live.view.index.ids.tolist()) == list(range(1, 10))


@pytest.mark.integration
def test_a_reader_that_reranks_follows_a_busy_writer(tmp_path: Path) -> None:
    # Candidates are compared by vectors from the database, which the reader reads
    # while another of its threads takes up what the writer has changed.
    index = RERANKED
    with made(tmp_path, policy="fifo", capacity=60, index=index) as store:
        store.add(batch(1, 60))
        with open_store(tmp_path / "s") as reader, searched(reader):
            for first in range(61, 261, 10):
                store.add(batch(first, 10))


def test_a_delete_during_reembedding_leaves_no_trace_in_the_new_index(
    tmp_path: Path,
) -> None:
    store = made(tmp_path, index=GRAPH)
    store.add(batch(1, 300))
    built = LiveView.built

    def built_then_deleted(self: LiveView, version: Version) -> VectorIndex:
        index = built(self, version)
        store.delete(Selection(ids=(77,)))
        return index

    with pytest.MonkeyPatch.context() as patched, store:
        patched.setattr(LiveView, "built", built_then_deleted)
        store.reembed(lambda inputs: inputs + 0.5, "half")
    secret = (batch(77, 1).embeddings + 0.5).numpy().tobytes()
    files = [path for path in (tmp_path / "s").rglob("*") if path.is_file()]
    assert any(path.suffix == ".index" for path in files)
    assert not any(secret in path.read_bytes() for path in files)
    kept = (batch(78, 1).embeddings + 0.5).numpy().tobytes()
    assert any(kept in path.read_bytes() for path in files)


@contextlib.contextmanager
def interrupted_after(change: str) -> Iterator[None]:
    """Interrupt what runs in the block once the database has done something."""
    original = getattr(Rows, change)

    def interrupted(*given: object) -> None:
        original(*given)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Rows, change, interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("adds_first", [True, False])
def test_a_switch_that_is_cut_short_is_made_up_for(
    tmp_path: Path, adds_first: bool
) -> None:
    with made(tmp_path) as store:
        store.add(batch(1, 20))
        with interrupted_after("activate"):
            store.reembed(lambda inputs: -inputs, "negated")
        if adds_first:
            with pytest.raises(StoreMismatchError):
                store.add(batch(21, 1), fingerprint="model")
        assert nearest(store, -batch(9, 1).embeddings) == [9]
        assert store.fingerprint == "negated"


def test_an_interrupt_after_the_commit_hides_nothing(tmp_path: Path) -> None:
    with made(tmp_path) as store:
        store.add(batch(1, 20))
        with interrupted_after("apply"):
            store.delete(Selection(ids=(9,)))
        assert 9 not in store.search(batch(9, 1).embeddings, 20).ids
        assert len(store.delete(Selection(ids=(9,)))) == 0


def test_reader_rebuilds_its_outgrown_index(tmp_path: Path) -> None:
    index = GRAPH
    with made(tmp_path, policy="fifo", capacity=100, index=index) as store:
        store.add(batch(1, 100))
        with open_store(tmp_path / "s") as reader:
            for first in range(101, 301, 20):
                store.add(batch(first, 20))
                neighbors = reader.search(batch(first, 20).embeddings, 1)
                assert neighbors.ids[:, 0].tolist() == list(range(first, first + 20))
            assert not reader._live.view.index.is_outgrown


def test_what_is_read_in_one_block_is_of_one_moment(tmp_path: Path) -> None:
    # Also what the store says of itself, which the contents are compared with.
    with new_store(tmp_path / "s", 3) as store, ThreadPoolExecutor(1) as adding:
        with store._rows.reading():
            assert len(store._rows.contents()) == 3
            adding.submit(store.add, examples(1)).result()
            assert len(store._rows.contents()) == 3
        assert len(store._rows.contents()) == 4

"""A store's folder: one writer, many readers, and what is refused."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from knnper.datastore import database as schema
from knnper.datastore.examples import (
    Selection,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreMismatchError,
)
from knnper.datastore.store import DATABASE, open_store
from knnper.datastore.verify import verify
from tests.datastore.small_store import SPEC, examples, ids, new_store


def test_a_store_is_what_it_was_when_it_is_opened_again(tmp_path: Path) -> None:
    with new_store(tmp_path / "s", 20) as store:
        found = store.search(examples(3, seed=1).embeddings, 5)
    with open_store(tmp_path / "s", fingerprint="model") as store:
        again = store.search(examples(3, seed=1).embeddings, 5)
        assert (store.spec, store.num_classes, store.embedding_dim) == (SPEC, 4, 6)
        assert torch.equal(store.inputs(store.contents().ids), examples(20).inputs)  # type: ignore[arg-type]
    assert torch.equal(found.ids, again.ids)
    assert torch.equal(found.squared_distances, again.squared_distances)


def test_another_model_is_refused(tmp_path: Path) -> None:
    new_store(tmp_path / "s", 3).close()
    with pytest.raises(StoreMismatchError, match=r"the model model, found .* other"):
        open_store(tmp_path / "s", fingerprint="other")
    with (
        open_store(tmp_path / "s", writable=True) as store,
        pytest.raises(StoreMismatchError, match="knnper store reembed"),
    ):
        store.add(examples(1), fingerprint="other")


def test_a_reader_notices_that_the_store_was_embedded_anew(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s", 3)
    with open_store(tmp_path / "s", fingerprint="model") as reader:
        store.reembed(lambda inputs: inputs[:, :2].contiguous(), "other")
        with pytest.raises(StoreMismatchError):
            reader.search(torch.zeros(1, 6), 1)
        assert reader.embedding_dim == 2
    store.close()


def test_one_writer_and_many_readers(tmp_path: Path) -> None:
    with new_store(tmp_path / "s", 3) as store:
        with pytest.raises(StoreBusyError, match=f"process {os.getpid()} writes to"):
            open_store(tmp_path / "s", writable=True)
        with open_store(tmp_path / "s") as one, open_store(tmp_path / "s") as other:
            assert ids(one) == ids(other) == [1, 2, 3]
            store.add(examples(2))
            assert ids(one) == ids(other) == [1, 2, 3, 4, 5]
            store.delete(Selection(ids=(2, 5)))
            assert ids(one) == ids(other) == [1, 3, 4]
            assert not hasattr(one, "add")


def test_a_reader_in_another_process_follows_the_writer(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s", 3)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_report, args=(tmp_path / "s", theirs))
    child.start()
    for count in (1, 30):
        store.add(examples(count))
        ours.send("ask")
        assert ours.recv() == ids(store)
    ours.send("end")
    child.join()
    store.close()
    assert child.exitcode == 0


def _report(folder: Path, pipe) -> None:  # type: ignore[no-untyped-def]
    with open_store(folder) as reader:
        while pipe.recv() == "ask":
            pipe.send(ids(reader))


def test_no_store_and_no_room_for_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"holds no store: store\.sqlite3 is missing"):
        open_store(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is not empty; expected a new folder"):
        new_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    new_store(tmp_path / "s", 3).close()
    (tmp_path / "s" / DATABASE).write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreDamagedError, match="is not what was written"):
        open_store(tmp_path / "s")


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    import sqlite3

    new_store(tmp_path / "s").close()
    with sqlite3.connect(tmp_path / "s" / DATABASE) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreDamagedError, match="of format 99, expected 2"):
        open_store(tmp_path / "s")
    with sqlite3.connect(tmp_path / "s" / DATABASE) as connection:
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    with pytest.raises(StoreError, match=r"of format 1, expected 2; .* export"):
        open_store(tmp_path / "s")


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s", 4)
    store.close()
    with pytest.raises(StoreError, match="was closed"):
        store.inputs(np.array([1]))


def test_a_lock_ends_with_the_store_not_with_its_forks(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s", 1)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=theirs.recv)
    child.start()
    store.close()
    open_store(tmp_path / "s", writable=True).close()
    ours.send(None)
    child.join()


def test_a_store_of_an_older_format_is_migrated_when_opened_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_store(tmp_path / "s", 3).close()

    monkeypatch.setattr(schema, "FORMAT", 3)
    with pytest.raises(StoreError, match="export it"):
        open_store(tmp_path / "s", writable=True)
    migrated: list[object] = []
    monkeypatch.setitem(schema.MIGRATIONS, 2, migrated.append)
    with pytest.raises(StoreError, match="compact"):
        open_store(tmp_path / "s")
    with open_store(tmp_path / "s", writable=True) as store:
        assert (len(store), len(migrated)) == (3, 1)
    assert verify(tmp_path / "s").findings == ()

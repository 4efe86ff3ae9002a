import contextlib
import json
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from knnper.datastore.examples import (
    ExamplesMissingError,
    InputLayout,
    NewExamples,
    Selection,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreMismatchError,
    StoreSpec,
)
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import (
    DATABASE,
    INDEX,
    configure_store,
    create_store,
    open_store,
    read_identity,
)
from knnper.errors import ConfigError, DataError
from tests.datastore.index_kinds import GRAPH
from tests.datastore.small_store import examples, forked, ids, new_store


def test_another_model_is_refused(tmp_path: Path) -> None:
    new_store(tmp_path / "s", 3).close()
    with pytest.raises(StoreMismatchError, match=r"the model model, found .* other"):
        open_store(tmp_path / "s", fingerprint="other")
    with (
        open_store(tmp_path / "s", writable=True) as store,
        pytest.raises(StoreMismatchError, match="knnper store reembed"),
    ):
        store.add(examples(1), fingerprint="other")


def test_reader_notices_reembedding(tmp_path: Path) -> None:
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
        with (
            open_store(tmp_path / "s") as reader,
            open_store(tmp_path / "s") as second_reader,
        ):
            assert ids(reader) == ids(second_reader) == [1, 2, 3]
            store.add(examples(2))
            assert ids(reader) == ids(second_reader) == [1, 2, 3, 4, 5]
            store.delete(Selection(ids=(2, 5)))
            assert ids(reader) == ids(second_reader) == [1, 3, 4]
            assert not hasattr(reader, "add")


def test_no_store_and_no_room_for_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"holds no store: store\.sqlite3 is missing"):
        open_store(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is not empty; expected a new folder"):
        new_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    new_store(tmp_path / "s").close()
    for number in (1, 99):
        with contextlib.closing(sqlite3.connect(tmp_path / "s" / DATABASE)) as opened:
            opened.execute(f"PRAGMA user_version = {number}")
        with pytest.raises(StoreDamagedError, match=f"format {number}, expected 2"):
            open_store(tmp_path / "s")


def test_a_lock_ends_with_the_store_not_with_its_forks(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s", 1)
    child, parent_end = forked(lambda pipe: pipe.recv())
    store.close()
    with pytest.raises(StoreError, match="was closed"):
        store.inputs(np.array([1]))
    open_store(tmp_path / "s", writable=True).close()
    parent_end.send(None)
    child.join()


def test_examples_that_do_not_fit_are_refused_as_a_whole(tmp_path: Path) -> None:
    good = examples(2)
    assert good.inputs is not None
    times = torch.tensor([0.0, torch.nan], dtype=torch.float64)
    bad: list[tuple[str, dict[str, object]]] = [
        ("expected float32 of shape", {"inputs": good.inputs[:, :3]}),
        ("inputs: found none", {"inputs": None}),
        ("expected a name, or None", {"external_ids": ("one",)}),
        ("'x' twice among", {"external_ids": ("x", "x")}),
        ("seconds since 1970", {"arrivals": torch.zeros(3)}),
        ("expected finite seconds", {"arrivals": times}),
        ("ids: found", {"external_ids": ("", "x")}),
        ("ids: found", {"external_ids": ("a\0b", "x")}),
        ("ids: found", {"external_ids": ("\udce4", "x")}),
    ]
    with new_store(tmp_path / "s") as store:
        for message, changes in bad:
            with pytest.raises(DataError, match=message):
                store.add(replace(good, **changes))  # type: ignore[arg-type]
        assert len(store) == 0


def test_a_store_without_inputs(tmp_path: Path) -> None:
    with create_store(tmp_path / "s", StoreSpec(4), 6, "model") as store:
        with pytest.raises(DataError, match="keeps none"):
            store.add(examples(1))
        store.add(NewExamples(torch.ones(1, 6), torch.tensor([3])))
        with pytest.raises(StoreError, match="keeps no raw inputs"):
            store.inputs(store.contents().ids)
        with pytest.raises(StoreError, match="keeps no raw inputs"):
            store.reembed(lambda inputs: inputs, "other")


def test_what_is_deleted_is_chosen(tmp_path: Path) -> None:
    with new_store(tmp_path / "s", 5) as store:
        with pytest.raises(ValueError, match="found one of all"):
            store.delete(Selection())
        assert len(store.delete(Selection(ids=(7,)))) == 0
        # NumPy's integers, too.
        chosen = Selection(ids=tuple(store.contents().ids[:2]))
        assert store.delete(chosen).tolist() == [1, 2]
        assert ids(store) == [3, 4, 5]
        with pytest.raises(ExamplesMissingError):
            store.vectors(np.array([2, 3]))


def test_a_clock_that_was_set_back_makes_nothing_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_store(tmp_path / "s", 4, policy="fifo", capacity=4) as store:
        monkeypatch.setattr("time.time", lambda: 1000.0)
        store.add(examples(1))
        assert ids(store) == [2, 3, 4, 5]


@pytest.mark.parametrize("policy", ["fixed", "fifo", "reservoir", "class_balanced"])
def test_policies_that_need_a_capacity_say_so(tmp_path: Path, policy: str) -> None:
    with pytest.raises(
        ConfigError, match=f"capacity: found none with policy = {policy}"
    ):
        new_store(tmp_path / "s", policy=policy)
    with pytest.raises(ConfigError, match=r"budget_mb: found 1e-05, expected at least"):
        new_store(tmp_path / "s", policy=policy, budget_mb=1e-5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", ["fifo", "reservoir"])
@pytest.mark.parametrize(
    ("shape", "dim"), [((32, 32, 3), 700), ((3,), 16), ((200, 100), 16)]
)
def test_a_store_stays_within_its_budget(
    tmp_path: Path, policy: str, shape: tuple[int, ...], dim: int
) -> None:
    spec = StoreSpec(2, InputLayout(shape))
    settings = StoreSettings(policy, budget_mb=3.0)
    with create_store(tmp_path / "s", spec, dim, "model", settings) as store:
        capacity = store.capacity
        assert capacity is not None
        for _ in range(6):
            inputs = torch.ones(capacity // 2, *shape, dtype=torch.uint8)
            labels = torch.zeros(len(inputs), dtype=torch.int64)
            store.add(NewExamples(torch.ones(len(inputs), dim), labels, inputs))
        assert len(store) == capacity
    used = sum(path.stat().st_size for path in (tmp_path / "s").rglob("*.*"))
    assert 1.9e6 < used < 3.0e6


def test_more_can_be_allowed_later_but_not_less_than_there_is(tmp_path: Path) -> None:
    new_store(tmp_path / "s", 8, policy="fifo", capacity=8).close()
    with pytest.raises(StoreError, match=r"found room for 7 .* at least the 8"):
        configure_store(tmp_path / "s", StoreSettings("fifo", 7))
    settings = StoreSettings("fifo", 9, index=GRAPH)
    configure_store(tmp_path / "s", settings)
    assert read_identity(tmp_path / "s").settings == settings
    with open_store(tmp_path / "s", writable=True) as store:
        store.add(examples(2))
        assert ids(store) == [2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_another_model_s_embeddings_must_fit_the_budget(tmp_path: Path) -> None:
    with new_store(tmp_path / "s", policy="fifo", budget_mb=0.2) as store:
        capacity = store.capacity
        assert capacity is not None
        store.add(examples(capacity))
        with pytest.raises(StoreFullError, match="600 numbers the budget has room"):
            store.reembed(lambda inputs: inputs.repeat(1, 100), "large")
        assert store.fingerprint == "model"


def test_reembedding_keeps_the_old_version_and_resumes(
    tmp_path: Path,
) -> None:
    batch_sizes: list[int] = []

    def other(inputs: Tensor) -> Tensor:
        batch_sizes.append(len(inputs))
        return torch.cat([inputs, -inputs], dim=1)

    def broken(inputs: Tensor) -> Tensor:
        if batch_sizes:
            raise InterruptedError
        return other(inputs)

    with new_store(tmp_path / "s", 600) as store:
        with pytest.raises(StoreError, match="nothing to roll back to"):
            store.roll_back()
        with pytest.raises(InterruptedError):
            store.reembed(broken, "other")
        assert (store.fingerprint, store.embedding_dim, sum(batch_sizes)) == (
            "model",
            6,
            256,
        )
    with open_store(tmp_path / "s", writable=True) as store:
        store.reembed(other, "other")
        now = (store.fingerprint, store.embedding_dim, sum(batch_sizes))
        assert now == ("other", 12, 600)
    with open_store(tmp_path / "s", writable=True) as store:
        assert store.fingerprint == "other"
        store.roll_back()
        assert (store.fingerprint, store.embedding_dim) == ("model", 6)
        assert torch.equal(
            store.vectors(store.contents().ids), examples(600).embeddings
        )
        store.reembed(other, "other")
        assert sum(batch_sizes) == 600
        store.add(NewExamples(torch.ones(1, 12), torch.tensor([1]), torch.ones(1, 6)))
        with pytest.raises(StoreError, match="examples arrived after"):
            store.roll_back()
        store.reembed(lambda inputs: inputs * 2, "model")
        assert store.vectors(store.contents().ids)[-1].tolist() == [2.0] * 6
        with pytest.raises(DataError, match="by the new model: expected finite"):
            store.reembed(lambda inputs: inputs * torch.nan, "third")


def tamper(folder: Path) -> None:
    file = next((folder / INDEX).glob("*.index"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def rename_version(folder: Path) -> None:
    path = folder / INDEX / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "fingerprint": "another"}))


def foreign(folder: Path) -> None:
    """Put the index of another store, with its manifest, in place of this one's."""
    other = folder.with_name("other")
    new_store(other, 9).close()
    shutil.rmtree(folder / INDEX)
    shutil.copytree(other / INDEX, folder / INDEX)


@pytest.mark.parametrize("damage", [tamper, rename_version, foreign])
def test_changed_index_file_is_rebuilt(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    new_store(tmp_path / "s", 9).close()
    damage(tmp_path / "s")
    caplog.set_level(logging.INFO)
    with open_store(tmp_path / "s", writable=True) as store:
        assert "is rebuilt" in caplog.text
        neighbors = store.search(examples(9).embeddings, 1)
        assert neighbors.ids[:, 0].tolist() == ids(store)
    caplog.clear()
    open_store(tmp_path / "s").close()
    assert "is rebuilt" not in caplog.text


def test_a_valid_index_is_used_and_brought_up_to_date(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = new_store(tmp_path / "s", 9)
    store.save()
    store.add(examples(2, seed=5))
    copy = tmp_path / "copy"
    # As a kill would leave it: the index is older than the database.
    shutil.copytree(tmp_path / "s", copy)
    store.close()
    caplog.set_level(logging.INFO)
    with open_store(copy) as reader:
        neighbors = reader.search(examples(2, seed=5).embeddings, 1)
        assert neighbors.ids.tolist() == [[10], [11]]
    assert "is rebuilt" not in caplog.text

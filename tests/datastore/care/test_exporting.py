"""One file with all examples, and back."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from knnper.datastore.examples import (
    Selection,
    StoreDamagedError,
    StoreError,
    StoreSpec,
)
from knnper.datastore.store import DATABASE, create_store
from knnper.datastore.transfer import export_store, fill, open_source
from tests.datastore.care.store_cases import DIM, SHAPE, SPEC, small_store, some


def test_everything_is_in_the_file(tmp_path: Path) -> None:
    new = some(700, name="file")
    assert new.inputs is not None
    with small_store(tmp_path / "store", count=700) as store:
        store.add(some(2, 5))
        store.delete(Selection(ids=(4,)))
        number = export_store(tmp_path / "store", tmp_path / "out.npz")
    assert number == 701
    kept = np.arange(700) != 3
    with np.load(tmp_path / "out.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["inputs"][:699], new.inputs.numpy()[kept])
        np.testing.assert_array_equal(
            arrays["embeddings"][:699], new.embeddings.numpy()[kept]
        )
        assert arrays["ids"].tolist() == [*range(1, 4), *range(5, 703)]
        np.testing.assert_array_equal(arrays["labels"][:699], new.labels.numpy()[kept])
        assert arrays["arrivals"][:2].tolist() == [1000.0, 1001.0]
        assert arrays["external_ids"][[0, 3, -1]].tolist() == ["file/0", "file/4", ""]
        assert str(arrays["fingerprint"]) == "first"
        assert arrays["class_names"].tolist() == ["cat", "dog", "fox"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.npz", "store"]


def test_what_was_exported_can_be_added(tmp_path: Path) -> None:
    with small_store(tmp_path / "store", count=300) as store:
        export_store(tmp_path / "store", tmp_path / "out.npz")
        source = open_source(tmp_path / "out.npz", SHAPE, SPEC.class_names)
        ids = store.contents().ids
        images = [one.numpy().tobytes() for one in store.inputs(ids)]
        vector_of = dict(zip(images, store.vectors(ids), strict=True))

        def embed(images: torch.Tensor) -> torch.Tensor:
            return torch.stack([vector_of[one.numpy().tobytes()] for one in images])

        with create_store(tmp_path / "copy", SPEC, DIM, "first") as copy:
            filled = fill(copy, source, embed, "first")
            assert (filled.num_stored, filled.num_skipped) == (300, 0)
        export_store(tmp_path / "copy", tmp_path / "again.npz")
    with (
        np.load(tmp_path / "out.npz") as first,
        np.load(tmp_path / "again.npz") as second,
    ):
        assert set(first) == set(second)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])


def test_a_store_without_inputs_or_examples(tmp_path: Path) -> None:
    create_store(tmp_path / "store", StoreSpec(3), DIM, "first").close()
    assert export_store(tmp_path / "store", tmp_path / "out.npz") == 0
    with np.load(tmp_path / "out.npz", allow_pickle=False) as arrays:
        assert "inputs" not in arrays
        assert arrays["embeddings"].shape == (0, DIM)
        assert arrays["external_ids"].shape == (0,)


def test_a_file_is_replaced_only_on_request(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    target.write_bytes(b"precious")
    with small_store(tmp_path / "store"):
        with pytest.raises(StoreError, match=r"is there already.*--overwrite"):
            export_store(tmp_path / "store", target)
        assert target.read_bytes() == b"precious"
        export_store(tmp_path / "store", target, overwrite=True)
    with np.load(target) as arrays:
        assert len(arrays["ids"]) == 30


def test_damage_leaves_no_file(tmp_path: Path) -> None:
    small_store(tmp_path / "store").close()
    with closing(sqlite3.connect(tmp_path / "store" / DATABASE)) as connection:
        connection.execute("UPDATE inputs SET checksum = 1 WHERE id = 20")
        connection.commit()
    with pytest.raises(StoreDamagedError, match="example 20"):
        export_store(tmp_path / "store", tmp_path / "out.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    small_store(tmp_path / "store").close()
    target = tmp_path / "missing" / "out.npz"
    with pytest.raises(StoreError, match=r"out\.npz cannot be written: there is no"):
        export_store(tmp_path / "store", target)

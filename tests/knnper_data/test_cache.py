import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from knnper.data import cache, numpy_files
from knnper.data.examples import Dataset
from knnper.errors import DataError

TRAIN = np.arange(2 * 3 * 4 * 1, dtype=np.uint8).reshape(2, 3, 4, 1)

TEST = TRAIN[:1] + 100


def build(writer: cache.EntryWriter) -> cache.DatasetContents:
    writer.put_images("train", TRAIN)
    writer.put_labels("train", [0, 1])
    writer.put_images("test", TEST)
    writer.put_labels("test", [1])
    writer.put_client_ids("train", [7, 8])
    writer.put_client_ids("test", [8])
    return cache.DatasetContents(("cat", "dog"), coarse_of=(0, 0))


def build_never(writer: cache.EntryWriter) -> cache.DatasetContents:
    raise AssertionError("the entry should have been found")


def load() -> Dataset:
    return cache.cached_dataset("toy", {"size": 1}, build)


def entry_of(cache_folder: Path) -> Path:
    (entry,) = (path for path in cache_folder.iterdir() if path.is_dir())
    return entry


def test_everything_comes_back(cache_folder: Path) -> None:
    load()
    found = cache.cached_dataset("toy", {"size": 1}, build_never)
    assert found.name == "toy"
    assert found.class_names == ("cat", "dog")
    assert found.coarse_of == (0, 0)
    assert found.spec.image_shape == (3, 4, 1)
    assert found.spec.num_classes == 2
    assert found.spec.mean == pytest.approx([11.5 / 255])
    np.testing.assert_array_equal(found.train.images, TRAIN)
    np.testing.assert_array_equal(found.test.images, TEST)
    np.testing.assert_array_equal(found.train.labels, [0, 1])
    np.testing.assert_array_equal(found.test.client_ids, [8])
    assert isinstance(found.train.images, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        found.train.images[0] = 0
    with pytest.raises(AssertionError, match="should have been found"):
        cache.cached_dataset("toy", {"size": 2}, build_never)


def test_examples_are_copies_in_the_order_asked_for() -> None:
    examples = load().train.examples_at(np.array([1, 0, 1]))
    assert examples.labels.tolist() == [1, 0, 1]
    assert torch.equal(examples.images[0], torch.from_numpy(TRAIN[1]))
    examples.images.zero_()
    np.testing.assert_array_equal(load().train.images, TRAIN)
    none = load().train.examples_at(np.array([], dtype=np.int64))
    assert none.images.shape == (0, 3, 4, 1)
    assert len(none) == 0


def other_format(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("manifest.json", lambda path: path.write_bytes(b"{}")),
        ("manifest.json", other_format),
        ("train_images.npy", lambda path: path.write_bytes(b"")),
        ("test_labels.npy", lambda path: path.write_bytes(b"no array")),
        ("test_images.npy", Path.unlink),
        ("train_images.npy", lambda path: os.truncate(path, path.stat().st_size - 1)),
        ("train_labels.npy", lambda path: np.save(path, np.arange(5))),
    ],
)
def test_a_damaged_entry_is_replaced(
    cache_folder: Path, file: str, damage: Callable[[Path], object]
) -> None:
    load()
    damage(entry_of(cache_folder) / file)
    np.testing.assert_array_equal(load().train.images, TRAIN)
    np.testing.assert_array_equal(load().train.labels, [0, 1])
    cache.cached_dataset("toy", {"size": 1}, build_never)


def test_a_failed_build_leaves_nothing_to_be_seen(cache_folder: Path) -> None:
    def fail(writer: cache.EntryWriter) -> cache.DatasetContents:
        writer.put_images("train", TRAIN)
        raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        cache.cached_dataset("toy", {"size": 1}, fail)
    assert [path for path in cache_folder.iterdir() if path.is_dir()] == []
    load()


def test_no_images_and_full_discs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_empty(writer: cache.EntryWriter) -> cache.DatasetContents:
        writer.put_images("test", TEST[:0])
        return cache.DatasetContents(())

    def build_large(writer: cache.EntryWriter) -> cache.DatasetContents:
        writer.new_images("train", (10**9, 1000, 1000, 3))
        return cache.DatasetContents(())

    def build_on(writer: cache.EntryWriter) -> cache.DatasetContents:
        labels = np.zeros(2, dtype=np.int64)
        writer.append_of_client("train", TRAIN, labels, 0)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3))
        writer.append_of_client("train", TRAIN, labels, 1)
        return cache.DatasetContents(("only",))

    with pytest.raises(DataError, match="no test images"):
        cache.cached_dataset("toy", {}, build_empty)
    for build_much in (build_large, build_on):
        with pytest.raises(DataError, match="KNNPER_CACHE"):
            cache.cached_dataset("toy", {}, build_much)


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KNNPER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot be written.*KNNPER_CACHE"):
        load()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNNPER_CACHE", "/chosen")
    assert cache.cache_root() == Path("/chosen")
    monkeypatch.delenv("KNNPER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_root() == Path("/xdg/knnper")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.cache_root() == Path("/home/someone/.cache/knnper")


@pytest.mark.parametrize("counts", [(), (0,), (1,), (3, 0, 2), (9, 99, 999)])
def test_numpy_reads_what_was_appended(tmp_path: Path, counts: tuple[int, ...]) -> None:
    path = tmp_path / "rows.npy"
    rows = np.arange(sum(counts) * 6, dtype=np.int64).reshape(-1, 2, 3)
    written = numpy_files.RowFile(path, (2, 3), rows.dtype)
    for part in np.split(rows, np.cumsum(counts)[:-1] if counts else []):
        written.append(part)
    assert written.finish() == rows.shape
    np.testing.assert_array_equal(np.load(path, allow_pickle=False), rows)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_parts_are_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(numpy_files, "_BYTES_AT_ONCE", 15)
    rows = np.arange(count * 4, dtype=np.uint8).reshape(count, 2, 2)
    np.save(tmp_path / "rows.npy", rows)
    parts = list(numpy_files.rows_in_parts(tmp_path / "rows.npy"))
    expected = [len(rows[at : at + 3]) for at in range(0, count, 3)]
    assert [len(part) for part in parts] == expected
    assert all(not isinstance(part, np.memmap) for part in parts)
    np.testing.assert_array_equal(np.concatenate([rows[:0], *parts]), rows)

"""Folders of images and arrays in files, on their way into a store."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from knnper.datastore.examples import StoreFullError, StoreMismatchError
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import create_store
from knnper.datastore.transfer import AT_ONCE, Source, fill, open_source, read_inputs
from knnper.errors import DataError
from tests.datastore.care.store_cases import DIM, SHAPE, SPEC

NAMES = SPEC.class_names


def embed(images: Tensor) -> Tensor:
    return images.flatten(1)[:, :DIM].float()


def pixels(seed: int, size: int = 4) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (size, size, 3), dtype=np.uint8)


def put(root: Path, name: str, seed: int, size: int = 4) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, size)).save(path)


def test_a_folder_of_images(tmp_path: Path) -> None:
    put(tmp_path, "fox/b.png", 1)
    put(tmp_path, "fox/a.png", 2)
    put(tmp_path, "cat/c.png", 3)
    for name in (".hidden", "notes.txt", "fox/.DS_Store", "fox/Thumbs.db"):
        (tmp_path / name).write_text("")
    source = open_source(tmp_path, SHAPE, NAMES)
    assert source.num_ignored == 2
    place = {name: at for at, name in enumerate(source.external_ids)}
    assert set(place) == {"cat/c.png", "fox/a.png", "fox/b.png"}
    assert source.labels[place["cat/c.png"]] == 0
    assert source.labels.sum() == 4
    expected = np.stack([pixels(1), pixels(3)])
    wanted = [place["fox/b.png"], place["cat/c.png"]]
    np.testing.assert_array_equal(source.images(wanted).numpy(), expected)


def test_a_folders_order_mixes_the_classes_and_is_always_the_same(
    tmp_path: Path,
) -> None:
    for number in range(60):
        put(tmp_path, f"{NAMES[number % 3]}/{number}.png", number)
    source = open_source(tmp_path, SHAPE, NAMES)
    assert np.bincount(source.labels[:30], minlength=3).min() >= 5
    assert open_source(tmp_path, SHAPE, NAMES).external_ids == source.external_ids
    (tmp_path / "cat" / "0.png").unlink()
    left = tuple(name for name in source.external_ids if name != "cat/0.png")
    assert open_source(tmp_path, SHAPE, NAMES).external_ids == left


def test_what_holds_no_examples_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="found no examples"):
        open_source(tmp_path, SHAPE, NAMES)
    nothing = save(
        tmp_path / "a.npz",
        inputs=np.zeros((0, *SHAPE), np.uint8),
        labels=np.zeros(0, int),
    )
    with pytest.raises(DataError, match="found no examples"):
        open_source(nothing, SHAPE, NAMES)
    with pytest.raises(DataError, match="found no inputs in it"):
        read_inputs(nothing, SHAPE)


def test_images_are_made_the_size_of_the_stores(tmp_path: Path) -> None:
    put(tmp_path, "cat/large.png", 1, size=8)
    images = open_source(tmp_path, SHAPE, NAMES).images([0])
    resized = Image.fromarray(pixels(1, 8)).resize((4, 4), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(images[0].numpy(), np.asarray(resized))
    np.testing.assert_array_equal(
        read_inputs(tmp_path / "cat" / "large.png", SHAPE), images.numpy()
    )


def test_unknown_classes_are_named(tmp_path: Path) -> None:
    for name in ("cat/a.png", "gnu/a.png", "elk/a.png"):
        put(tmp_path, name, 1)
    expected = r"does not know: elk, gnu; expected some of cat, dog, fox"
    with pytest.raises(DataError, match=expected):
        open_source(tmp_path, SHAPE, NAMES)


def test_what_lies_in_the_wrong_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "loose.png").write_text("")
    with pytest.raises(DataError, match=r"loose.png is a file where the folder of a"):
        open_source(tmp_path, SHAPE, NAMES)
    (tmp_path / "cat" / "inner").mkdir(parents=True)
    (tmp_path / "loose.png").unlink()
    with pytest.raises(DataError, match="inner is a folder where an image"):
        open_source(tmp_path, SHAPE, NAMES)
    with pytest.raises(DataError, match="there is no such file"):
        open_source(tmp_path / "missing", SHAPE, NAMES)
    with pytest.raises(DataError, match="there is no such file"):
        read_inputs(tmp_path / "missing.png", SHAPE)


def arrays(**changes: Any) -> dict[str, Any]:
    inputs = np.stack([pixels(seed) for seed in range(3)])
    return {"inputs": inputs, "labels": np.array([2, 0, 1], np.int32), **changes}


def save(path: Path, **changes: Any) -> Path:
    np.savez(path, **{k: v for k, v in arrays(**changes).items() if v is not None})
    return path


def test_arrays(tmp_path: Path) -> None:
    path = save(
        tmp_path / "a.npz",
        external_ids=np.array(["x", "", "z"]),
        arrivals=np.array([1.0, 2.0, 3.0]),
    )
    source = open_source(path, SHAPE, NAMES)
    assert source.external_ids == ("x", None, "z")
    assert source.labels.dtype == torch.int64
    assert source.labels.tolist() == [2, 0, 1]
    assert source.arrivals is not None
    assert source.arrivals.tolist() == [1.0, 2.0, 3.0]
    np.testing.assert_array_equal(source.images([1]).numpy()[0], pixels(1))
    np.testing.assert_array_equal(read_inputs(path, SHAPE), arrays()["inputs"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": None}, "found no inputs"),
        ({"labels": None}, "found no labels"),
        ({"inputs": np.zeros((3, 4, 4, 1), np.uint8)}, r"expected uint8 of shape \(n,"),
        ({"inputs": np.zeros((3, 4, 4, 3))}, "found float64"),
        ({"labels": np.zeros(2, int)}, r"whole numbers of shape \(3,\)"),
        ({"labels": np.zeros(3)}, "found float64"),
        ({"external_ids": np.arange(3)}, "expected texts"),
        ({"arrivals": np.arange(3)}, "seconds since 1970"),
        ({"external_ids": np.array([{}, 1, 2], dtype=object)}, "cannot be read as"),
        ({"labels": np.array([0, 1, 3])}, r"a\.npz: labels: .* \[0, 3\), found 3"),
        ({"arrivals": np.array([1.0, 1.79e12, 2.0])}, r"a\.npz: .* found 1.79e\+12"),
        ({"arrivals": np.array([1.0, 2.0, -1.0])}, "seconds since 1970, up to"),
        ({"class_names": np.array(["cat", "gnu", "elk"])}, "does not know: gnu, elk"),
        ({"class_names": np.array(["cat", "dog"])}, r"labels: expected values in \["),
    ],
)
def test_arrays_that_do_not_fit(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        open_source(save(tmp_path / "a.npz", **changes), SHAPE, NAMES)


def test_labels_are_found_by_the_names_of_their_classes(tmp_path: Path) -> None:
    names = np.array(["gnu", "fox", "cat"])
    path = save(tmp_path / "a.npz", labels=np.array([1, 2, 1]), class_names=names)
    assert open_source(path, SHAPE, NAMES).labels.tolist() == [2, 0, 2]
    # A store without names has nothing to compare them with.
    assert open_source(path, SHAPE, (), 3).labels.tolist() == [1, 2, 1]


@pytest.mark.parametrize("name", ["a.npz", "a.npy"])
def test_a_file_that_is_no_archive(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("no archive")
    with pytest.raises(DataError, match=r"cannot be read as \.np") as caught:
        read_inputs(path, SHAPE)
    assert "unsafe" not in str(caught.value)
    assert "pickle" not in str(caught.value)


def test_single_inputs_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", pixels(1))
    np.save(tmp_path / "two.npy", np.stack([pixels(1), pixels(2)]))
    np.save(tmp_path / "flat.npy", np.arange(5))
    assert read_inputs(tmp_path / "one.npy", SHAPE).shape == (1, *SHAPE)
    assert read_inputs(tmp_path / "two.npy", SHAPE).shape == (2, *SHAPE)
    with pytest.raises(DataError, match=r"found int64 of shape \(5,\)"):
        read_inputs(tmp_path / "flat.npy", SHAPE)


def many(count: int) -> Source:
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    names = tuple(f"{number}" for number in range(count))
    images = torch.from_numpy(inputs)
    return Source(torch.arange(count) % 3, names, lambda rows: images[list(rows)])


def test_filling_goes_on_where_it_was_cut_short(tmp_path: Path) -> None:
    source = many(2 * AT_ONCE + 10)
    totals, counts = list[int](), list[int]()

    def stop_after_the_first(count: int) -> None:
        assert len(store) == AT_ONCE  # What is counted is stored.
        raise KeyboardInterrupt

    with create_store(tmp_path / "store", SPEC, DIM, "first") as store:
        with pytest.raises(KeyboardInterrupt):
            fill(store, source, embed, "first", on_progress=stop_after_the_first)
        filled = fill(store, source, embed, "first", totals.append, counts.append)
        assert (filled.num_stored, filled.num_skipped) == (AT_ONCE + 10, AT_ONCE)
        assert (totals, counts) == ([AT_ONCE + 10], [AT_ONCE, 10])
        ids = store.contents().ids
        torch.testing.assert_close(
            store.inputs(ids), source.images(range(2 * AT_ONCE + 10))
        )
        torch.testing.assert_close(
            store.vectors(ids), embed(source.images(range(2 * AT_ONCE + 10)))
        )


def test_what_the_policy_did_is_counted(tmp_path: Path) -> None:
    settings = StoreSettings(policy="fifo", capacity=100)
    with create_store(tmp_path / "store", SPEC, DIM, "first", settings) as store:
        filled = fill(store, many(AT_ONCE + 20), embed, "first")
        # What makes room for later ones of the same source is not stored now.
        assert (filled.num_offered, filled.num_stored) == (AT_ONCE + 20, 100)
        assert filled.num_not_kept == AT_ONCE - 80
        assert (filled.num_evicted, filled.num_skipped) == (0, 0)
        more = dataclasses.replace(many(30), external_ids=(None,) * 30)
        filled = fill(store, more, embed, "first")
        assert (filled.num_stored, filled.num_evicted) == (30, 30)


def test_what_does_not_fit_is_refused_before_a_part_of_it_is_stored(
    tmp_path: Path,
) -> None:
    settings = StoreSettings(capacity=AT_ONCE + 10)
    with create_store(tmp_path / "store", SPEC, DIM, "first", settings) as store:
        fill(store, many(4), embed, "first")
        expected = f"holds 4 examples of at most {AT_ONCE + 10}, and {AT_ONCE + 7} are"
        with pytest.raises(StoreFullError, match=expected):
            fill(store, many(AT_ONCE + 11), embed, "first")
        assert len(store) == 4
        fill(store, many(AT_ONCE + 10), embed, "first")


def test_another_model_is_refused(tmp_path: Path) -> None:
    with create_store(tmp_path / "store", SPEC, DIM, "first") as store:
        with pytest.raises(StoreMismatchError, match="found the model second"):
            fill(store, many(3), embed, "second")
        assert len(store) == 0


def test_a_store_without_inputs_gets_none(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, input=None)
    with create_store(tmp_path / "store", spec, DIM, "first") as store:
        assert fill(store, many(3), embed, "first").num_stored == 3

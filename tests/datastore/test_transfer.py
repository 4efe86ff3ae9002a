import dataclasses
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from knnper.datastore.examples import (
    Selection,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreSpec,
)
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import AT_ONCE, DATABASE, create_store
from knnper.datastore.transfer import (
    Source,
    export_store,
    fill,
    num_to_embed,
    open_source,
    read_inputs,
    summarize,
)
from knnper.errors import DataError
from tests.datastore.index_kinds import GRAPH
from tests.datastore.small_store import (
    IMAGE_DIM,
    IMAGE_SHAPE,
    IMAGES,
    small_store,
    some,
)
from tests.knnper_data.site.site_cases import pixels, put_image

NAMES = IMAGES.class_names


def embed(images: Tensor) -> Tensor:
    return images.flatten(1)[:, :IMAGE_DIM].float()


def test_a_folder_of_images(tmp_path: Path) -> None:
    first = put_image(tmp_path / "fox" / "b.png", 1)
    put_image(tmp_path / "fox" / "a.png", 2)
    third = put_image(tmp_path / "cat" / "c.png", 3)
    for name in (".hidden", "notes.txt", "fox/.DS_Store", "fox/Thumbs.db"):
        (tmp_path / name).write_text("")
    source = open_source(tmp_path, IMAGE_SHAPE, NAMES)
    assert source.num_ignored == 1  # notes.txt
    place = {name: at for at, name in enumerate(source.external_ids)}
    assert set(place) == {"cat/c.png", "fox/a.png", "fox/b.png"}
    assert source.labels[place["cat/c.png"]] == 0
    assert source.labels.sum() == 4
    expected = source.images([place["fox/b.png"], place["cat/c.png"]])
    np.testing.assert_array_equal(expected.numpy(), [first, third])


def test_a_folders_order_mixes_the_classes_and_is_always_the_same(
    tmp_path: Path,
) -> None:
    for number in range(60):
        put_image(tmp_path / NAMES[number % 3] / f"{number}.png", number)
    source = open_source(tmp_path, IMAGE_SHAPE, NAMES)
    assert np.bincount(source.labels[:30], minlength=3).min() >= 5
    assert open_source(tmp_path, IMAGE_SHAPE, NAMES).external_ids == source.external_ids
    (tmp_path / "cat" / "0.png").unlink()
    left = tuple(name for name in source.external_ids if name != "cat/0.png")
    assert open_source(tmp_path, IMAGE_SHAPE, NAMES).external_ids == left


def test_classes_may_differ_in_white_space_and_unicode_form(tmp_path: Path) -> None:
    names = ("cat", "f\u00f6x")
    for folder in ("cat ", "fo\u0308x"):
        (tmp_path / "own" / folder).mkdir(parents=True)
        put_image(tmp_path / "own" / folder / "a.png", 1)
    source = open_source(tmp_path / "own", IMAGE_SHAPE, names)
    label_of = dict(zip(source.external_ids, source.labels.tolist(), strict=True))
    assert label_of == {"cat /a.png": 0, "fo\u0308x/a.png": 1}
    arrays = {"inputs": pixels(2), "labels": np.arange(2)}
    file = save(tmp_path / "a.npz", **arrays, class_names=["fo\u0308x", "cat\u00a0"])
    assert open_source(file, IMAGE_SHAPE, names).labels.tolist() == [1, 0]


def test_what_holds_no_examples_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="found no examples"):
        open_source(tmp_path, IMAGE_SHAPE, NAMES)
    nothing = save(tmp_path / "a.npz", inputs=pixels(0), labels=np.zeros(0, int))
    with pytest.raises(DataError, match="found no examples"):
        open_source(nothing, IMAGE_SHAPE, NAMES)
    with pytest.raises(DataError, match="found no inputs in it"):
        read_inputs(nothing, IMAGE_SHAPE)


def test_images_are_made_the_size_of_the_stores(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    large = Image.effect_noise((8, 8), 50).convert("RGB")
    large.save(tmp_path / "cat" / "large.png")
    images = open_source(tmp_path, IMAGE_SHAPE, NAMES).images([0])
    resized = large.resize((4, 4), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(images[0].numpy(), np.asarray(resized))
    np.testing.assert_array_equal(
        read_inputs(tmp_path / "cat" / "large.png", IMAGE_SHAPE), images.numpy()
    )


def test_what_lies_in_the_wrong_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "loose.png").write_text("")
    with pytest.raises(DataError, match=r"loose.png is a file where a class folder is"):
        open_source(tmp_path, IMAGE_SHAPE, NAMES)
    (tmp_path / "cat" / "inner").mkdir(parents=True)
    (tmp_path / "loose.png").unlink()
    with pytest.raises(DataError, match="inner is a folder where an image"):
        open_source(tmp_path, IMAGE_SHAPE, NAMES)
    with pytest.raises(DataError, match="there is no such file"):
        open_source(tmp_path / "missing", IMAGE_SHAPE, NAMES)
    with pytest.raises(DataError, match="there is no such file"):
        read_inputs(tmp_path / "missing.png", IMAGE_SHAPE)


def save(path: Path, **changes: Any) -> Path:
    arrays = {"inputs": pixels(3), "labels": np.array([2, 0, 1], np.int32), **changes}
    np.savez(
        path, **{name: array for name, array in arrays.items() if array is not None}
    )
    return path


def test_arrays(tmp_path: Path) -> None:
    path = save(
        tmp_path / "a.npz",
        external_ids=np.array(["x", "", "z"]),
        arrivals=np.array([1.0, 2.0, 3.0]),
    )
    source = open_source(path, IMAGE_SHAPE, NAMES)
    assert source.external_ids == ("x", None, "z")
    assert source.labels.dtype == torch.int64
    assert source.labels.tolist() == [2, 0, 1]
    np.testing.assert_array_equal(source.arrivals, [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(source.images([1]).numpy(), pixels(3)[1:2])
    np.testing.assert_array_equal(read_inputs(path, IMAGE_SHAPE), pixels(3))


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
        open_source(save(tmp_path / "a.npz", **changes), IMAGE_SHAPE, NAMES)


def test_labels_are_found_by_the_names_of_their_classes(tmp_path: Path) -> None:
    names = np.array(["gnu", "fox", "cat"])
    path = save(tmp_path / "a.npz", labels=np.array([1, 2, 1]), class_names=names)
    assert open_source(path, IMAGE_SHAPE, NAMES).labels.tolist() == [2, 0, 2]
    # A store without names has nothing to compare them with.
    assert open_source(path, IMAGE_SHAPE, (), 3).labels.tolist() == [1, 2, 1]


@pytest.mark.parametrize("name", ["a.npz", "a.npy"])
def test_a_file_that_is_no_archive(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("no archive")
    with pytest.raises(DataError, match=r"cannot be read as \.np") as caught:
        read_inputs(path, IMAGE_SHAPE)
    assert "unsafe" not in str(caught.value)
    assert "pickle" not in str(caught.value)


def test_single_inputs_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", pixels(1)[0])
    np.save(tmp_path / "two.npy", pixels(2))
    np.save(tmp_path / "flat.npy", np.arange(5))
    assert read_inputs(tmp_path / "one.npy", IMAGE_SHAPE).shape == (1, *IMAGE_SHAPE)
    assert read_inputs(tmp_path / "two.npy", IMAGE_SHAPE).shape == (2, *IMAGE_SHAPE)
    with pytest.raises(DataError, match=r"found int64 of shape \(5,\)"):
        read_inputs(tmp_path / "flat.npy", IMAGE_SHAPE)


def many(count: int) -> Source:
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 256, (count, *IMAGE_SHAPE), dtype=np.uint8)
    names = tuple(f"{number}" for number in range(count))
    images, labels = torch.from_numpy(inputs), torch.arange(count) % 3
    arrivals = torch.arange(count, dtype=torch.float64)
    return Source(labels, names, lambda rows: images[list(rows)], arrivals)


def test_filling_goes_on_where_it_was_cut_short(tmp_path: Path) -> None:
    source = many(2 * AT_ONCE + 10)
    totals, counts = list[int](), list[int]()

    def stop_after_the_first(count: int) -> None:
        assert len(store) == AT_ONCE  # What is counted is stored.
        raise KeyboardInterrupt

    with create_store(tmp_path / "store", IMAGES, IMAGE_DIM, "first") as store:
        with pytest.raises(KeyboardInterrupt):
            fill(store, source, embed, "first", on_progress=stop_after_the_first)
        filled = fill(store, source, embed, "first", totals.append, counts.append)
        assert (filled.num_stored, filled.num_skipped) == (AT_ONCE + 10, AT_ONCE)
        assert (totals, counts) == ([AT_ONCE + 10], [AT_ONCE, 10])
        held, images = store.contents(), source.images(range(2 * AT_ONCE + 10))
        assert held.labels.tolist() == source.labels.tolist()
        assert held.arrivals.tolist() == list(range(2 * AT_ONCE + 10))
        assert store.external_ids(held.ids) == list(source.external_ids)
        assert torch.equal(store.inputs(held.ids), images)
        assert torch.equal(store.vectors(held.ids), embed(images))


def test_what_the_policy_did_is_counted(tmp_path: Path) -> None:
    settings = StoreSettings(policy="fifo", capacity=100)
    with create_store(
        tmp_path / "store", IMAGES, IMAGE_DIM, "first", settings
    ) as store:
        filled = fill(store, many(AT_ONCE + 20), embed, "first")
        # What makes room for later ones of the same source is not stored now.
        assert (filled.num_offered, filled.num_stored) == (AT_ONCE + 20, 100)
        assert filled.num_not_kept == AT_ONCE - 80
        assert (filled.num_evicted, filled.num_skipped) == (0, 0)
        more = dataclasses.replace(many(30), external_ids=(None,) * 30, arrivals=None)
        filled = fill(store, more, embed, "first")
        assert (filled.num_stored, filled.num_evicted) == (30, 30)


def test_what_does_not_fit_is_refused_before_a_part_of_it_is_stored(
    tmp_path: Path,
) -> None:
    settings = StoreSettings(capacity=AT_ONCE + 10)
    with create_store(
        tmp_path / "store", IMAGES, IMAGE_DIM, "first", settings
    ) as store:
        fill(store, many(4), embed, "first")
        expected = f"holds 4 examples of at most {AT_ONCE + 10}, and {AT_ONCE + 7} are"
        with pytest.raises(StoreFullError, match=expected):
            fill(store, many(AT_ONCE + 11), embed, "first")
        assert len(store) == 4
        fill(store, many(AT_ONCE + 10), embed, "first")


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


def test_a_store_without_inputs_or_examples(tmp_path: Path) -> None:
    with create_store(tmp_path / "full", StoreSpec(3), IMAGE_DIM, "first") as store:
        assert fill(store, many(3), embed, "first").num_stored == 3
    create_store(tmp_path / "store", StoreSpec(3), IMAGE_DIM, "first").close()
    assert export_store(tmp_path / "store", tmp_path / "out.npz") == 0
    with np.load(tmp_path / "out.npz", allow_pickle=False) as arrays:
        assert "inputs" not in arrays
        assert arrays["embeddings"].shape == (0, IMAGE_DIM)
        assert arrays["external_ids"].shape == (0,)
    summary = summarize(tmp_path / "store")
    assert summary.num_by_label == (0, 0, 0)
    assert (summary.arrivals, summary.capacity) == (None, None)


def test_a_file_is_replaced_only_on_request(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    target.write_bytes(b"precious")
    with small_store(tmp_path / "store"):
        with pytest.raises(StoreError, match=r"exists already.*--overwrite"):
            export_store(tmp_path / "store", target)
        assert target.read_bytes() == b"precious"
        with pytest.raises(StoreError, match=r"out\.npz cannot be written"):
            export_store(tmp_path / "store", tmp_path / "missing" / "out.npz")
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


def test_the_figures_of_a_store(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    chosen = StoreSettings(capacity=50, index=GRAPH)
    with small_store(folder, chosen, count=31) as store:
        assert summarize(folder).writer is not None
        store.save()
        store.reembed(lambda inputs: inputs.flatten(1).float(), "second")
    summary = summarize(folder)
    assert summary.num_by_label == (11, 10, 10)
    assert (summary.num_examples, summary.capacity) == (31, 50)
    assert [version.fingerprint for version in summary.versions] == ["first", "second"]
    assert (summary.active, summary.previous) == (2, 1)
    assert summary.arrivals == (1000.0, 1030.0)
    assert summary.writer is None
    assert summary.index_bytes > 31 * 48 * 4
    assert summary.files["store.sqlite3"] > 31 * 48 * 5


def test_what_is_left_to_embed(tmp_path: Path) -> None:
    folder = tmp_path / "store"

    def fails_at_the_second(inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) < 256:
            raise KeyboardInterrupt
        return inputs.flatten(1).float()

    with small_store(folder, count=300) as store:
        assert num_to_embed(folder, "first") == 0
        assert num_to_embed(folder, "second") == 300
        with pytest.raises(KeyboardInterrupt):
            store.reembed(fails_at_the_second, "second")
        assert num_to_embed(folder, "second") == 44

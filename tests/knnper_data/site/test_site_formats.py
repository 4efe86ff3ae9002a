import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from knnper.data.examples import InputSpec
from knnper.data.images import read_image
from knnper.data.site_check import check_site
from knnper.data.site_task import SiteTask
from knnper.errors import DataError
from tests.knnper_data.site.site_cases import (
    FEATURES,
    IMAGES,
    NAMES,
    classes,
    opened,
    pixels,
    put_image,
    split_of,
    surveyed,
)


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    names = [f"{NAMES[number % 3]}/{number}.png" for number in range(30)]
    put = {name: put_image(tmp_path / name, seed) for seed, name in enumerate(names)}
    (tmp_path / "cat" / "notes.txt").write_text("")
    (tmp_path / "cat" / ".hidden").write_text("")
    data = opened("image_folder", tmp_path, IMAGES, path=".")

    assert classes(data) == {name: name.split("/")[0] for name in put}
    assert data.num_ignored == 1
    assert len(data.validation) > 0
    for _, part in data.splits():
        for name, image in zip(part.names, part.examples.images, strict=True):
            np.testing.assert_array_equal(image.numpy(), put[name])


def test_an_image_stays_in_its_split_when_others_come(tmp_path: Path) -> None:
    for number in range(20):
        put_image(tmp_path / "cat" / f"{number}.png", number)
    before = split_of(opened("image_folder", tmp_path, IMAGES, path="."))
    for number in range(20, 40):
        put_image(tmp_path / "dog" / f"{number}.png", number)
    after = split_of(opened("image_folder", tmp_path, IMAGES, path="."))
    assert {name: after[name] for name in before} == before


def test_a_folder_for_each_split(tmp_path: Path) -> None:
    put_image(tmp_path / "train" / "cat" / "a.png", 1)
    put_image(tmp_path / "train" / "fox" / "b.png", 2)
    put_image(tmp_path / "validation" / "dog" / "a.png", 3)
    (tmp_path / "test").mkdir()
    data = opened("image_folder", tmp_path, IMAGES, path=str(tmp_path))
    assert split_of(data) == {
        "train/cat/a.png": "train",
        "train/fox/b.png": "train",
        "validation/dog/a.png": "validation",
    }
    assert classes(data)["validation/dog/a.png"] == "dog"
    (tmp_path / "bus").mkdir()
    message = "expected a split; known: test, train, validation.*data.layout: classes"
    with pytest.raises(DataError, match=message):
        opened("image_folder", tmp_path, IMAGES, path=".")


def test_train_can_be_a_class(tmp_path: Path) -> None:
    put_image(tmp_path / "train" / "a.png", 1)
    put_image(tmp_path / "bus" / "a.png", 2)
    task = SiteTask(InputSpec((4, 4, 3), 2, (0.5,) * 3, (1.0,) * 3), ("bus", "train"))
    data = opened("image_folder", tmp_path, task, path=".", layout="classes")
    assert set(classes(data)) == {"bus/a.png", "train/a.png"}


def test_images_become_what_the_federation_agreed_on(tmp_path: Path) -> None:
    put_image(tmp_path / "cat" / "a.png", 1)
    task = SiteTask(InputSpec((2, 8, 1), 3, (0.5,), (1.0,)), NAMES)
    data = opened("image_folder", tmp_path, task, path=".")
    expected = read_image(tmp_path / "cat" / "a.png", 1, (2, 8))
    np.testing.assert_array_equal(data.train.examples.images[0], expected)


def test_all_unreadable_images_are_named(tmp_path: Path) -> None:
    put_image(tmp_path / "cat" / "good.png", 1)
    for number in range(62):
        (tmp_path / "cat" / f"bad{number}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"(?s)62 examples cannot be read.*and 12 more"):
        opened("image_folder", tmp_path, IMAGES, path=".")
    data = surveyed("image_folder", tmp_path, IMAGES, path=".")
    assert set(split_of(data)) == {"cat/good.png"}
    assert set(data.unreadable) == {f"cat/bad{number}.png" for number in range(62)}
    own: dict[str, Any] = {"path": ".", "on_error": "skip"}
    own["fractions"] = {"validation": 0.0, "test": 0.0}
    data = opened("image_folder", tmp_path, IMAGES, **own)
    assert set(split_of(data)) == {"cat/good.png"}
    assert not check_site(data).problems


def test_unknown_classes_are_not_even_read(tmp_path: Path) -> None:
    put_image(tmp_path / "cat" / "a.png", 1)
    (tmp_path / "gnu").mkdir()
    (tmp_path / "gnu" / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="'gnu': 1 example\n"):
        opened("image_folder", tmp_path, IMAGES, path=".")
    data = opened("image_folder", tmp_path, IMAGES, path=".", unknown_labels="drop")
    assert data.dropped == {"gnu": 1}
    assert len(data.train) == 1


def test_without_a_task_the_first_image_speaks(tmp_path: Path) -> None:
    put_image(tmp_path / "b" / "x.png", 1)
    put_image(tmp_path / "a" / "y.png", 2)
    task = surveyed("image_folder", tmp_path, path=".").task
    assert task.class_names == ("a", "b")
    assert task.spec.image_shape == (4, 4, 3)
    grey = tmp_path / "grey" / "c" / "z.png"
    grey.parent.mkdir(parents=True)
    Image.new("L", (6, 5)).save(grey)
    task = surveyed("image_folder", tmp_path / "grey", path=".").task
    assert task.spec.image_shape == (5, 6, 1)


def test_images_that_do_not_fit(tmp_path: Path) -> None:
    two = SiteTask(InputSpec((4, 4, 2), 3, (0.5,) * 2, (1.0,) * 2), NAMES)
    (tmp_path / "empty").mkdir()
    put_image(tmp_path / "good" / "cat" / "a.png", 1)
    put_image(tmp_path / "loose" / "a.png", 1)
    put_image(tmp_path / "bytes" / "cat" / "a\udce9.png", 1)
    for path, task, message in (
        ("good", FEATURES, r"agreed on rows of features \(float32\)"),
        ("good", two, "have 1 or 3 channels"),
        ("missing", IMAGES, "missing does not exist; expected PATH/CLASS"),
        ("empty", IMAGES, "contains no examples"),
        ("loose", IMAGES, r"a\.png is a file where a class folder"),
        # No store takes this name.
        ("bytes", IMAGES, r"cannot be written as UTF-8, such as 'cat/a"),
    ):
        with pytest.raises(DataError, match=message):
            opened("image_folder", tmp_path, task, path=path)


def save_npz(folder: Path, **arrays: Any) -> None:
    np.savez(folder / "a.npz", **arrays)


def test_one_pair_of_arrays(tmp_path: Path) -> None:
    inputs = pixels(30)
    save_npz(tmp_path, inputs=inputs, labels=np.arange(30) % 3)
    data = opened("npz", tmp_path, IMAGES, path="a.npz")

    assert sum(len(part) for _, part in data.splits()) == 30
    assert classes(data) == {f"{n:05d}": NAMES[n % 3] for n in range(30)}
    for _, part in data.splits():
        positions = [int(name) for name in part.names]
        assert positions == sorted(positions)
        np.testing.assert_array_equal(part.examples.images.numpy(), inputs[positions])
    assert data.train.examples.images.dtype == torch.uint8
    assert data.train.examples.labels.dtype == torch.int64


def test_class_names_in_the_file_decide(tmp_path: Path) -> None:
    save_npz(
        tmp_path,
        inputs=pixels(3),
        labels=np.array([0, 1, 1], np.uint8),
        class_names=np.array(["fox", "cat"]),
        names=np.array(["x", "y", "z"]),
        split=np.array(["Train", "test", "VAL"]),
    )
    data = opened("npz", tmp_path, IMAGES, path="a.npz")
    assert classes(data) == {"x": "fox", "y": "cat", "z": "cat"}
    assert split_of(data) == {"x": "train", "y": "test", "z": "validation"}


def test_validation_data_is_taken_from_training_data_test_data_is_not(
    tmp_path: Path,
) -> None:
    labels = np.zeros(200, int)
    save_npz(tmp_path, train_inputs=pixels(200), train_labels=labels)
    data = opened("npz", tmp_path, IMAGES, path="a.npz")
    assert 20 < len(data.validation) < 60
    assert len(data.test) == 0


def test_features(tmp_path: Path) -> None:
    rows = np.array([[1.5, -2.0], [0.1, 3.0]])
    save_npz(tmp_path, train_inputs=rows, train_labels=np.array([0, 2]))
    none = {"validation": 0.0}
    data = opened("npz", tmp_path, FEATURES, path="a.npz", fractions=none)
    expected = torch.tensor([[[[1.5, -2.0]]], [[[0.1, 3.0]]]])
    assert torch.equal(data.train.examples.images, expected)
    for part in (data.train, data.validation):
        assert part.examples.images.dtype == torch.float32


def test_grey_images_need_no_channel(tmp_path: Path) -> None:
    task = SiteTask(InputSpec((2, 3, 1), 3, (0.5,), (0.5,)), NAMES)
    save_npz(tmp_path, inputs=np.full((5, 2, 3), 7, np.int16), labels=np.zeros(5, int))
    images = opened("npz", tmp_path, task, path="a.npz").train.examples.images
    assert (images.shape[1:], images.dtype) == ((2, 3, 1), torch.uint8)


def test_without_a_task_the_data_speaks_for_itself(tmp_path: Path) -> None:
    save_npz(tmp_path, inputs=pixels(2), labels=np.array([10, 9]))
    task = surveyed("npz", tmp_path, path="a.npz").task
    assert task.class_names == ("9", "10")
    assert task.spec == InputSpec((4, 4, 3), 2, (0.0,) * 3, (1.0,) * 3)
    save_npz(tmp_path, inputs=np.ones((2, 5)), labels=np.array(["b", "a"]))
    task = surveyed("npz", tmp_path, path="a.npz").task
    assert task.class_names == ("a", "b")
    assert (task.spec.image_shape, task.spec.dtype) == ((1, 1, 5), "float32")


GOOD: dict[str, Any] = {"inputs": pixels(3), "labels": np.array([0, 1, 2])}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": None}, "found no array inputs"),
        ({"labels": np.zeros(2, int)}, r"labels of shape \(2,\); expected"),
        ({"labels": np.zeros(3)}, "found labels of float64, expected whole numbers"),
        ({"labels": np.array([0, 1, 3])}, "'3': 1 example\n"),
        ({"class_names": np.array(["cat", "dog"])}, "positions in its class_names"),
        ({"inputs": pixels(3)[:, :2]}, r"found inputs uint8 of shape \(3, 2, 4, 3\)"),
        ({"inputs": pixels(3) / 255}, r"found \d+ values in the inputs such as 0\.\d"),
        ({"inputs": pixels(3).astype(int) + 9}, "such as 2.., expected whole numbers"),
        ({"names": np.array(["a", "b", "a"])}, "1 names of examples occur more than"),
        ({"names": np.array(["a", "b", ""])}, "or cannot be written as UTF-8"),
        ({"names": np.array(["a"])}, r"names: expected texts of shape \(3,\)"),
        (
            {"split": np.array(["train", "eval", "eval"])},
            "the split 'eval' in 2 examples",
        ),
        ({"train_inputs": pixels(3)}, "or train_inputs and train_labels"),
        ({"labels": np.array([0, None, 1], object)}, "cannot be read as .npz"),
    ],
)
def test_arrays_that_do_not_fit(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    arrays = {key: one for key, one in (GOOD | changes).items() if one is not None}
    save_npz(tmp_path, **arrays)
    with pytest.raises(DataError, match=message) as caught:
        opened("npz", tmp_path, IMAGES, path="a.npz")
    assert str(tmp_path / "a.npz") in str(caught.value)


def test_splits_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the file does not exist"):
        opened("npz", tmp_path, IMAGES, path="a.npz")
    unfit = np.array([[1.0, np.nan], [1e300, 2.0]])
    other: dict[str, Any] = {"test_inputs": pixels(1) / 1, "test_labels": [0]}
    for inputs, task, more, message in (
        (unfit, FEATURES, {}, "2 values in .* missing, inf"),
        (pixels(2), IMAGES, other, "the inputs of the splits differ in form"),
        (pixels(0), IMAGES, {}, "contains no examples"),
    ):
        labels = np.zeros(len(inputs), int)
        save_npz(tmp_path, train_inputs=inputs, train_labels=labels, **more)
        none = {"validation": 0.0}
        with pytest.raises(DataError, match=message):
            opened("npz", tmp_path, task, path="a.npz", fractions=none)


arrow: Any = pytest.importorskip("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

ROWS: dict[str, list[Any]] = {
    "id": ["p1", "p2", "p3", "p4"],
    "age": [40, 50, 60, 70],
    "kind": ["cat", "dog", "fox", "cat"],
    "dose": [0.5, 1.5, -2.0, 1e-3],
    "part": ["train", "train", "validation", "test"],
}

COLUMNS = {"label": "kind", "id": "id", "split": "part"}


def save_table(folder: Path, suffix: str, **changes: Any) -> str:
    rows = {key: one for key, one in (ROWS | changes).items() if one is not None}
    table = arrow.table(rows)
    name = f"a.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, folder / name)
    else:
        lines = [",".join(rows), *(map(_line, zip(*rows.values(), strict=True)))]
        (folder / name).write_text("\n".join(lines))
    return name


def _line(values: tuple[Any, ...]) -> str:
    return ",".join("" if value is None else str(value) for value in values)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_column_for_each_feature(tmp_path: Path, suffix: str) -> None:
    path = save_table(tmp_path, suffix)
    data = opened("table", tmp_path, FEATURES, path=path, **COLUMNS)
    assert split_of(data) == dict(zip(ROWS["id"], ROWS["part"], strict=True))
    assert classes(data) == dict(zip(ROWS["id"], ROWS["kind"], strict=True))
    images = data.train.examples.images
    assert torch.equal(images, torch.tensor([[[[40, 0.5]]], [[[50, 1.5]]]]))
    assert images.dtype == torch.float32


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_features_come_in_the_order_that_is_named(tmp_path: Path, suffix: str) -> None:
    path = save_table(tmp_path, suffix, note=["a", "b", "c", "d"])
    chosen = {"features": ["dose", "age"]}
    data = opened("table", tmp_path, FEATURES, path=path, **COLUMNS, **chosen)
    assert data.test.examples.images.flatten().tolist() == pytest.approx([1e-3, 70])
    agreed = replace(FEATURES, feature_names=("dose", "age"))
    data = opened("table", tmp_path, agreed, path=path, **COLUMNS)
    assert data.test.examples.images.flatten().tolist() == pytest.approx([1e-3, 70])
    agreed = replace(FEATURES, feature_names=("age", "doze"))
    with pytest.raises(DataError, match=r"has no column 'doze'; did you mean 'dose'\?"):
        opened("table", tmp_path, agreed, path=path, **COLUMNS)


def test_numbers_as_labels(tmp_path: Path) -> None:
    path = save_table(tmp_path, "parquet", kind=[2, 0, 1, 2])
    data = opened("table", tmp_path, FEATURES, path=path, **COLUMNS)
    assert list(classes(data).values()) == ["fox", "cat", "dog", "fox"]


def test_texts_stay_what_they_are(tmp_path: Path) -> None:
    task = replace(FEATURES, class_names=("01", "1", "NA"))
    kinds, ids = ["01", "NA", "1", "01"], ["07", "7", "8", "9"]
    path = save_table(tmp_path, "csv", kind=kinds, id=ids)
    data = opened("table", tmp_path, task, path=path, **COLUMNS)
    assert classes(data) == {"07": "01", "7": "NA", "8": "1", "9": "01"}


def test_a_guess_from_the_beginning_of_a_file_does_not_bind(tmp_path: Path) -> None:
    lines = ["x,y,kind", *(f"{number},1,cat" for number in range(200_000)), "0.5,1,cat"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    chosen = {"label": "kind", "fractions": {"test": 0}}
    data = opened("table", tmp_path, FEATURES, path="a.csv", **chosen)
    assert sum(len(part) for _, part in data.splits()) == 200_001
    assert (data.train.examples.images % 1 != 0).sum() <= 1


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_truth_values_are_numbers(tmp_path: Path, suffix: str) -> None:
    path = save_table(tmp_path, suffix, age=[True, False, True, False])
    data = opened("table", tmp_path, FEATURES, path=path, **COLUMNS)
    assert data.train.examples.images[:, 0, 0, 0].tolist() == [1.0, 0.0]


def test_images_as_rows(tmp_path: Path) -> None:
    task = SiteTask(InputSpec((1, 2, 1), 3, (0.5,), (1.0,)), NAMES)
    path = save_table(tmp_path, "csv", dose=[0, 255, 3, 4])
    data = opened("table", tmp_path, task, path=path, **COLUMNS)
    assert data.train.examples.images.dtype == torch.uint8
    assert data.train.examples.images.flatten(1).tolist() == [[40, 0], [50, 255]]
    path = save_table(tmp_path, "csv")
    with pytest.raises(DataError, match=r"such as 0\.5, expected whole numbers from 0"):
        opened("table", tmp_path, task, path=path, **COLUMNS)


def test_another_delimiter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x;y;kind\n1;2;cat\n3;4;dog\n")
    data = surveyed("table", tmp_path, path="a.csv", label="kind", delimiter=";")
    assert set(classes(data)) == {"00000", "00001"}
    assert data.task.class_names == ("cat", "dog")
    assert data.task.spec.image_shape == (1, 1, 2)
    assert data.task.spec.dtype == "float32"
    with pytest.raises(DataError, match=r"found the delimiter ', ', expected one"):
        surveyed("table", tmp_path, path="a.csv", label="kind", delimiter=", ")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"age": [1, None, None, 2], "dose": [float("inf"), 0.5, 1.0, 2.0]},
            r"missing, not finite or .*, in 2 columns \(age 2, dose 1\); fill",
        ),
        ({"kind": [*"ab", None, "c"]}, "1 rows hold nothing in the column 'kind'"),
        ({"kind": None}, r"has no column 'kind'; .*known: age, dose, id, part"),
        ({"age": ["a", "b", "c", "d"]}, r"found the columns age \(string\)"),
        ({"age": None, "dose": None}, "has no columns of features"),
        ({"age": None}, r"found inputs float64 of shape \(4, 1\), expected float32 of"),
        ({"id": ["a", "a", "b", None]}, "2 names of examples occur more than once"),
        ({"part": ["train", "eval", "test", "eval"]}, "the split 'eval' in 2 examples"),
    ],
)
def test_a_table_that_does_not_fit(
    tmp_path: Path, suffix: str, changes: dict[str, Any], message: str
) -> None:
    path = save_table(tmp_path, suffix, **changes)
    with pytest.raises(DataError, match=message) as caught:
        opened("table", tmp_path, FEATURES, path=path, **COLUMNS)
    assert str(tmp_path / path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", None, "does not exist; give a CSV or Parq"),
        ("a.csv", b"", "cannot be read as a table"),
        ("a.parquet", b"", "cannot be read as a table"),
        ("a.csv", b"x,kind\n1,\xe9", "cannot be read as a table"),
        ("a.csv", b"x,kind\n1,cat\n2,cat,3\n", "cannot be read as a table"),
        ("a.csv", b"x,x,kind\n1,2,cat\n", "more than one column 'x'"),
        ("a.xlsx", b"", r"found the suffix '.xlsx', expected one of"),
    ],
)
def test_files_that_are_no_tables(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        surveyed("table", tmp_path, path=name, label="kind")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError(name)

    path = save_table(tmp_path, "csv")
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DataError, match=r"needs the package pyarrow.*knnper\[tables\]"):
        surveyed("table", tmp_path, path=path, label="kind")

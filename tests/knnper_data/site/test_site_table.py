"""Own data as a table."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from knnper.data.examples import InputSpec
from knnper.data.site_data import SiteTask
from knnper.errors import DataError
from tests.knnper_data.site.site_cases import (
    FEATURES,
    NAMES,
    classes,
    opened,
    split_of,
    surveyed,
)

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


def save(folder: Path, suffix: str, **changes: Any) -> str:
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
    path = save(tmp_path, suffix)
    data = opened("table", tmp_path, FEATURES, path=path, **COLUMNS)
    assert split_of(data) == dict(zip(ROWS["id"], ROWS["part"], strict=True))
    assert classes(data) == dict(zip(ROWS["id"], ROWS["kind"], strict=True))
    images = data.train.examples.images
    assert torch.equal(images, torch.tensor([[[[40, 0.5]]], [[[50, 1.5]]]]))
    assert images.dtype == torch.float32


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_features_come_in_the_order_that_is_named(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path, suffix, note=["a", "b", "c", "d"])
    chosen = {"features": ["dose", "age"]}
    data = opened("table", tmp_path, FEATURES, path=path, **COLUMNS, **chosen)
    assert data.test.examples.images.flatten().tolist() == pytest.approx([1e-3, 70])
    agreed = replace(FEATURES, feature_names=("dose", "age"))
    data = opened("table", tmp_path, agreed, path=path, **COLUMNS)
    assert data.test.examples.images.flatten().tolist() == pytest.approx([1e-3, 70])


def test_rows_without_names(tmp_path: Path) -> None:
    path = save(tmp_path, "csv", id=None, part=None)
    data = opened("table", tmp_path, FEATURES, path=path, label="kind")
    assert set(classes(data)) == {"00000", "00001", "00002", "00003"}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_numbers_as_labels(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path, suffix, kind=[2, 0, 1, 2])
    data = opened("table", tmp_path, FEATURES, path=path, **COLUMNS)
    assert list(classes(data).values()) == ["fox", "cat", "dog", "fox"]


def test_texts_stay_what_they_are(tmp_path: Path) -> None:
    task = replace(FEATURES, class_names=("01", "1", "NA"))
    path = save(tmp_path, "csv", kind=["01", "NA", "1", "01"], id=["07", "7", "8", "9"])
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
    path = save(tmp_path, suffix, age=[True, False, True, False])
    data = opened("table", tmp_path, FEATURES, path=path, **COLUMNS)
    assert data.train.examples.images[:, 0, 0, 0].tolist() == [1.0, 0.0]


def test_images_as_rows(tmp_path: Path) -> None:
    task = SiteTask(InputSpec((1, 2, 1), 3, (0.5,), (1.0,)), NAMES)
    path = save(tmp_path, "csv", dose=[0, 255, 3, 4])
    data = opened("table", tmp_path, task, path=path, **COLUMNS)
    assert data.train.examples.images.dtype == torch.uint8
    assert data.train.examples.images.flatten(1).tolist() == [[40, 0], [50, 255]]
    path = save(tmp_path, "csv")
    with pytest.raises(DataError, match=r"such as 0\.5, expected whole numbers from 0"):
        opened("table", tmp_path, task, path=path, **COLUMNS)


def test_another_delimiter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x;y;kind\n1;2;cat\n3;4;dog\n")
    data = surveyed("table", tmp_path, path="a.csv", label="kind", delimiter=";")
    assert data.task.class_names == ("cat", "dog")
    assert data.task.spec.image_shape == (1, 1, 2)
    assert data.task.spec.dtype == "float32"
    with pytest.raises(DataError, match=r"found the delimiter ', ', expected one"):
        surveyed("table", tmp_path, path="a.csv", label="kind", delimiter=", ")


def test_features_that_are_not_there(tmp_path: Path) -> None:
    path = save(tmp_path, "csv")
    with pytest.raises(DataError, match="has no columns of features"):
        opened("table", tmp_path, FEATURES, path=path, **COLUMNS, features=[])
    agreed = replace(FEATURES, feature_names=("age", "doze"))
    with pytest.raises(DataError, match=r"has no column 'doze'; did you mean 'dose'\?"):
        opened("table", tmp_path, agreed, path=path, **COLUMNS)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"age": [1, None, None, 2], "dose": [None, 0.5, 1.0, 2.0]},
            r"missing, not finite or .*, in 2 columns \(age 2, dose 1\); fill",
        ),
        ({"dose": [0.5, float("inf"), 1.0, 2.0]}, r"in 1 columns \(dose 1\)"),
        (
            {"kind": ["cat", None, "cat", "cat"]},
            "1 rows hold nothing in the column 'kind'",
        ),
        ({"kind": None}, r"has no column 'kind'; .*known: age, dose, id, part"),
        ({"age": ["a", "b", "c", "d"]}, r"found the columns age \(string\)"),
        ({"age": None, "dose": None}, "has no columns of features"),
        ({"age": None}, r"found inputs float64 of shape \(4, 1\), expected float32 of"),
        ({"id": ["a", "a", "b", None]}, "2 names of examples occur more than once"),
        ({"part": ["train", "val", "test", "val"]}, "the split 'val' in 2 examples"),
    ],
)
def test_what_does_not_fit(
    tmp_path: Path, suffix: str, changes: dict[str, Any], message: str
) -> None:
    path = save(tmp_path, suffix, **changes)
    with pytest.raises(DataError, match=message) as caught:
        opened("table", tmp_path, FEATURES, path=path, **COLUMNS)
    assert str(tmp_path / path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", None, "there is no such file; give a CSV or Parq"),
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

    path = save(tmp_path, "csv")
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DataError, match=r"needs the package pyarrow.*knnper\[tables\]"):
        surveyed("table", tmp_path, path=path, label="kind")


def test_many_columns_are_one_row(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 300)).astype(np.float32)
    header = ",".join([*(f"f{n}" for n in range(300)), "kind"])
    body = [",".join([*map(repr, row.tolist()), "cat"]) for row in values]
    (tmp_path / "a.csv").write_text("\n".join([header, *body]))
    data = surveyed("table", tmp_path, path="a.csv", label="kind")
    rows = {
        name: image.numpy().ravel()
        for _, part in data.splits()
        for name, image in zip(part.names, part.examples.images, strict=True)
    }
    np.testing.assert_array_equal(
        np.stack([rows[f"0000{n}"] for n in range(3)]), values
    )

"""Images in columns of tables and of data sets of Hugging Face; texts in the latter."""

import importlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from knnper.data.examples import Dataset, LabelledArrays
from knnper.data.hugging_face import HuggingFaceSettings
from knnper.data.tables import TableSettings
from knnper.errors import DataError
from tests.knnper_data.text.tokenizers_made import make_tokenizer

arrow: Any = pytest.importorskip("pyarrow")
datasets: Any = pytest.importorskip("datasets")
parquet: Any = importlib.import_module("pyarrow.parquet")


def picture(value: int) -> Image.Image:
    return Image.new("RGB", (4, 4), (value,) * 3)


def content(value: int) -> bytes:
    file = io.BytesIO()
    picture(value).save(file, "PNG")
    return file.getvalue()


def first(part: LabelledArrays) -> list[int]:
    return [int(value) for value in part.images[:, 0, 0, 0]]


def test_paths_in_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for value in range(12):
        picture(value).save(tmp_path / "photos" / f"{value:02}.png")
    rows = [f"{value:02}.png,{'ab'[value % 2]},w{value // 6}" for value in range(12)]
    file = tmp_path / "own.csv"
    file.write_text("\n".join(["file,kind,ward", *rows]))
    own: dict[str, Any] = {
        "train": str(file),
        "label": "kind",
        "image": "file",
        "client": "ward",
    }
    settings = TableSettings(**own, root=str(tmp_path / "photos"))
    data = settings.load()
    assert (data.class_names, data.client_names) == (("a", "b"), ("w0", "w1"))
    assert sorted(first(data.train) + first(data.test)) == list(range(12))
    for part in (data.train, data.test):
        np.testing.assert_array_equal(part.images[:, 0, 0, 0] % 2, part.labels)
        np.testing.assert_array_equal(part.images[:, 0, 0, 0] // 6, part.client_ids)
    # Another picture under the same name is seen, and so is one that is gone.
    picture(99).save(tmp_path / "photos" / "03.png")
    data = settings.load()
    assert 99 in first(data.train) + first(data.test)
    (tmp_path / "photos" / "03.png").unlink()
    with pytest.raises(DataError, match=r"03\.png cannot be read as an image"):
        settings.load()


@pytest.mark.parametrize("as_struct", [False, True])
def test_contents_in_a_parquet_file(tmp_path: Path, as_struct: bool) -> None:
    values = [5, 6, 7, 8]
    files: list[Any] = [content(value) for value in values]
    files[2] = b"torn"
    if as_struct:
        files = [{"bytes": file, "path": None} for file in files]
    table = arrow.table({"image": files, "label": [0, 1, 0, 1]})
    for name in ("train", "test"):
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    paths: dict[str, Any] = {
        name: str(tmp_path / f"{name}.parquet") for name in ("train", "test")
    }
    with pytest.raises(DataError, match=r"train\.parquet, row 3, .* be read as an im"):
        TableSettings(label="label", image="image", **paths).load()
    data = TableSettings(
        label="label", image="image", on_error="skip", channels=1, **paths
    ).load()
    assert data.num_skipped == 2
    assert first(data.train) == first(data.test) == [5, 6, 8]
    assert data.train.labels.tolist() == [0, 1, 1]


def made(folder: Path, count: int = 10) -> Any:
    features = datasets.Features(
        {
            "photo": datasets.Image(),
            "species": datasets.ClassLabel(names=["zebra", "ant", "bee"]),
            "ward": datasets.Value("string"),
            "length": datasets.Value("float64"),
            "note": datasets.Value("string"),
        }
    )
    columns = {
        "photo": [picture(value) for value in range(count)],
        "species": [value % 2 for value in range(count)],
        "ward": [f"w{value // 5}" for value in range(count)],
        "length": [float(value) for value in range(count)],
        "note": [f"it is w{value}" for value in range(count)],
    }
    return datasets.Dataset.from_dict(columns, features=features)


def hugging_face(folder: Path, **settings: Any) -> Dataset:
    usual = {"path": str(folder), "label": "species"}
    return HuggingFaceSettings(**{**usual, **settings}).load()


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    splits = {"train": made(tmp_path), "test": made(tmp_path, 4).shuffle(seed=1)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "own")
    data = hugging_face(tmp_path / "own", image="photo", client="ward")
    # In the order of the data set's own names, of which one has no example.
    assert data.class_names == ("zebra", "ant", "bee")
    assert data.spec.num_classes == 3
    assert data.client_names == ("w0", "w1")
    assert first(data.train) == list(range(10))
    assert sorted(first(data.test)) == [0, 1, 2, 3]
    for part in (data.train, data.test):
        np.testing.assert_array_equal(part.images[:, 0, 0, 0] % 2, part.labels)
    rows = hugging_face(tmp_path / "own", features=["length"])
    np.testing.assert_array_equal(rows.train.images.ravel(), np.arange(10))
    assert rows.spec.mean == (4.5,)
    tokenizer = make_tokenizer(tmp_path / "tokenizer", ("it", "is", "w0", "w1", "w2"))
    texts = hugging_face(
        tmp_path / "own", text="note", tokenizer=str(tokenizer), max_tokens=5
    )
    assert texts.train.images[1].ravel().tolist() == [2, 4, 5, 7, 3]


def test_a_folder_of_files_without_a_test_split(tmp_path: Path) -> None:
    made(tmp_path).remove_columns("photo").to_parquet(tmp_path / "own" / "rows.parquet")
    data = hugging_face(tmp_path / "own", features=["length"], test_fraction=0.3)
    both = [*data.train.images.ravel(), *data.test.images.ravel()]
    assert sorted(both) == list(range(10))
    assert np.bincount(data.test.labels).tolist() == [2, 2]  # 0.3 of five each


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"must be numbers, found the columns photo .*data\.image, data\.text"),
        ({"image": "foto"}, "no column 'foto'; did you mean 'photo'"),
        ({"image": "photo", "train": "training"}, "no split 'training'; did you mean"),
        (
            {"path": "some/where"},
            r"some/where.* cannot be loaded .*data\.download=true",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    datasets.DatasetDict({"train": made(tmp_path)}).save_to_disk(tmp_path / "own")
    with pytest.raises(DataError, match=message):
        hugging_face(tmp_path / "own", **changes)


def test_what_the_package_would_leave_out_is_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for kind in ("ant", "bee"):
            (tmp_path / "own" / split / kind).mkdir(parents=True)
            picture(1).save(tmp_path / "own" / split / kind / "a.png")
    own: dict[str, Any] = {"label": "label", "image": "image"}
    assert len(hugging_face(tmp_path / "own", **own).train) == 2
    (tmp_path / "own" / "train" / "cow").symlink_to("/mnt/not-mounted/cow")
    with pytest.raises(DataError, match="cow is a link to /mnt/not-mounted/cow"):
        hugging_face(tmp_path / "own", **own)


def test_a_folder_that_holds_none(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "dataset_dict.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as a data set of Hugging Face"):
        hugging_face(tmp_path / "own", image="photo")


def test_nothing_is_downloaded_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path).save_to_disk(tmp_path / "kept")
    asked: list[Any] = []
    there: list[bool] = []

    def snapshot_download(name: str, **how: Any) -> str:
        asked.append((name, how["repo_type"], how["local_files_only"]))
        if how["local_files_only"] and not there:
            raise FileNotFoundError("it is not in the cache")
        there.append(True)
        return str(tmp_path / "kept")

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    own: dict[str, Any] = {"image": "photo", "client": "ward"}
    with pytest.raises(DataError, match=r"not in the cache.*data\.download=true"):
        hugging_face(Path("some/where"), **own)
    assert set(asked) == {("some/where", "dataset", True)}
    for _ in range(2):
        data = hugging_face(Path("some/where"), **own, download=True)
        assert len(data.train) + len(data.test) == 10
    # Once; then it is taken as it is.
    assert asked.count(("some/where", "dataset", False)) == 1

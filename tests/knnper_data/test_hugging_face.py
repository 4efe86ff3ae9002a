"""Splits and columns of data sets of Hugging Face."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from knnper.data.examples import Dataset
from knnper.data.hugging_face import HuggingFaceSettings
from knnper.data.tables import TableSettings
from knnper.errors import DataError
from tests.knnper_data.site.site_cases import IMAGES, opened

arrow: Any = pytest.importorskip("pyarrow")
datasets: Any = pytest.importorskip("datasets")
pandas: Any = pytest.importorskip("pandas")
parquet: Any = importlib.import_module("pyarrow.parquet")


def rows(start: int, count: int, **changes: Any) -> Any:
    places = np.arange(start, start + count)
    columns = {"size": places / 3, "kind": np.array(["a", "b"])[places % 2], **changes}
    return datasets.Dataset.from_dict(columns)


def saved(folder: Path, **splits: Any) -> Path:
    datasets.DatasetDict(splits).save_to_disk(folder / "own")
    return folder / "own"


def loaded(path: Path, **settings: Any) -> Dataset:
    return HuggingFaceSettings(path=str(path), label="kind", **settings).load()


def places(data: Dataset) -> tuple[list[int], list[int]]:
    """Return which rows are trained on and tested on."""
    both = (data.train, data.test)
    train, test = (np.rint(part.images.ravel() * 3).astype(int) for part in both)
    return sorted(train.tolist()), sorted(test.tolist())


@pytest.mark.parametrize("name", ["validation", "val", "valid", "Dev"])
def test_validation_data_is_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    splits = {"train": rows(0, 8), name: rows(8, 4), "test": rows(12, 6)}
    path = saved(tmp_path, **splits)
    data = loaded(path)
    assert places(data) == (list(range(12)), list(range(12, 18)))
    np.testing.assert_array_equal(data.train.labels, np.arange(12) % 2)
    (message,) = caplog.messages
    assert f"validation data ({name}) is added to the training data" in message
    # What is tested on is not trained on; the test split is then of no use.
    assert places(loaded(path, test=name)) == (list(range(8)), list(range(8, 12)))
    assert caplog.messages[-1].endswith("own: the splits test are not used")
    # Who names another split than the usual one has it alone.
    assert places(loaded(path, train=name))[0] == list(range(8, 12))


def test_a_part_of_both_is_tested_on_without_a_test_split(tmp_path: Path) -> None:
    path = saved(tmp_path, train=rows(0, 16), validation=rows(16, 4))
    train, test = places(loaded(path))
    assert sorted(train + test) == list(range(20))
    assert len(test) == 4


def test_splits_in_capitals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    splits = {"Train": rows(0, 8), "TEST": rows(8, 4), "unsupervised": rows(12, 2)}
    data = loaded(saved(tmp_path, **splits))
    assert places(data) == (list(range(8)), list(range(8, 12)))
    assert caplog.messages[-1].endswith("the splits unsupervised are not used")


def test_images_of_validation_data(tmp_path: Path) -> None:
    def pictures(values: range, kinds: str) -> Any:
        images = [Image.new("L", (2, 2), value) for value in values]
        columns = {"image": images, "kind": list(kinds)}
        features = {"image": datasets.Image(), "kind": datasets.Value("string")}
        return datasets.Dataset.from_dict(columns, datasets.Features(features))

    splits = {"train": pictures(range(4), "abab"), "val": pictures(range(4, 6), "ab")}
    path = saved(tmp_path, **splits, test=pictures(range(6, 8), "ab"))
    data = loaded(path, image="image")
    assert data.train.images[:, 0, 0, 0].tolist() == list(range(6))
    assert data.test.images[:, 0, 0, 0].tolist() == [6, 7]


def test_an_error_names_the_splits_and_the_row_in_them(tmp_path: Path) -> None:
    validation = rows(8, 4, kind=["a", "b", None, "b"])
    path = saved(tmp_path, train=rows(0, 8), validation=validation)
    with pytest.raises(
        DataError, match=r"own/train\+validation: 1 rows .* is row 11, c"
    ):
        loaded(path)


def test_labels_that_are_not_published(tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "size": datasets.Value("float32"),
            "kind": datasets.ClassLabel(names=["a", "b"]),
        }
    )

    def labelled(start: int, labels: list[int]) -> Any:
        sizes = [at / 3 for at in range(start, start + len(labels))]
        return datasets.Dataset.from_dict({"size": sizes, "kind": labels}, features)

    path = saved(
        tmp_path,
        train=labelled(0, [0, 1] * 4),
        validation=labelled(8, [0, 1]),
        test=labelled(10, [-1] * 3),
    )
    message = r"own/test: 3 rows have the label -1, .*such as data\.test: validation"
    with pytest.raises(DataError, match=message):
        loaded(path)
    assert places(loaded(path, test="validation")) == (list(range(8)), [8, 9])


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"kind": [[0], [0, 1]] * 4}, "list<item: int64> in the column 'kind'"),
        ({"kind": [{"of": 1}] * 8}, "struct<of: int64> in the column 'kind'"),
        ({"kind": [b"\xff"] * 8}, "binary in the column 'kind', .*UTF-8"),
        ({"ward": [["a"]] * 8}, "list<item: string> in the column 'ward'"),
    ],
)
def test_labels_and_clients_of_other_types(
    tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    path = saved(tmp_path, train=rows(0, 8, **{"ward": ["w"] * 8, **changes}))
    with pytest.raises(DataError, match=f"own/train: found {found}"):
        loaded(path, features=["size"], client="ward")


def test_pandas_index_of_files_that_the_package_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = rows(0, 8).to_pandas().sample(frac=1, random_state=0)
    indexed = {
        "from_pandas": table,
        "parquet": table.rename_axis("patient"),
        # As the package reads a CSV file.
        "csv": table.assign(**{"Unnamed: 0": table.index}),
    }
    for kind, one in indexed.items():
        folder = tmp_path / kind
        folder.mkdir()
        if kind == "parquet":
            one.to_parquet(folder / "train.parquet")
        else:
            keeps_index = kind == "from_pandas"
            made = datasets.Dataset.from_pandas(one, preserve_index=keeps_index)
            made.save_to_disk(folder)
        caplog.clear()
        assert loaded(folder).feature_names == ("size",)
        assert "seem to be the index of a pandas table" in caplog.text


PIXELS = [[[value] * 4] * 4 for value in range(8)]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (PIXELS, r"found list<.*list<.*int64>> in the column 'image', expected paths"),
        (list(range(8)), "found int64 in the column 'image', expected paths of image"),
    ],
)
def test_images_that_are_neither_paths_nor_contents(
    tmp_path: Path, images: list[Any], message: str
) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"image": images, "kind": ["a", "b"] * 4}), path)
    with pytest.raises(DataError, match=message):
        TableSettings(train=str(path), label="kind", image="image").load()
    with pytest.raises(DataError, match=message):
        loaded(saved(tmp_path, train=rows(0, 8, image=images)), image="image")


def test_a_path_that_no_file_can_have(tmp_path: Path) -> None:
    lines = [f"{at}\0.png,{'ab'[at % 2]}" for at in range(20)]
    (tmp_path / "a.csv").write_text("\n".join(["image,kind", *lines]))
    settings: dict[str, Any] = {"label": "kind", "image": "image"}
    with pytest.raises(DataError, match="20 examples cannot be read:"):
        TableSettings(train=str(tmp_path / "a.csv"), image_size=4, **settings).load()
    kept = {"label_map": {"a": "cat", "b": "dog"}}
    with pytest.raises(DataError, match=r"\d examples cannot be read:"):
        opened("table", tmp_path, IMAGES, path="a.csv", **settings, **kept)

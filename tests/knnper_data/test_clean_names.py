"""Labels and clients whose names differ only in white space or Unicode form."""

import importlib
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from knnper.data.arrays import NpzFileSettings
from knnper.data.characters import CHARACTER_NAMES
from knnper.data.column_settings import ColumnSettings
from knnper.data.dividing import clean_name, clean_names
from knnper.data.domain_folder import DomainFolderSettings
from knnper.data.examples import Dataset, InputSpec
from knnper.data.hugging_face import HuggingFaceSettings
from knnper.data.image_folders import ImageFolderSettings
from knnper.data.leaf import LeafSettings
from knnper.data.site_task import SitesSettings, SiteTask
from knnper.data.tables import TableSettings
from knnper.data.text import PlaysSettings, read_texts
from knnper.data.text import read_files as read_plays
from knnper.errors import Problem
from knnper.settings import parse_settings
from tests.knnper_data.leaf.leaf_files import image, write
from tests.knnper_data.site.site_cases import classes, opened, surveyed

arrow: Any = pytest.importorskip("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

COMPOSED = "caf\u00e9"
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)
COUNT = 24
PLACE = np.arange(COUNT)
LABELS = np.array([COMPOSED, "cat", "dog", DECOMPOSED, "cat ", "\u00a0dog"])[PLACE % 6]
CLIENTS = np.array(["007", "008", "007 ", "008\t"])[PLACE // 6]
CLEAN = ((COMPOSED, "cat", "dog"), ("007", "008"))
SPEC = InputSpec((1, 1, 1), 3, (0.0,), (1.0,), "float32")
TASK = SiteTask(SPEC, CLEAN[0], ("size",))


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        (" cat\u00a0", "cat"),
        ("New\u00a0\n York", "New York"),
        ("\ufeffcat\u200b", "cat"),
        (DECOMPOSED, COMPOSED),
        ("01", "01"),
        ("\u00bd", "\u00bd"),
        (" ", ""),
    ],
)
def test_what_a_name_becomes(name: str, clean: str) -> None:
    assert clean_name(name) == clean


@given(st.text())
def test_a_clean_name_stays_as_it_is(name: str) -> None:
    assert clean_name(clean_name(name)) == clean_name(name)


def test_the_names_of_characters_are_clean() -> None:
    assert clean_names(CHARACTER_NAMES) == CHARACTER_NAMES


def put_table(folder: Path, suffix: str) -> str:
    columns = {"size": PLACE / 3, "kind": LABELS, "ward": CLIENTS}
    path = folder / f"a{suffix}"
    if suffix == ".parquet":
        parquet.write_table(arrow.table(columns), path)
    else:
        mark = {".csv": ",", ".tsv": "\t"}[suffix]
        rows = zip(*columns.values(), strict=True)
        lines = (mark.join(f'"{value}"' for value in row) for row in rows)
        path.write_text("\n".join([mark.join(columns), *lines]), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_tables(tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str) -> None:
    path = put_table(tmp_path, suffix)
    data = TableSettings(train=path, label="kind", client="ward").load()
    assert_joined(data)
    assert [message[-2:] for message in caplog.messages] == [" 3", " 2"]
    # A table of test rows may write them otherwise than that of training rows.
    data = TableSettings(train=path, test=path, label="kind", client="ward").load()
    assert_joined(data)
    for task in (None, TASK):
        site = surveyed("table", tmp_path, task, path=path, label="kind",
                        features=["size"])  # fmt: skip
        assert_same_classes(site.task.class_names, classes(site))


def assert_joined(data: Dataset) -> None:
    assert (data.class_names, data.client_names) == CLEAN
    for part in (data.train, data.test):
        places = np.rint(part.images.ravel() * 3).astype(int)
        np.testing.assert_array_equal(part.labels, places % 3)
        np.testing.assert_array_equal(part.client_ids, places // 6 % 2)


def assert_same_classes(names: tuple[str, ...], of_example: dict[str, str]) -> None:
    assert names == CLEAN[0]
    for name, label in of_example.items():
        assert label == clean_name(LABELS[int(name)])


def test_arrays(tmp_path: Path) -> None:
    inputs = PLACE[:, None] / 3
    np.savez(tmp_path / "a.npz", x=inputs, y=LABELS, clients=CLIENTS)
    assert_joined(NpzFileSettings(path=str(tmp_path / "a.npz")).load())
    site = opened("npz", tmp_path, TASK, path="a.npz")
    assert_same_classes(TASK.class_names, classes(site))
    # Positions in class_names, of which some are then the same.
    names = [COMPOSED, "cat", DECOMPOSED, "dog"]
    np.savez(tmp_path / "b.npz", x=inputs, y=PLACE % 4, class_names=names)
    data = NpzFileSettings(path=str(tmp_path / "b.npz")).load()
    assert data.class_names == (COMPOSED, "cat", "dog")
    assert np.bincount(data.train.labels).tolist() == [10, 5, 5]


def test_columns_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    names = [COMPOSED, "cat", DECOMPOSED]
    features = datasets.Features(
        {"size": datasets.Value("float32"), "kind": datasets.ClassLabel(names=names)}
    )
    columns = {"size": PLACE / 3, "kind": PLACE % 3}
    made = datasets.Dataset.from_dict(columns, features=features)
    made.save_to_disk(tmp_path / "own")
    data = HuggingFaceSettings(path=str(tmp_path / "own"), label="kind").load()
    assert data.class_names == (COMPOSED, "cat")
    places = np.rint(data.train.images.ravel() * 3).astype(int)
    np.testing.assert_array_equal(data.train.labels, places % 3 == 1)


def save_picture(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((2, 2), value, np.uint8)).save(path)


@pytest.mark.parametrize("has_users", [False, True])
def test_folders_of_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_users: bool
) -> None:
    root = tmp_path / "all" / "own"
    for at in range(24):
        user = ("ann", "ann ", "bob")[at % 3] if has_users else ""
        kind = (COMPOSED, DECOMPOSED, "dog")[at % 4 % 3]
        save_picture(root / user / kind / f"{at}.png", 10 * at)
    data = ImageFolderSettings(str(root)).load()
    assert data.class_names == (COMPOSED, "dog")
    assert data.client_names == (("ann", "bob") if has_users else ())
    assert "classes with names that differ" in caplog.text
    for part in (data.train, data.test):
        places = part.images[:, 0, 0, 0] // 10
        np.testing.assert_array_equal(part.labels, places % 4 == 2)
        if has_users:
            np.testing.assert_array_equal(part.client_ids, places % 3 == 2)
    if not has_users:
        site = surveyed("image_folder", root, path=".")
        assert site.task.class_names == (COMPOSED, "dog")
        domains = DomainFolderSettings(str(root.parent)).load()
        assert domains.class_names == (COMPOSED, "dog")


def test_users_of_leaf(tmp_path: Path) -> None:
    for split in ("train", "test"):
        users = {"ada": ([image(1)], [3]), "ada ": ([image(2)], [4])}
        write(tmp_path / split / "a.json", users)
    data = LeafSettings(root=str(tmp_path)).load()
    assert data.client_names == ("ada",)
    assert data.train.labels.tolist() == [3, 4]
    np.testing.assert_array_equal(data.train.client_ids, [0, 0])


def test_speakers(tmp_path: Path) -> None:
    said = {"ANNE": "to be", "ANNE\u00a0": "or not", "BEN": "indeed"}
    (tmp_path / "a.json").write_text(json.dumps(said))
    assert read_texts(read_plays(tmp_path / "a.json")) == {
        "ANNE": "to be\nor not",
        "BEN": "indeed",
    }
    (tmp_path / "a.txt").write_text("FIRST LORD. To be\n\nFIRST  LORD. or not\n")
    settings = PlaysSettings(
        path=str(tmp_path / "a.txt"), window=4, stride=1, min_characters=0
    )
    assert settings.load().client_names == ("FIRST LORD",)


def test_what_a_federation_agreed_on() -> None:
    section: dict[str, Any] = {
        "image_shape": [1, 1, 1],
        "class_names": [f"{DECOMPOSED} ", "dog"],
        "mean": [0],
        "std": [1],
        "dtype": "float32",
    }
    settings = parse_settings(SitesSettings, section, "data", [])
    assert settings is not None
    assert settings.task().class_names == (COMPOSED, "dog")
    for names, message in (
        (["dog", "dog\u00a0"], "class_names holds 'dog' more than once"),
        (["dog", " "], "data.class_names.1: found"),
    ):
        problems: list[Problem] = []
        section["class_names"] = names
        assert parse_settings(SitesSettings, section, "data", problems) is None
        assert message in str(problems[0])


@pytest.mark.parametrize("of_site", [COMPOSED, DECOMPOSED, f"{COMPOSED} "])
@pytest.mark.parametrize("agreed", [COMPOSED, DECOMPOSED])
def test_a_site_and_a_federation_write_a_label_otherwise(
    tmp_path: Path, of_site: str, agreed: str
) -> None:
    labels = np.array([of_site, "dog", "puppy\u00a0"])[PLACE % 3]
    np.savez(tmp_path / "a.npz", x=PLACE[:, None] / 3, y=labels)
    task = SiteTask(InputSpec((1, 1, 1), 2, (0.0,), (1.0,), "float32"), (agreed, "dog"))
    data = opened("npz", tmp_path, task, path="a.npz", label_map={" puppy": "dog "})
    found = data.train.examples
    places = np.rint(found.images.numpy().ravel() * 3).astype(int)
    np.testing.assert_array_equal(found.labels, places % 3 > 0)


def test_ids_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("name,x,kind\np,1,cat\np ,2,cat \n 7,3,dog\n")
    chosen: dict[str, Any] = {"path": "a.csv", "label": "kind", "id": "name"}
    data = surveyed("table", tmp_path, **chosen)
    assert classes(data) == {"p": "cat", "p ": "cat", " 7": "dog"}
    assert issubclass(TableSettings, ColumnSettings)


def test_numbers_with_white_space_are_numbers(tmp_path: Path) -> None:
    rows = "".join(f"{at},{9 + at % 3}{' ' * (at % 2)}\n" for at in range(30))
    (tmp_path / "a.csv").write_text(f"x,kind\n{rows}")
    data = TableSettings(train=str(tmp_path / "a.csv"), label="kind").load()
    assert data.class_names == ("9", "10", "11")
    site = surveyed("table", tmp_path, path="a.csv", label="kind")
    assert site.task.class_names == ("9", "10", "11")

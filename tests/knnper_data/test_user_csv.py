import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from knnper.data.examples import Dataset, LabelledArrays
from knnper.data.user_csv import UserCsvSettings
from knnper.errors import DataError

TRAIN = [("u1", "aaa1", 7), ("u1", "aab2", 12), ("u2", "b", 7), ("u2", "abc4", 7)]
REDS = {"aaa1": 1, "aab2": 2, "b": 3, "abc4": 4, "ccc5": 5, "ccc6": 6}


def write(file: Path, rows: list[Any], header: str = "user_id,image_id,class") -> str:
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder of images, laid out as Google Landmarks is but for one."""
    folder = tmp_path / "images"
    for name, red in REDS.items():
        file = folder.joinpath(*name[:3], f"{name}.png")
        file = folder / f"{name}.png" if name == "b" else file
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((2, 2, 3), red, dtype=np.uint8)).save(file)
    return folder


def load(root: Path, train: str, **given: Any) -> Dataset:
    return UserCsvSettings(train, str(root), suffix=".png", **given).load()


def rows_of(arrays: LabelledArrays) -> list[tuple[int, int, int]]:
    """Return (red, label, user) of each image."""
    assert arrays.client_ids is not None
    reds = arrays.images[:, 0, 0, 0].tolist()
    ids = (arrays.labels.tolist(), arrays.client_ids.tolist())
    return list(zip(reds, *ids, strict=True))


def test_two_lists(root: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "train.csv", TRAIN)
    test = write(tmp_path / "test.csv", [("u0", "ccc5", 12)])
    found = load(root, train, test=test)

    # 7 before 12: numbers, not texts. Users are those of both lists.
    assert found.class_names == ("7", "12")
    assert found.client_names == ("u0", "u1", "u2")
    assert rows_of(found.train) == [(1, 0, 1), (2, 1, 1), (3, 0, 2), (4, 0, 2)]
    assert rows_of(found.test) == [(5, 1, 0)]


def test_a_test_list_need_not_name_users(root: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "train.csv", TRAIN)
    test = write(tmp_path / "test.csv", [("ccc5", 12)], "image_id,class")
    found = load(root, train, test=test)
    assert found.test.client_ids is None
    assert found.test.labels.tolist() == [1]


def test_without_one_a_part_of_each_users_images_is_tested_on(
    root: Path, tmp_path: Path
) -> None:
    rows = [("u1", f"x{number}", number % 3) for number in range(10)]
    rows += [("u2", f"y{number}", 0) for number in range(4)] + [("u3", "z0", 1)]
    for _, name, _ in rows:
        Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(root / f"{name}.png")
    found = load(root, write(tmp_path / "train.csv", rows), test_fraction=0.3)

    users = [
        Counter(user for _, _, user in rows_of(split))
        for split in (found.train, found.test)
    ]
    assert users == [{0: 7, 1: 3, 2: 1}, {0: 3, 1: 1}]
    again = load(root, write(tmp_path / "train.csv", rows), test_fraction=0.3, seed=1)
    assert again.test.labels.tolist() != found.test.labels.tolist()


def test_columns_may_have_other_names(root: Path, tmp_path: Path) -> None:
    # A byte order mark is no part of one.
    train = write(tmp_path / "train.csv", TRAIN, "\ufeffwho,what,kind")
    names = {"user_column": "who", "image_column": "what", "class_column": "kind"}
    found = load(root, train, **names, test_fraction=0.5)
    assert (len(found.train), len(found.test)) == (2, 2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"train\.csv lists no images"),
        ([("u1", "", 3)], "line 2: a user, an image or"),
        ([("", "b", 3)], "line 2: a user, an image or"),
        ([("u1", "b")], "line 2: a user, an image or"),
        ([("u1", "b", "Paris", " France")], "found 4 values, expected 3; quote values"),
        ([("u1", "nope", 3)], "there is neither .*n/o/p/nope"),
        ([("u1", "/etc/hosts", 7)], "line 2: found the image '/etc/hosts', expected a"),
        ([("u1", "a/../../b", 7)], "line 2: found the image 'a/../../b'"),
        ([("u1", "n" * 300, 7)], r"csv, line 2: the image 'nnn.*cannot be looked up"),
        ([("u1", "a\0b", 7)], r"csv, line 2: .*cannot be looked up|cannot be read"),
        ([("u1", "x/y", 7)], r"line 2: there is neither .*images/x/y\.png nor"),
        ([("u1", "b", 7)], r"raise data\.test_fraction.* in data\.test"),
    ],
)
def test_a_wrong_list(
    root: Path, tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(root, write(tmp_path / "train.csv", rows))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("user_id,image_id,kind", "no column class, found user_id, image_id"),
        ("user_id,image_id,class,class", "more than one column 'class'; expected each"),
        (None, r"train\.csv cannot be read as a CSV file"),
    ],
)
def test_wrong_columns(
    root: Path, tmp_path: Path, header: str | None, message: str
) -> None:
    if header is not None:
        write(tmp_path / "train.csv", TRAIN, header)
    with pytest.raises(DataError, match=message):
        load(root, str(tmp_path / "train.csv"))


@pytest.mark.parametrize(
    ("delimiter", "encoding", "message"),
    [
        (";", "utf-8", "header has ';' between .* with commas in place of ';'"),
        ("\t", "utf-8", r"header has '\\t' between the columns, expected ','"),
        (",", "utf-16", "it is encoded in UTF-16, expected UTF-8"),
        (",", "latin-1", "line 2 is encoded otherwise, perhaps in Windows-1252"),
    ],
)
def test_another_delimiter_or_encoding(
    root: Path, tmp_path: Path, delimiter: str, encoding: str, message: str
) -> None:
    path = tmp_path / "train.csv"
    lines = ["user_id,image_id,class", "\u00fc,aaa1,7"]
    text = "\n".join(lines).replace(",", delimiter)
    path.write_text(text, encoding=encoding)
    with pytest.raises(DataError, match=f"cannot be read as a CSV file: .*{message}"):
        load(root, str(path))


def test_an_unclosed_quote_is_refused(root: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "train.csv", [("u1", "aaa1", '"7'), *TRAIN[1:]])
    with pytest.raises(DataError, match=r"the quote before a value in line 2 is not"):
        load(root, path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("u1", "ccc5", 99), "no training example has: 99"),
        (("u1", "aaa1", 7), r"test\.csv, line 2: .*aaa1\.png is .*train\.csv, line 2"),
        (("u1", "./b", 7), r"test\.csv, line 2: .*b\.png is also .*train\.csv, line 4"),
    ],
)
def test_a_wrong_test_list(root: Path, tmp_path: Path, row: Any, message: str) -> None:
    train = write(tmp_path / "train.csv", TRAIN)
    with pytest.raises(DataError, match=message):
        load(root, train, test=write(tmp_path / "test.csv", [row]))


@pytest.mark.parametrize("again", ["b", "./b", "link"])
def test_an_image_twice_in_a_list(root: Path, tmp_path: Path, again: str) -> None:
    (root / "link.png").symlink_to(root / "b.png")
    train = write(tmp_path / "train.csv", [*TRAIN, ("u1", again, 7)])
    expected = r"(?=.*csv, line 4\b)(?=.*csv, line 6\b).*expected each image once"
    for seed in range(4):
        with pytest.raises(DataError, match=expected):
            load(root, train, seed=seed, test_fraction=0.5)


def test_the_same_files_by_other_numbers_are_no_other_data(
    root: Path, tmp_path: Path, cache_folder: Path
) -> None:
    train = write(tmp_path / "train.csv", TRAIN)
    load(root, train, test_fraction=0.5)
    for name in ("aab2", "b"):
        file = next(root.rglob(f"{name}.png"))
        status = file.stat()
        copy = file.with_suffix(".copy")
        copy.write_bytes(file.read_bytes())
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        copy.replace(file)
        assert file.stat().st_ino != status.st_ino
    load(root, train, test_fraction=0.5)
    assert len([one for one in cache_folder.iterdir() if one.is_dir()]) == 1

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.data.characters import UnknownCharacters
from knnper.data.leaf_files import (
    User,
    decode_images,
    decode_text,
    find_leaf_files,
    parse_user,
)
from knnper.errors import DataError
from tests.knnper_data.leaf.leaf_files import (
    DATA,
    document,
    images,
    users_of,
    write,
)


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")


def names_of(paths: tuple[Path, ...], root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in paths]


@pytest.mark.parametrize("below", ["", "data/"])
def test_a_split_that_leaf_made_comes_first(tmp_path: Path, below: str) -> None:
    files = ("all_data/a.json", "train/b.json", "train/a.json", "test/a.json")
    touch(tmp_path, *(below + name for name in files))
    found = find_leaf_files(tmp_path)
    assert found.whole == ()
    expected = [f"{below}train/a.json", f"{below}train/b.json"]
    assert names_of(found.divided["train"], tmp_path) == expected
    assert names_of(found.divided["test"], tmp_path) == [f"{below}test/a.json"]


@pytest.mark.parametrize("below", ["", "data/", "all_data/", "data/all_data/"])
def test_all_users_samples_are_found(tmp_path: Path, below: str) -> None:
    files = ("all_data_10.json", "all_data_2.json", ".hidden.json", "notes.txt")
    touch(tmp_path, *(below + name for name in files))
    (tmp_path / below / "train").mkdir()
    (tmp_path / below / "folder.json").mkdir()
    found = find_leaf_files(tmp_path)
    expected = [f"{below}all_data_10.json", f"{below}all_data_2.json"]
    assert names_of(found.whole, tmp_path) == expected
    assert not found.divided


@pytest.mark.parametrize(("there", "lacking"), [("train", "test"), ("test", "train")])
def test_one_split_alone(tmp_path: Path, there: str, lacking: str) -> None:
    touch(tmp_path, f"data/{there}/a.json", "data/all_data/a.json")
    with pytest.raises(DataError, match=rf"no \.json files in .*{lacking}, but"):
        find_leaf_files(tmp_path)


def test_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.json files of LEAF in .* expected ROOT"):
        find_leaf_files(tmp_path)
    with pytest.raises(DataError, match="nowhere does not exist; expected ROOT"):
        find_leaf_files(tmp_path / "nowhere")


def test_files_that_would_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    touch(tmp_path, "train/a.json", "train/b.JSON", "test/a.json", "val/a.json")
    touch(tmp_path, "__MACOSX/a.json", "train/._a.json", "train/Thumbs.db")
    found = find_leaf_files(tmp_path)
    expected = ["train/a.json", "train/b.JSON"]
    assert names_of(found.divided["train"], tmp_path) == expected
    assert "found val beside train and test; it is not read" in caplog.text
    (tmp_path / "train" / "c.json").symlink_to("/mnt/not-mounted/c.json")
    with pytest.raises(DataError, match=r"c\.json is a link to /mnt/not-mounted/c\.js"):
        find_leaf_files(tmp_path)


def test_a_split_that_is_not_mounted_is_not_replaced_by_all_data(
    tmp_path: Path,
) -> None:
    touch(tmp_path, "all_data/a.json")
    for name in ("train", "test"):
        (tmp_path / name).symlink_to(f"/mnt/not-mounted/{name}")
    with pytest.raises(DataError, match="train is a link to /mnt/not-mounted/train"):
        find_leaf_files(tmp_path)


def test_the_fingerprint_tells_files_apart_not_places(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    for root in (first, second):
        touch(root, "all_data/a.json")
        os.utime(root / "all_data" / "a.json", ns=(0, 5))
    same = find_leaf_files(first).fingerprint()
    assert find_leaf_files(second).fingerprint() == same
    os.utime(second / "all_data" / "a.json", ns=(0, 6))
    assert find_leaf_files(second).fingerprint() != same


def test_other_orders_of_keys(tmp_path: Path) -> None:
    whole = document(DATA)
    backwards = {key: whole[key] for key in reversed(list(whole))}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(backwards, indent=2))
    assert [user.name for user in users_of(path)] == ["ada", "bob"]
    with pytest.raises(DataError, match=r"gone\.json cannot be read"):
        users_of(tmp_path / "gone.json")


@pytest.mark.parametrize("ascii_only", [True, False])
def test_names_in_any_script(tmp_path: Path, ascii_only: bool) -> None:
    names = ["Zoë", "王\n", 'quote " and } brace', "back\\slash\\", "😀", ""]
    path = tmp_path / "a.json"
    content = document({name: (images(1), [2]) for name in names})
    path.write_text(json.dumps(content, ensure_ascii=ascii_only), encoding="utf-8")
    assert [user.name for user in users_of(path)] == names


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.6, 0.9, 0.9999])
def test_a_file_that_is_cut_off(tmp_path: Path, part: float) -> None:
    path = write(tmp_path / "a.json", DATA)
    text = path.read_bytes()
    path.write_bytes(text[: int(part * len(text))])
    with pytest.raises(DataError, match=r"a\.json cannot be read as JSON.*cut off"):
        users_of(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text * 2, "trailing garbage"),
        (lambda text: b"[1" + text, "cannot be read as JSON"),
        (lambda text: text.replace(b"ada", b"\xff"), "JSON: line 1 has another"),
        (lambda text: text.decode().encode("utf-16"), "JSON: it is encoded in UTF-16"),
    ],
)
def test_a_file_that_is_no_json(tmp_path: Path, change: Any, message: str) -> None:
    path = write(tmp_path / "a.json", DATA)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        users_of(path)


def test_file_without_users_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"users": [], "num_samples": []}')
    with pytest.raises(DataError, match=r"a\.json has no user_data"):
        users_of(path)


WHITE = [1.0] * 784

WINDOW = "ab" * 40


def user(found: Any, *, text: bool = False) -> User:
    counted = partial(decode_text, unknown=UnknownCharacters())
    return parse_user(Path("a.json"), "ada", found, counted if text else decode_images)


def test_pixels_are_those_that_leaf_scaled() -> None:
    greys = np.arange(784) % 256
    x = [(greys / 255).tolist(), WHITE, [0, 1] * 392]
    found = user({"x": x, "y": [0, 61, 3]})
    assert found.inputs.shape == (3, 28, 28, 1)
    assert found.inputs.dtype == np.uint8
    np.testing.assert_array_equal(found.inputs[0].ravel(), greys)
    assert found.inputs[1].min() == 255
    assert found.inputs[2].ravel()[:3].tolist() == [0, 255, 0]
    assert found.labels.tolist() == [0, 61, 3]


@pytest.mark.parametrize(("text", "shape"), [(False, (28, 28, 1)), (True, (1, 1, 80))])
def test_no_samples_keep_the_shape(text: bool, shape: tuple[int, ...]) -> None:
    assert user({"x": [], "y": []}, text=text).inputs.shape == (0, *shape)
    with pytest.raises(DataError, match="no object with the lists x and y"):
        user([], text=text)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([WHITE], [], "x has 1 samples and y 0"),
        ([WHITE, WHITE[:5]], [1, 2], "x or y holds other values than numbers"),
        ([[2.5, *WHITE[1:]]], [1], "pixels go from 1 to 2.5; expected 0 to 1"),
        ([[-1, *WHITE[1:]]], [1], "pixels go from -1 to 1"),
        ([WHITE], [62], "labels go from 62 to 62; expected 0 to 61"),
        ([WHITE, WHITE], [-1, 0], "labels go from -1 to 0"),
        ([WHITE], [3.0], "found labels of float64, expected whole numbers"),
        ([WHITE], [True], "found labels of bool, expected whole numbers"),
        ([["a"] * 784], [1], "x or y holds other values than numbers"),
        ([WHITE, [*WHITE[1:], None]], [1, 1], "pixels go from nan"),
        ([None], [1], "expected 784 numbers"),
        (WHITE, [1], "expected 784 numbers"),
        ("text", [1], "no object with the lists x and y"),
        ([], None, "no object with the lists x and y"),
    ],
)
def test_images_that_are_none(x: Any, y: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.json: user 'ada': .*{message}"):
        user({"x": x, "y": y})


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([WINDOW, "a"], ["a", "b"], "x: expected texts of 80 characters"),
        ([WINDOW], ["ab"], "y: expected texts of 1 characters"),
        ([WINDOW], [""], "y: expected texts of 1 characters"),
        ([WINDOW], [7], "y: expected texts"),
        ([["a"] * 80], ["a"], "x: expected texts"),
        ([None], ["a"], "x: expected texts"),
    ],
)
def test_texts_that_are_none(x: Any, y: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        user({"x": x, "y": y}, text=True)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.json", DATA)
    monkeypatch.setitem(sys.modules, "ijson", None)
    with pytest.raises(DataError, match=r"pip install 'knnper\[leaf\]'"):
        users_of(path)

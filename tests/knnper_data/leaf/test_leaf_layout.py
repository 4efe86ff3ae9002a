import os
from pathlib import Path

import pytest

from knnper.data.leaf import find_leaf_files
from knnper.errors import DataError


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
    with pytest.raises(DataError, match="nowhere is not a folder; expected ROOT"):
        find_leaf_files(tmp_path / "nowhere")


def test_the_fingerprint_tells_files_apart_not_places(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    for root in (first, second):
        touch(root, "all_data/a.json")
        os.utime(root / "all_data" / "a.json", ns=(0, 5))
    same = find_leaf_files(first).fingerprint()
    assert find_leaf_files(second).fingerprint() == same
    os.utime(second / "all_data" / "a.json", ns=(0, 6))
    assert find_leaf_files(second).fingerprint() != same

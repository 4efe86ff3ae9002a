import json
from pathlib import Path
from typing import Any

import pytest

from knnper.errors import DataError
from tests.knnper_data.leaf.leaf_files import (
    DATA,
    UserData,
    document,
    image,
    images,
    users_of,
    write,
)


def test_users_come_with_their_samples(tmp_path: Path) -> None:
    ada, bob = users_of(write(tmp_path / "a.json", DATA, hierarchies=["x", "y"]))
    assert (ada.name, bob.name) == ("ada", "bob")
    assert ada.inputs[:, 0, 0, 0].tolist() == [1, 2]
    assert ada.labels.tolist() == [3, 4]
    assert bob.labels.tolist() == [6]


def test_other_orders_of_keys_and_byte_order_marks(tmp_path: Path) -> None:
    whole = document(DATA)
    backwards = {key: whole[key] for key in reversed(list(whole))}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(backwards, indent=2))
    assert [user.name for user in users_of(path)] == ["ada", "bob"]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
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


def test_few_users_and_samples(tmp_path: Path) -> None:
    data: UserData = {"one": (images(7), [8]), "none": ([], [])}
    one, none = users_of(write(tmp_path / "a.json", data))
    assert (len(one.labels), len(none.labels)) == (1, 0)
    assert none.inputs.shape == (0, 28, 28, 1)
    assert users_of(write(tmp_path / "a.json", {})) == []


def test_what_leaf_leaves_behind_is_allowed(tmp_path: Path) -> None:
    """Its split lists no user that it emptied, and all hierarchies."""
    data: UserData = {**DATA, "left out": ([], [])}
    path = write(
        tmp_path / "a.json",
        data,
        users=["ada", "bob", "not there"],
        num_samples=[2, 1, 0],
        hierarchies=["a", "b", "c", "d"],
    )
    assert [user.name for user in users_of(path)] == ["ada", "bob", "left out"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": [2, 3]}, "num_samples is 3 for user 'bob', who has 1"),
        (
            {"users": ["ada", "bob", "eve"], "num_samples": [2, 1, 4]},
            "users without data in user_data: 'eve'",
        ),
        (
            {"users": [*"abcde"], "num_samples": [1] * 5},
            "users without data in user_data: 'a', 'b', 'c' and 2 more",
        ),
        (
            {"users": ["ada"], "num_samples": [2]},
            "data of users that are not listed: 'bob'",
        ),
        ({"num_samples": [2]}, "2 users, 1 in num_samples"),
        ({"users": ["ada", "ada"]}, "2 users, of which 1 differ"),
        ({"users": None}, "expected lists users"),
        ({"num_samples": None}, "expected lists users"),
        ({"num_samples": [2, -1]}, "expected lists users"),
        ({"users": 5}, "expected lists users"),
        ({"user_data": None}, "users without data in user_data"),
        ({"user_data": []}, "users without data in user_data"),
        (
            {"user_data": {"ada": {"x": [image(1)[:-1]], "y": [1]}}},
            r"a\.json: user 'ada': found 783 numbers of an image",
        ),
    ],
)
def test_a_file_that_does_not_agree(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "a.json", DATA, **changes)
    with pytest.raises(DataError, match=message) as caught:
        users_of(path)
    assert "a.json" in str(caught.value)


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
        (lambda text: text.replace(b"ada", b"\xff"), "cannot be read as JSON"),
        (lambda text: text.replace(b":", b" "), "cannot be read as JSON"),
    ],
    ids=["goes on", "list", "no UTF-8", "no colon"],
)
def test_a_file_that_is_no_json(tmp_path: Path, change: Any, message: str) -> None:
    path = write(tmp_path / "a.json", DATA)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        users_of(path)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_brackets_deep_inside_each_other_are_refused(
    tmp_path: Path, opening: bytes
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"user_data": {"ada": {"x": ' + opening * 200_000)
    with pytest.raises(DataError, match=r"a\.json has more than 100 brackets"):
        users_of(path)


def test_brackets_and_backslashes_in_texts_count_for_nothing(tmp_path: Path) -> None:
    # Any of them comes to lie where one read ends and the next begins.
    names = [f'{"[" * 3 * n}\\"{{' + "\\" * n for n in range(300)]
    path = write(tmp_path / "a.json", {name: ([], []) for name in names})
    assert [user.name for user in users_of(path)] == names

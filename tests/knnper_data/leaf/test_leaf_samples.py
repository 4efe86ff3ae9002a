import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.data.leaf import User, decode_images, decode_text, parse_user
from knnper.data.text import ALPHABET, UNKNOWN, UnknownCharacters
from knnper.errors import DataError
from tests.knnper_data.leaf.leaf_files import DATA, users_of, write

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


def test_characters_have_leafs_ids() -> None:
    lists = {"x": [WINDOW, "é☃" * 40], "y": ["}", "😀"], "raw": "{}"}
    found = user(lists, text=True)
    assert found.inputs.shape == (2, 1, 1, 80)
    first = [ALPHABET.index("a"), ALPHABET.index("b")]
    assert found.inputs[0].ravel()[:2].tolist() == first
    assert found.inputs[1].ravel().tolist() == [UNKNOWN] * 80
    assert found.labels.tolist() == [ALPHABET.index("}"), UNKNOWN]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([WHITE], [], "x has 1 samples and y 0"),
        ([WHITE, WHITE[:5]], [1, 2], "found 5 numbers of an image; expected 784"),
        ([WHITE + WHITE], [1], "found 1568 numbers"),
        ([[2.5, *WHITE[1:]]], [1], "pixels go from 1 to 2.5; expected 0 to 1"),
        ([[-1, *WHITE[1:]]], [1], "pixels go from -1 to 1"),
        ([WHITE], [62], "labels go from 62 to 62; expected 0 to 61"),
        ([WHITE, WHITE], [-1, 0], "labels go from -1 to 0"),
        ([WHITE], ["3"], 'in y found "3", expected whole numbers'),
        ([WHITE], [3.0], "in y found 3.0, expected whole numbers"),
        ([WHITE], [True], "in y found true, expected whole numbers"),
        ([WHITE], [None], "in y found null, expected whole numbers"),
        ([["a"] * 784], [1], 'in x found "a", expected lists of numbers'),
        ([WHITE, [*WHITE[1:], None]], [1, 1], "in x found null, expected lists"),
        ([None], [1], "in x found null, expected lists of numbers"),
        (WHITE, [1], "in x found 1.0"),
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
        ([WINDOW, "a"], ["a", "b"], "found 1 characters of a text; expected 80"),
        ([WINDOW], ["ab"], "found 2 characters of a label; expected 1"),
        ([WINDOW], [""], "found 0 characters of a label"),
        ([WINDOW], [7], "in y found 7, expected texts"),
        ([["a"] * 80], ["a"], "in x found .*, expected texts"),
        ([None], ["a"], "in x found null, expected texts"),
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

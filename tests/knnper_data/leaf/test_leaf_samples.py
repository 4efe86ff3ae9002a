import json
import sys
from typing import Any

import numpy as np
import pytest

from knnper.data.leaf import SamplesError, image_decoder, text_decoder
from knnper.data.text import ALPHABET, UNKNOWN
from knnper.errors import DataError

WHITE = [1.0] * 784
WINDOW = "ab" * 40


def value(x: Any, y: Any, **more: Any) -> bytes:
    return json.dumps({"x": x, "y": y, **more}).encode()


def test_pixels_are_those_that_leaf_scaled() -> None:
    greys = np.arange(784) % 256
    found = image_decoder()(value([(greys / 255).tolist(), WHITE], [0, 61]))
    assert found.inputs.shape == (2, 28, 28, 1)
    assert found.inputs.dtype == np.uint8
    np.testing.assert_array_equal(found.inputs[0].ravel(), greys)
    assert found.inputs[1].min() == 255
    assert found.labels.tolist() == [0, 61]


def test_whole_numbers_are_pixels_too() -> None:
    found = image_decoder()(value([[0, 1] * 392], [3]))
    assert found.inputs.ravel()[:3].tolist() == [0, 255, 0]


def test_no_samples_keep_the_shape() -> None:
    assert image_decoder()(value([], [])).inputs.shape == (0, 28, 28, 1)
    assert text_decoder()(value([], [])).inputs.shape == (0, 1, 1, 80)


def test_characters_have_leafs_ids() -> None:
    found = text_decoder()(value([WINDOW, "é☃" * 40], ["}", "😀"], raw="{}"))
    assert found.inputs.shape == (2, 1, 1, 80)
    first = [ALPHABET.index("a"), ALPHABET.index("b")]
    assert found.inputs[0].ravel()[:2].tolist() == first
    assert found.inputs[1].ravel().tolist() == [UNKNOWN] * 80
    assert found.labels.tolist() == [ALPHABET.index("}"), UNKNOWN]


def test_one_decoder_reads_many_users_and_goes_on_after_an_error() -> None:
    decode = image_decoder()
    for label in (1, 2):
        assert decode(value([WHITE], [label])).labels.tolist() == [label]
        for wrong in (b"{", value([WHITE], [None]), value([None], [1])):
            with pytest.raises(SamplesError):
                decode(wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (value([WHITE], []), "x has 1 samples and y 0"),
        (
            value([WHITE, WHITE[:5]], [1, 2]),
            "found 5 numbers of an image; expected 784",
        ),
        (value([WHITE + WHITE], [1]), "found 1568 numbers"),
        (value([[2.5, *WHITE[1:]]], [1]), "pixels go from 1 to 2.5; expected 0 to 1"),
        (value([[-1, *WHITE[1:]]], [1]), "pixels go from -1 to 1"),
        (value([WHITE], [62]), "labels go from 62 to 62; expected 0 to 61"),
        (value([WHITE, WHITE], [-1, 0]), "labels go from -1 to 0"),
        (value([WHITE], ["3"]), 'as expected: in y found "3", expected whole numbers'),
        (value([WHITE], [3.0]), "in y found 3.0, expected whole numbers"),
        (value([WHITE], [True]), "in y found true, expected whole numbers"),
        (value([WHITE], [None]), "in y found null, expected whole numbers"),
        (value([["a"] * 784], [1]), 'in x found "a", expected lists of numbers'),
        (value([WHITE, [*WHITE[1:], None]], [1]), "in x found null, expected lists"),
        (value([None], [1]), "in x found null, expected lists of numbers"),
        (value(WHITE, [1]), "not as expected"),
        (value("text", [1]), "no list x"),
        (b'{"x": []}', "no list y"),
        (b"[]", "no object with x and y"),
        (b"", "not as expected"),
        (b'{"x": [], "y": [}', "not as expected"),
    ],
)
def test_images_that_are_none(text: bytes, message: str) -> None:
    with pytest.raises(SamplesError, match=message):
        image_decoder()(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (value([WINDOW, "a"], ["a", "b"]), "found 1 characters of a text; expected 80"),
        (value([WINDOW], ["ab"]), "found 2 characters of a label; expected 1"),
        (value([WINDOW], [""]), "found 0 characters of a label"),
        (value([WINDOW], [7]), "in y found 7, expected texts"),
        (value([["a"] * 80], ["a"]), "not as expected: in x"),
        (value([None], ["a"]), "in x found null, expected texts"),
        (b'{"x": ["\xff"], "y": ["a"]}', "not as expected"),
    ],
)
def test_texts_that_are_none(text: bytes, message: str) -> None:
    with pytest.raises(SamplesError, match=message):
        text_decoder()(text)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simdjson", None)
    with pytest.raises(DataError, match=r"pip install 'knnper\[leaf\]'"):
        image_decoder()


def test_a_user_with_an_object_is_told_what_it_may_hold() -> None:
    with pytest.raises(SamplesError, match="a user may hold lists only"):
        text_decoder()(b'{"x": [], "y": [], "raw": {}')

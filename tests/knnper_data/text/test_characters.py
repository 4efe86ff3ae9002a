"""Ids of characters, against LEAF's own list of them, and windows of them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.data.text import (
    ALPHABET,
    CHARACTER_NAMES,
    NUM_TOKENS,
    UNKNOWN,
    encode,
    plain,
    target_positions,
    windows_before,
)

LEAF = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)


def test_the_alphabet_is_that_of_leaf() -> None:
    assert ALPHABET == LEAF
    assert len(LEAF) == UNKNOWN == 80
    assert len(set(CHARACTER_NAMES)) == NUM_TOKENS == 81


def test_ids_by_hand() -> None:
    found = encode("\nAz}")
    assert found.dtype == np.uint8
    assert found.tolist() == [0, 25, 78, 79]
    assert encode("").shape == (0,)
    # Half a surrogate is unknown.
    assert encode("a\ud800b").tolist() == [53, UNKNOWN, 54]


def test_what_is_typeset_becomes_plain() -> None:
    typeset = "\u2018Tis \u201cthe caf\u00e9\u201d\u2014\r\nyes"
    assert plain(typeset) == '\'Tis "the cafe"-\nyes'
    assert plain("as it is\n") == "as it is\n"


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters()))
def test_every_character_has_one_id(text: str) -> None:
    expected = [LEAF.find(character) for character in text]
    found = encode(text).tolist()
    assert found == [UNKNOWN if place < 0 else place for place in expected]


def test_windows_by_hand() -> None:
    ids = np.array([10, 11, 12, 13, 14, 15, 16], dtype=np.uint8)
    targets = target_positions(7, window=3, stride=2)
    assert targets.tolist() == [3, 5]
    found = windows_before(ids, targets, 3)
    assert found.shape == (2, 1, 1, 3)
    assert found.reshape(2, 3).tolist() == [[10, 11, 12], [12, 13, 14]]


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 60), window=st.integers(1, 12), stride=st.integers(1, 15))
def test_every_window_ends_before_its_target(
    length: int, window: int, stride: int
) -> None:
    ids = np.arange(length, dtype=np.uint8)
    targets = target_positions(length, window, stride)
    found = windows_before(ids, targets, window)
    assert found.shape == (len(targets), 1, 1, window)
    assert len(targets) == max(0, -(-(length - window) // stride))
    for row, target in zip(found.reshape(-1, window), targets, strict=True):
        assert row.tolist() == list(range(target - window, target))
    if len(targets):
        assert targets[0] == window
        assert set(np.diff(targets).tolist()) <= {stride}

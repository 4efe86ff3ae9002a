"""The ids of characters, against LEAF's own list of them."""

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


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters()))
def test_every_character_has_one_id(text: str) -> None:
    expected = [LEAF.find(character) for character in text]
    found = encode(text).tolist()
    assert found == [UNKNOWN if place < 0 else place for place in expected]


def test_half_a_surrogate_is_unknown() -> None:
    assert encode("a\ud800b").tolist() == [53, UNKNOWN, 54]


def test_what_is_typeset_becomes_plain() -> None:
    assert plain("\u2018Tis \u201cthe caf\u00e9\u201d\u2014\r\nyes") == (
        '\'Tis "the cafe"-\nyes'
    )
    assert plain("as it is\n") == "as it is\n"

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.data.characters import (
    ALPHABET,
    CHARACTER_NAMES,
    NUM_TOKENS,
    UNKNOWN,
    encode,
    plain,
    target_positions,
    windows_before,
)
from knnper.data.speeches import find_speeches

LEAF = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)


def test_the_alphabet_is_that_of_leaf() -> None:
    assert ALPHABET == LEAF
    assert len(LEAF) == UNKNOWN == 80
    assert len(set(CHARACTER_NAMES)) == NUM_TOKENS == 81


def test_what_is_typeset_becomes_plain() -> None:
    typeset = "\u2018Tis \u201cthe caf\u00e9\u201d\u2014\r\nyes"
    assert plain(typeset) == '\'Tis "the cafe"-\nyes'
    assert plain("as it is\n") == "as it is\n"


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters()))
def test_every_character_has_one_id(text: str) -> None:
    expected = [LEAF.find(character) for character in text]
    found = encode(text)
    assert found.dtype == np.uint8
    assert found.tolist() == [UNKNOWN if place < 0 else place for place in expected]
    # Half a surrogate is unknown.
    assert encode("a\ud800b").tolist() == [53, UNKNOWN, 54]


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


@pytest.mark.parametrize(
    "play",
    [
        "BARNARDO.\nWho's there?\n\nFRANCISCO.\nNay, answer me.\nStand.\n",
        "BARNARDO: Who's there?\nFRANCISCO: Nay, answer me.\n  Stand.\n",
        "BARNARDO. Who's there?\nFRANCISCO. Nay, answer me.\nStand.",
        "Barnardo:\nWho's there?\n\nFrancisco:\nNay, answer me.\nStand.\n",
        "  Barnardo. Who's there?\n  Francisco. Nay, answer me.\n    Stand.\n",
    ],
    ids=["above", "colon", "stop", "small letters", "LEAF"],
)
def test_speakers_in_all_ways_of_printing(play: str) -> None:
    assert find_speeches(play) == {
        "BARNARDO": "Who's there?",
        "FRANCISCO": "Nay, answer me.\nStand.",
    }


def test_what_is_said_later_follows_and_prose_has_no_speaker() -> None:
    play = "FIRST LORD:\nOne.\n\nALL:\nHo!\n\nFIRST LORD:\nTwo: three.\n"
    assert find_speeches(play) == {"FIRST LORD": "One.\nTwo: three.", "ALL": "Ho!"}
    assert find_speeches("It was night. And he said: go.\nI. The end.") == {}
    assert find_speeches("GHOST.\n\n\n") == {}


def test_headings_and_directions_are_nobodys_words() -> None:
    play = (
        "ACT I\nSCENE I. A room.\nEnter a ghost.\n\n"
        "GHOST.\n\nMark me\n[_Exit\nGhost._] well [aside].\n\n[He goes.]\n\n"
        "SCENE II. A hall.\nThe same.\n"
    )
    assert find_speeches(play) == {"GHOST": "Mark me\nwell ."}


@pytest.mark.parametrize(
    "play",
    [
        "1 CLOWN.\nOne.\n\nSECOND CLOWN 2.\nTwo.\n",
        "1 CLOWN: One.\nSECOND CLOWN 2: Two.\n",
        "1 Clown:\nOne.\n\nSecond Clown 2:\nTwo.\n",
        "  1 Clown. One.\n  Second Clown 2. Two.\n",
    ],
)
def test_speakers_have_numbers(play: str) -> None:
    assert find_speeches(play) == {"1 CLOWN": "One.", "SECOND CLOWN 2": "Two."}


def test_an_ordinary_line_within_a_speech_names_nobody() -> None:
    play = "KING.\nI know this well:\n  No more. I go now.\nIt is:\nso.\n"
    assert find_speeches(play) == {
        "KING": "I know this well:\nNo more. I go now.\nIt is:\nso."
    }
    above = "First Lord:\nHear me:\nyes.\n\nKing:\n\nThe end:\n"
    assert find_speeches(above) == {"FIRST LORD": "Hear me:\nyes.", "KING": "The end:"}


def test_names_count_below_a_heading() -> None:
    play = "ACT I\nKing:\nHo.\nSCENE II\n  Ham. Ha.\n  Lo. Hm.\n"
    assert find_speeches(play) == {"KING": "Ho.", "HAM": "Ha.", "LO": "Hm."}


def test_what_nobody_says_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    play = "ACT I\n[Enter.]\nGHOST.\nMark me,\nmy son.\n\n"
    find_speeches(play + "And more.", "a.txt")
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    # 8 characters of 8 + 7 + 6.
    assert "a.txt: 38 % of the text belongs to no speaker" in warning.message
    assert "beginning with 'And more.'" in warning.message
    caplog.clear()
    find_speeches(play * 9 + "So.", "a.txt")
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "a.txt: 2.5 % of the text belongs to no speaker" in record.message

"""Who says what, in the ways in which plays are printed."""

import pytest

from knnper.data.text.speeches import speeches_of


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
    assert speeches_of(play) == {
        "BARNARDO": "Who's there?",
        "FRANCISCO": "Nay, answer me.\nStand.",
    }


def test_what_is_said_later_follows() -> None:
    play = "FIRST LORD:\nOne.\n\nALL:\nHo!\n\nFIRST LORD:\nTwo: three.\n"
    assert speeches_of(play) == {"FIRST LORD": "One.\nTwo: three.", "ALL": "Ho!"}


def test_headings_and_directions_are_nobodys_words() -> None:
    play = (
        "ACT I\nSCENE I. A room.\nEnter a ghost.\n\n"
        "GHOST.\n\nMark me\n[_Exit\nGhost._] well [aside].\n\n[He goes.]\n\n"
        "SCENE II. A hall.\nThe same.\n"
    )
    assert speeches_of(play) == {"GHOST": "Mark me\nwell ."}


def test_prose_has_no_speaker() -> None:
    assert speeches_of("It was night. And he said: go.\nI. The end.") == {}
    assert speeches_of("GHOST.\n\n\n") == {}

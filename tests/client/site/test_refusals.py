"""Refusals are kept for a person who comes later, but not all of them."""

from pathlib import Path

from knnper.client.limits import MOST, REFUSALS, last_refusal, note_refusal
from knnper.files import is_private


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    state = tmp_path / "state"
    for number in range(MOST + 3):
        note_refusal(state, "client", f"reason {number}")
    lines = (state / REFUSALS).read_text().splitlines()
    assert len(lines) == MOST
    assert '"reason 3"' in lines[0]
    last = last_refusal(state)
    assert last is not None
    assert last.reason == f"reason {MOST + 2}"
    assert is_private(state)


def test_a_damaged_file_does_not_keep_the_next_from_being_noted(tmp_path: Path) -> None:
    (tmp_path / REFUSALS).write_text("nothing\n")
    note_refusal(tmp_path, "model", "why")
    assert '"why"' in (tmp_path / REFUSALS).read_text()

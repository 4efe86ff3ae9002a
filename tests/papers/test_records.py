"""The seconds of files: kept over interruptions, gone with what was made in them."""

import shutil
from pathlib import Path

import pytest

from papers.reproduce import Records

NAME = "base"


def play(output: Path, seconds: float, *made: str) -> float:
    """Return what is known after a file was played, in which these were made."""
    records = Records(output)
    before = records.begin(NAME)
    for name in made:
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("{}\n")
    records.note(NAME, seconds, before)
    return records.making_of(NAME).seconds


def test_the_seconds_of_an_interrupted_file_add_up(tmp_path: Path) -> None:
    assert play(tmp_path, 2.0, "base/runs/a/rounds.jsonl") == 2.0
    assert play(tmp_path, 3.0, "base/runs/a/results.json") == 5.0
    assert Records(tmp_path).making_of("other").seconds == 0.0


def test_to_look_at_what_is_there_takes_no_time(tmp_path: Path) -> None:
    play(tmp_path, 2.0, "base/results.json")
    assert play(tmp_path, 9.0) == 2.0
    assert play(tmp_path, 9.0, "base/table.md") == 2.0


def test_what_is_deleted_in_part_and_made_anew_counts(tmp_path: Path) -> None:
    play(tmp_path, 2.0, "base/runs/a/results.json", "base/runs/b/failed.txt")
    shutil.rmtree(tmp_path / "base/runs/b")
    assert play(tmp_path, 3.0, "base/runs/b/results.json") == 5.0


@pytest.mark.parametrize("deleted", ["base", "base/runs"])
def test_seconds_go_with_what_was_made_in_them(tmp_path: Path, deleted: str) -> None:
    play(tmp_path, 2.0, "base/runs/a/results.json")
    Records(tmp_path).note("other", 1.0, frozenset({("gone", 0)}))
    shutil.rmtree(tmp_path / deleted)
    assert play(tmp_path, 3.0, "base/runs/a/results.json") == 3.0
    assert Records(tmp_path).making_of("other").seconds == 1.0


def test_the_environment_is_that_of_the_last_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores in (1, 2):
        found = {"num_cpus": cores}
        monkeypatch.setattr("papers.reproduce.environment", lambda found=found: found)
        play(tmp_path, 1.0, *(["base/results.json"] if cores == 1 else []))
    assert Records(tmp_path).making_of(NAME).environment == {"num_cpus": 1}
    shutil.rmtree(tmp_path / NAME)
    play(tmp_path, 1.0, "base/results.json")
    assert Records(tmp_path).making_of(NAME).environment == {"num_cpus": 2}


def test_a_training_counts_before_the_figure_has_a_folder(tmp_path: Path) -> None:
    assert play(tmp_path, 2.0, "runs/abc/rounds.jsonl") == 2.0
    assert play(tmp_path, 3.0, "runs/abc/results.json", "base/parts.jsonl") == 5.0

"""``knnper reproduce``: what it tells, how it ends, and how it goes on."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from knnper.files import JsonLines
from knnper.simulation.batches.family import Family
from knnper.simulation.batches.progress import Told
from papers.__main__ import app
from tests.papers.small_files import SWEEP, without_data, write
from tests.simulation.batches.small_sweep import in_this_process

WHERE = "knnper.simulation.batches.runner.run_in_workers"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WHERE, in_this_process)


def run(tmp_path: Path, *arguments: object) -> Any:
    command = ["reproduce", *map(str, arguments), "--output", str(tmp_path / "out")]
    return CliRunner().invoke(app, command)


def test_a_failing_file_does_not_stop_the_others(tmp_path: Path) -> None:
    files = [without_data(tmp_path), write(tmp_path, SWEEP, seeds=[1])]
    done = run(tmp_path, *files)
    assert done.exit_code == 1
    assert "1 of 2  lost (sweep)" in done.stderr
    assert "2 of 2  neighbors (sweep)" in done.stderr
    assert "4/4 steps" in done.stderr
    assert "lost is not done: " in done.stderr
    assert "1 of 2 files failed: lost" in done.stderr
    page = tmp_path / "out/report.html"
    assert f"The report is in {page}" in done.stderr.replace("\n", "")
    assert "This file failed." in page.read_text()

    again = run(tmp_path, *files, "--skip-missing-data")
    assert again.exit_code == 0, again.output
    assert "This file was left out." in page.read_text()


def test_nothing_is_played_while_a_file_is_wrong(tmp_path: Path) -> None:
    wrong = write(tmp_path, SWEEP, name="wrong", x="lost")
    done = run(tmp_path, write(tmp_path, SWEEP), wrong)
    assert done.exit_code == 2
    assert f"{wrong}: x: found 'lost'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_interrupted_it_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(
        families: Sequence[Family], num_workers: int
    ) -> Iterator[Sequence[Told]]:
        yield next(in_this_process(families, num_workers))
        raise KeyboardInterrupt

    monkeypatch.setattr(WHERE, interrupted)
    monkeypatch.setattr("sys.argv", ["/x/papers/__main__.py", "reproduce", "a b.yaml"])
    done = run(tmp_path, write(tmp_path, SWEEP))
    assert done.exit_code == 130
    assert "To go on: python -m papers reproduce 'a b.yaml'" in done.stderr
    # What was made until then counts.
    (record,) = JsonLines(tmp_path / "out/seconds.jsonl").read()
    assert (record["name"], record["seconds"] > 0) == ("neighbors", True)


def test_interrupted_at_once_it_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WHERE, interrupted)
    assert run(tmp_path, write(tmp_path, SWEEP)).exit_code == 130
    assert not (tmp_path / "out/seconds.jsonl").exists()


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    done = run(tmp_path, write(tmp_path, SWEEP))
    assert done.exit_code == 2
    assert "is a file, expected a folder" in done.stderr

"""Runs of a comparison that failed: tried again by other code, and told."""

from pathlib import Path
from typing import Any

import pytest

import knnper.simulation.batches.runner as playing
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.runner import folder_of
from knnper.simulation.batches.tables import compare, table_of, write_comparison
from knnper.simulation.run import simulate
from tests.simulation.comparison.small_plan import ROWS, plan
from tests.simulation.sweep.small_sweep import in_this_process


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "knnper.simulation.batches.tables.play_side_by_side"
    monkeypatch.setattr(where, in_this_process)


def ignore(progress: object) -> None:
    """Want to know nothing of how a comparison gets on."""


def test_candidates_that_other_code_failed_at_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"mean": ROWS["mean"]}
    grid = {"training.learning_rate": [1e30, 0.1]}
    comparison, folder = plan(tmp_path, grid=grid, rows=rows), tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setattr(
            "knnper.simulation.batches.folder.code_fingerprint", lambda: "old"
        )
        compare(comparison, folder, 1, ignore)
    hot = folder_of(comparison.rows[0].candidates[0].tuning, folder)
    made: list[Path] = []

    def noted(bench: Any, run: RunFolder, *others: Any) -> Any:
        made.append(run.path)
        return simulate(bench, run, *others)

    monkeypatch.setattr(playing, "simulate", noted)
    for _ in range(2):
        compare(comparison, folder, 1, ignore)
    assert made == [hot]


def test_what_failed_is_told_with_what_to_delete(tmp_path: Path) -> None:
    rates = {"training.learning_rate": [1e30]}
    hot = {"method": {"name": "fedavg"}, "grid": rates, "title": "Hot"}
    grid = {"training.learning_rate": [1e30, 0.1]}
    comparison = plan(tmp_path, grid=grid, rows={"mean": ROWS["mean"], "hot": hot})
    folder = tmp_path / "runs"
    outcomes = compare(comparison, folder, 1, ignore)
    rows = table_of(outcomes, "mean")
    _, tuned, *tested = write_comparison(comparison, outcomes, rows, folder).remarks
    assert tuned.startswith("1 of 3 candidates failed on validation data and were not")
    for seed, remark in zip((1, 2), tested, strict=True):
        run = folder_of(comparison.rows[1].candidates[0].tested(seed), folder)
        assert remark.startswith(f"Hot failed with seed {seed}: round 1: ")
        assert remark.endswith(f". To make it again, delete {run}")

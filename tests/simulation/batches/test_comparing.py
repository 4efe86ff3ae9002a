"""Tuning on validation data, testing over seeds, and going on where it was left."""

import csv
import io
import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import knnper.simulation.batches.family as family_runs
from knnper.data.digits import DigitsSettings
from knnper.data.examples import Dataset
from knnper.errors import DataError, RunError
from knnper.loading import to_json
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.family import (
    FAILED,
    Event,
    Family,
    make_runs,
    training_identity,
)
from knnper.simulation.batches.outputs import write_batch
from knnper.simulation.batches.plan import Comparison
from knnper.simulation.batches.progress import Progress
from knnper.simulation.batches.runner import (
    Outcome,
    folder_of,
    num_runs,
    num_steps,
    run_batch,
)
from knnper.simulation.batches.tables import csv_of, rows_of, table_of
from tests.simulation.batches.small_comparison import ROWS, plan
from tests.simulation.batches.small_sweep import ignore


def as_csv(comparison: Comparison, outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the table but for how long the runs took."""
    text = csv_of(comparison, outcomes, rows_of(comparison, outcomes))
    lines = list(csv.DictReader(io.StringIO(text)))
    return [{**line, "seconds": ""} for line in lines]


def test_the_best_on_validation_data_is_tested(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    comparison, told = plan(tmp_path), list[Progress]()
    mean, memory, drift = run_batch(comparison, tmp_path / "runs", 1, told.append)
    assert num_runs(comparison, tmp_path / "runs") == (4 + 6, 4 + 6)
    assert len(made) == 10
    # Two trainings are tuned, of two runs each; two are tested, with each of two seeds.
    steps = 2 * (2 + 2) + 2 * ((2 + 2) + (2 + 1))
    assert told[0].total == num_steps(comparison) == steps
    assert told[-1].done == told[-1].total == told[0].total
    assert {one.found for one in told} == {0}
    for outcome in (mean, memory):
        slow, fast = outcome.tried
        assert slow.score is not None
        assert fast.score is not None
        assert fast.score > slow.score
        assert outcome.point is fast.point
    assert drift.tried == ()
    assert list(drift.runs) == [1, 2]
    # The four runs on validation data read no test split, the others read theirs.
    tuned = [json.loads((path / "results.json").read_text()) for path, _ in made[:4]]
    kinds = {one["manifest"]["experiment"]["partition"]["evaluate_on"] for one in tuned}
    assert kinds == {"validation"}


def test_runs_that_train_alike_train_once(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    outcomes = run_batch(plan(tmp_path), tmp_path / "runs", 1, ignore)
    before = dict(made)
    mean, memory, _ = outcomes
    for seed in (1, 2):
        # The second of a pair finds both rounds made.
        assert before[mean.runs[seed]] == 0
        assert before[memory.runs[seed]] == 2
        first, second = (RunFolder(one.runs[seed]).results() for one in (mean, memory))
        digests = [one["training"]["state_sha256"] for one in (first, second)]
        assert digests[0] == digests[1]
        assert first["seen"]["global"] == second["seen"]["global"]
    alone = tmp_path / "alone"
    family = Family({alone: to_json(memory.point.runs[1])}, 2, ("knnper",))
    make_runs(family, list[Event]().append)
    assert (alone / "clients.csv").read_bytes() == (
        memory.runs[1] / "clients.csv"
    ).read_bytes()


def test_a_candidate_that_diverges_is_not_chosen(tmp_path: Path) -> None:
    grid = {"training.learning_rate": [1e30, 0.1]}
    rows = {"mean": ROWS["mean"]}
    comparison = plan(tmp_path, grid=grid, rows=rows)
    (mean,) = run_batch(comparison, tmp_path / "runs", 1, ignore)
    assert mean.tried[0].score is None
    assert mean.point.values == {"training.learning_rate": 0.1}
    reasons = [
        (path / FAILED).read_text()
        for path in (tmp_path / "runs/runs").iterdir()
        if (path / FAILED).exists()
    ]
    assert len(reasons) == 1
    assert "lower training.learning_rate" in reasons[0]


def test_a_row_that_always_diverges_is_named(tmp_path: Path) -> None:
    grid = {"training.learning_rate": [1e30, 1e31]}
    comparison = plan(tmp_path, grid=grid, rows={"mean": ROWS["mean"]})
    message = "no candidate of the row mean has a score .* training diverged"
    with pytest.raises(RunError, match=message):
        run_batch(comparison, tmp_path / "runs", 1, ignore)


def test_a_tested_run_that_diverges_is_left_out(tmp_path: Path) -> None:
    grid = {"training.learning_rate": [0.1]}
    rates = {"training.learning_rate": [1e30]}
    hot = {"method": {"name": "fedavg"}, "grid": rates, "title": "Hot"}
    comparison = plan(tmp_path, grid=grid, rows={"mean": ROWS["mean"], "hot": hot})
    outcomes = run_batch(comparison, tmp_path / "runs", 1, ignore)
    assert sorted(outcomes[1].failures) == [1, 2]
    assert outcomes[1].runs == {}
    cells = table_of(comparison, rows_of(comparison, outcomes)).rows[1]
    assert cells == ("Hot (2 failed)", *(7 * ["-"]))

    only = plan(tmp_path, grid=grid, rows={"mean": hot})
    with pytest.raises(RunError, match="the reference row mean failed with seed 1"):
        run_batch(only, tmp_path / "runs", 1, ignore)


def test_what_is_no_finding_ends_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise DataError("the disk is gone")

    comparison = plan(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(family_runs, "simulate", broken)
        with pytest.raises(DataError, match="the disk is gone"):
            run_batch(comparison, tmp_path / "runs", 1, ignore)
    assert not list((tmp_path / "runs").rglob(FAILED))
    assert len(run_batch(comparison, tmp_path / "runs", 1, ignore)) == 3


def test_no_test_split_is_read_to_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All images of the test split are made invalid: tuning ends with equal scores."""
    comparison = plan(tmp_path)
    expected = run_batch(comparison, tmp_path / "sound", 1, ignore)

    load = DigitsSettings.load

    def spoilt(settings: DigitsSettings) -> Dataset:
        data = load(settings)
        test = replace(data.test, images=np.zeros_like(data.test.images))
        return replace(data, test=test)

    monkeypatch.setattr(DigitsSettings, "load", spoilt)
    found = run_batch(comparison, tmp_path / "spoilt", 1, ignore)
    for one, other in zip(expected, found, strict=True):
        assert [tried.score for tried in one.tried] == [
            tried.score for tried in other.tried
        ]
        tested = [(run / "clients.csv").read_bytes() for run in one.runs.values()]
        assert tested != [
            (run / "clients.csv").read_bytes() for run in other.runs.values()
        ]


@pytest.mark.slow
def test_in_processes_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, two, and two that are interrupted and begin again."""
    comparison = plan(tmp_path)

    def table(folder: Path, num_workers: int) -> list[Any]:
        outcomes = run_batch(comparison, folder, num_workers, ignore)
        return as_csv(comparison, outcomes)

    def leave(progress: Progress) -> None:
        raise KeyboardInterrupt

    expected = table(tmp_path / "one", 1)
    with pytest.raises(KeyboardInterrupt):
        run_batch(comparison, tmp_path / "two", 2, leave)
    assert multiprocessing.active_children() == []
    assert table(tmp_path / "two", 2) == expected


def test_training_is_the_same_whatever_is_on_top(tmp_path: Path) -> None:
    mean, memory, drift = plan(tmp_path).variants.values()
    identities = [
        training_identity(points[-1].runs[1]) for points in (mean, memory, drift)
    ]
    assert identities[0] != identities[2]
    # FedAvg and kNN-Per are two names; the method is in what they have in common.
    fedavg, knn_per = (points[0].runs[1] for points in (mean, memory))
    assert training_identity(fedavg) == training_identity(knn_per)


def test_what_failed_is_told_with_what_to_delete(tmp_path: Path) -> None:
    rates = {"training.learning_rate": [1e30]}
    hot = {"method": {"name": "fedavg"}, "grid": rates, "title": "Hot"}
    grid = {"training.learning_rate": [1e30, 0.1]}
    comparison = plan(tmp_path, grid=grid, rows={"mean": ROWS["mean"], "hot": hot})
    folder = tmp_path / "runs"
    outcomes = run_batch(comparison, folder, 1, ignore)
    rows = rows_of(comparison, outcomes)
    _, tuned, *tested = write_batch(comparison, outcomes, rows, folder).remarks
    assert tuned.startswith("1 of 2 candidates failed on validation data and were not")
    for seed, remark in zip((1, 2), tested, strict=True):
        run = folder_of(comparison.points[-1].runs[seed], folder)
        assert remark.startswith(f"Hot failed with seed {seed}: round 1: ")
        assert remark.endswith(f". To make it again, delete {run}")

"""Tuning on validation data, testing over seeds, and going on where it was left."""

import json
import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import knnper.simulation.batches.runner as playing
import knnper.simulation.workbench as workbench
from knnper.data.catalogue import DATA_SETS
from knnper.data.digits import DigitsSettings, load_digits
from knnper.data.examples import Dataset
from knnper.errors import DataError, RunError
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.folder import num_made_otherwise
from knnper.simulation.batches.progress import Progress
from knnper.simulation.batches.runner import (
    FAILED,
    Family,
    Order,
    play,
    training_identity,
)
from knnper.simulation.batches.tables import (
    as_cells,
    as_csv,
    compare,
    folders_of,
    num_runs,
    table_of,
)
from knnper.simulation.run import simulate
from tests.simulation.comparison.small_plan import ROWS, plan
from tests.simulation.sweep.small_sweep import in_this_process


def ignore(progress: object) -> None:
    """Want to know nothing of how a comparison gets on."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "knnper.simulation.batches.tables.play_side_by_side", in_this_process
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """Return a list that grows with each run: its folder, and the rounds it had."""
    runs: list[tuple[Path, int]] = []

    def noted(bench: Any, folder: RunFolder, *others: Any) -> Any:
        runs.append((folder.path, len(folder.rounds())))
        return simulate(bench, folder, *others)

    monkeypatch.setattr(playing, "simulate", noted)
    return runs


@pytest.mark.usefixtures("here")
def test_the_best_on_validation_data_is_tested(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    comparison, told = plan(tmp_path), list[Progress]()
    mean, memory, drift = compare(comparison, tmp_path / "runs", 1, told.append)
    assert num_runs(comparison) == 4 + 6 == len(made)
    assert told[-1].done == told[-1].total == 10
    assert {one.found for one in told} == {0}
    for outcome in (mean, memory):
        slow, fast = outcome.tried
        assert slow.score is not None
        assert fast.score is not None
        assert fast.score > slow.score
        assert outcome.chosen is fast.candidate
    assert [one.score for one in drift.tried] == [None]
    assert list(drift.runs) == [1, 2]
    # The four runs on validation data read no test split, the others read theirs.
    tuned = [json.loads((path / "results.json").read_text()) for path, _ in made[:4]]
    kinds = {one["manifest"]["experiment"]["partition"]["evaluate_on"] for one in tuned}
    assert kinds == {"validation"}


@pytest.mark.usefixtures("here")
def test_runs_that_train_alike_train_once(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    outcomes = compare(plan(tmp_path), tmp_path / "runs", 1, ignore)
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
    experiment = memory.chosen.tested(1)
    play(Family((Order.of(experiment, alone),), 2, ("knnper",)))
    assert (alone / "clients.csv").read_bytes() == (
        memory.runs[1] / "clients.csv"
    ).read_bytes()


@pytest.mark.usefixtures("here")
def test_what_is_done_is_not_done_again(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    comparison, folder = plan(tmp_path), tmp_path / "runs"
    first = compare(comparison, folder, 1, ignore)
    table = as_csv(table_of(first, "mean"))
    made.clear()
    told = list[Progress]()
    again = compare(comparison, folder, 1, told.append)
    assert made == []
    assert told[-1].done == told[-1].found == num_runs(comparison)
    assert as_csv(table_of(again, "mean")) == table

    lost = first[1].runs[2]
    shutil.rmtree(lost)
    compare(comparison, folder, 1, ignore)
    assert [path for path, _ in made] == [lost]


@pytest.mark.usefixtures("here")
def test_a_run_that_two_rows_share_counts_as_made_for_both(tmp_path: Path) -> None:
    rows = {"mean": ROWS["mean"], "again": {**ROWS["mean"], "title": "Again"}}
    comparison, told = plan(tmp_path, rows=rows), list[Progress]()
    for made in (True, False):
        told.clear()
        compare(comparison, tmp_path / "runs", 1, told.append)
        assert told[-1].done == num_runs(comparison) == 8
        assert told[-1].found == (0 if made else 8)


@pytest.mark.usefixtures("here")
def test_a_candidate_that_diverges_is_not_chosen(tmp_path: Path) -> None:
    grid = {"training.learning_rate": [1e30, 0.1]}
    rows = {"mean": ROWS["mean"]}
    comparison = plan(tmp_path, grid=grid, rows=rows)
    (mean,) = compare(comparison, tmp_path / "runs", 1, ignore)
    assert mean.tried[0].score is None
    assert mean.chosen.values == {"training.learning_rate": 0.1}
    reasons = [
        (path / FAILED).read_text()
        for path in (tmp_path / "runs/runs").iterdir()
        if (path / FAILED).exists()
    ]
    assert len(reasons) == 1
    assert "lower training.learning_rate" in reasons[0]


@pytest.mark.usefixtures("here")
def test_a_training_that_diverges_is_not_made_twice(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    rows = {**ROWS, "hot": {**ROWS["memory"], "training": {"momentum": 0.5}}}
    rows["hot"]["grid"] = {
        "training.learning_rate": [1e30, 0.1],
        "personalization.num_neighbors": [1, 3, 5],
    }
    comparison = plan(tmp_path, rows={"mean": ROWS["mean"], "hot": rows["hot"]})
    _, hot = compare(comparison, tmp_path / "runs", 1, ignore)
    assert [one.score is None for one in hot.tried] == [True] * 3 + [False] * 3
    assert len({one.failure for one in hot.tried[:3]}) == 1
    # Two of the reference's, one that diverges, three that do not; four are tested.
    assert len(made) == 2 + 1 + 3 + 4


@pytest.mark.usefixtures("here")
def test_a_row_that_always_diverges_is_named(tmp_path: Path) -> None:
    grid = {"training.learning_rate": [1e30, 1e31]}
    comparison = plan(tmp_path, grid=grid, rows={"mean": ROWS["mean"]})
    message = "no candidate of the row mean has a score .* training diverged"
    with pytest.raises(RunError, match=message):
        compare(comparison, tmp_path / "runs", 1, ignore)


@pytest.mark.usefixtures("here")
def test_a_tested_run_that_diverges_is_left_out(tmp_path: Path) -> None:
    grid = {"training.learning_rate": [0.1]}
    rates = {"training.learning_rate": [1e30]}
    hot = {"method": {"name": "fedavg"}, "grid": rates, "title": "Hot"}
    comparison = plan(tmp_path, grid=grid, rows={"mean": ROWS["mean"], "hot": hot})
    outcomes = compare(comparison, tmp_path / "runs", 1, ignore)
    assert sorted(outcomes[1].failures) == [1, 2]
    assert outcomes[1].runs == {}
    cells = as_cells(table_of(outcomes, "mean"), "mean")[2]
    assert cells == ["Hot (2 failed)", *(7 * ["-"])]

    only = plan(tmp_path, grid=grid, rows={"mean": hot})
    with pytest.raises(RunError, match="the reference row mean failed with seed 1"):
        compare(only, tmp_path / "runs", 1, ignore)


@pytest.mark.usefixtures("here")
def test_what_is_no_finding_ends_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise DataError("the disk is gone")

    comparison = plan(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(playing, "simulate", broken)
        with pytest.raises(DataError, match="the disk is gone"):
            compare(comparison, tmp_path / "runs", 1, ignore)
    assert not list((tmp_path / "runs").rglob(FAILED))
    assert len(compare(comparison, tmp_path / "runs", 1, ignore)) == 3


@pytest.mark.usefixtures("here")
def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with (
        RunFolder(folder).locked(),
        pytest.raises(RunError, match="another process is at work"),
    ):
        compare(plan(tmp_path), folder, 1, ignore)
    assert [path.name for path in folder.iterdir()] == [".lock"]


@pytest.mark.usefixtures("here")
def test_no_test_split_is_read_to_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All images of the test split are made invalid: tuning ends with equal scores."""
    comparison = plan(tmp_path)
    expected = compare(comparison, tmp_path / "sound", 1, ignore)

    def spoilt(settings: DigitsSettings) -> Dataset:
        data = load_digits(settings)
        test = replace(data.test, images=np.zeros_like(data.test.images))
        return replace(data, test=test)

    entry = replace(DATA_SETS["digits"], load=spoilt)
    monkeypatch.setattr(workbench, "DATA_SETS", {**DATA_SETS, "digits": entry})
    found = compare(comparison, tmp_path / "spoilt", 1, ignore)
    for one, other in zip(expected, found, strict=True):
        assert [tried.score for tried in one.tried] == [
            tried.score for tried in other.tried
        ]
        tested = [(run / "clients.csv").read_bytes() for run in one.runs.values()]
        assert tested != [
            (run / "clients.csv").read_bytes() for run in other.runs.values()
        ]


@pytest.mark.usefixtures("here")
def test_runs_of_other_code_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs"
    outcomes = compare(plan(tmp_path), folder, 1, ignore)
    folders = folders_of(outcomes, folder)
    assert len(folders) == 10
    assert num_made_otherwise(folders) == 0
    monkeypatch.setattr(
        "knnper.simulation.batches.folder.code_fingerprint", lambda: "new"
    )
    assert num_made_otherwise(folders) == 10


@pytest.mark.slow
def test_in_processes_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, two, and two that are interrupted and begin again."""
    comparison = plan(tmp_path)

    def table(folder: Path, num_workers: int) -> str:
        outcomes = compare(comparison, folder, num_workers, ignore)
        rows = [replace(row, seconds=None) for row in table_of(outcomes, "mean")]
        return as_csv(rows)

    def leave(progress: Progress) -> None:
        raise KeyboardInterrupt

    expected = table(tmp_path / "one", 1)
    with pytest.raises(KeyboardInterrupt):
        compare(comparison, tmp_path / "two", 2, leave)
    assert multiprocessing.active_children() == []
    assert table(tmp_path / "two", 2) == expected


def test_training_is_the_same_whatever_is_on_top(tmp_path: Path) -> None:
    mean, memory, drift = plan(tmp_path).rows
    identities = [
        training_identity(row.candidates[-1].tuning) for row in (mean, memory, drift)
    ]
    assert identities[0] != identities[2]
    # FedAvg and kNN-Per are two names; the method is in what they have in common.
    fedavg, knn_per = (row.candidates[0].tuning for row in (mean, memory))
    assert training_identity(fedavg) == training_identity(knn_per)

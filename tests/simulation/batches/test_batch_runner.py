"""A sweep makes what is missing, trains once and embeds once."""

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
from knnper.errors import DataError, FolderTakenError, RunError
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches import workers
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.family import FAILED, RunStage
from knnper.simulation.batches.outputs import write_batch
from knnper.simulation.batches.progress import Progress
from knnper.simulation.batches.runner import (
    Outcome,
    families_of,
    folder_of,
    num_runs,
    num_steps,
    run_batch,
)
from knnper.simulation.batches.sweep import Sweep
from knnper.simulation.batches.tables import csv_of, rows_of, run_rows, table_of
from knnper.simulation.engines import simulate
from knnper.simulation.reports.table import csv_text
from knnper.strategies.core.embedding_pool import EmbeddingPool
from knnper.strategies.core.task import Task
from tests.simulation.batches.doomed import Doomed, die, send_one_event
from tests.simulation.batches.small_comparison import ROWS, plan
from tests.simulation.batches.small_sweep import (
    BASE,
    FRACTION,
    NEIGHBORS,
    Made,
    ignore,
    read,
    rounds,
)

pytestmark = pytest.mark.integration


def points(outcomes: Sequence[Outcome]) -> str:
    return csv_text(run_rows(outcomes))


def several(tmp_path: Path) -> Sweep:
    return read(tmp_path, grid={FRACTION: [0.5, 1.0], NEIGHBORS: [1, 5]})


def test_a_training_is_made_once(tmp_path: Path, made: Made) -> None:
    sweep, progress = several(tmp_path), list[Progress]()
    outcomes = run_batch(sweep, tmp_path / "out", 1, progress.append)
    # Two seeds, each with a training of two rounds and four runs.
    assert sorted(rounds(made)) == [0, 0, *(6 * [2])]
    assert progress[-1].done == progress[-1].total == num_steps(sweep) == 2 * (2 + 4)
    assert {step.at_start for step in progress} == {0}
    states = {
        RunFolder(run).results()["training"]["state_sha256"]
        for outcome in outcomes
        for run in outcome.runs.values()
    }
    assert len(states) == 2
    few, many = (
        RunFolder(outcomes[number].runs[1]).results()["unseen"] for number in (0, 2)
    )
    assert few["global"] == many["global"]
    assert few["log_loss"] != many["log_loss"]


def test_another_split_is_another_training(tmp_path: Path) -> None:
    sweep = read(tmp_path, grid={"partition.alpha": [0.1, 1.0], NEIGHBORS: [1, 5]})
    families = families_of(sweep.experiments, tmp_path, ["knnper"])
    assert [len(family.runs) for family in families] == [2, 2, 2, 2]
    assert num_steps(sweep) == 4 * (2 + 2)


def test_interrupted_in_the_middle_it_makes_only_what_is_missing(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = several(tmp_path)
    expected = run_batch(sweep, tmp_path / "whole", 1, ignore)
    made.clear()

    def until_the_third(bench: Any, folder: RunFolder, *others: Any) -> Any:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append((folder.path, len(folder.rounds())))
        return simulate(bench, folder, *others)

    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(family_runs, "simulate", until_the_third)
        with pytest.raises(KeyboardInterrupt):
            run_batch(sweep, folder, 1, ignore)
    before = {path for path, _ in made}
    made.clear()
    progress = list[Progress]()
    rows = run_batch(sweep, folder, 1, progress.append)
    # Of the first seed two runs are left, which train no more; the second has none.
    assert rounds(made) == [2, 2, 0, 2, 2, 2]
    assert before.isdisjoint(path for path, _ in made)
    assert progress[0].done == progress[-1].at_start == 2 + 2
    assert points(rows) == points(expected)


def test_a_file_that_grows_trains_nothing_anew(tmp_path: Path, made: Made) -> None:
    folder = tmp_path / "out"
    run_batch(read(tmp_path), folder, 1, ignore)
    kept = sorted(path.parent for path in folder.glob("runs/*/checkpoints"))
    assert len(kept) == 2  # one run of each seed
    made.clear()
    run_batch(read(tmp_path, grid={NEIGHBORS: [1, 5, 9]}), folder, 1, ignore)
    assert rounds(made) == [2, 2]
    assert sorted(path.parent for path in folder.glob("runs/*/checkpoints")) == kept


def test_embeddings_are_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded: list[int] = []
    compute = Task._embed

    def counted(task: Task, weights: Any, images: Any) -> Any:
        embedded.append(len(images))
        return compute(task, weights, images)

    monkeypatch.setattr(Task, "_embed", counted)
    sweep = read(
        tmp_path,
        grid={
            NEIGHBORS: [1, 5],
            "personalization.store": [{}, {"policy": "fifo", "capacity": 5}],
        },
        seeds=[1],
    )
    shared = run_batch(sweep, tmp_path / "shared", 1, ignore)
    num_shared = sum(embedded)
    embedded.clear()
    monkeypatch.setattr(family_runs, "EmbeddingPool", lambda kept: EmbeddingPool())
    apart = run_batch(sweep, tmp_path / "apart", 1, ignore)
    assert sum(embedded) == 4 * num_shared
    assert points(shared) == points(apart)
    for run_shared, run_apart in zip(shared, apart, strict=True):
        for name in ("clients.csv", "personalization.jsonl"):
            content = (run_shared.runs[1] / name).read_bytes()
            assert content == (run_apart.runs[1] / name).read_bytes()


def test_models_of_all_clients_are_not_kept(tmp_path: Path) -> None:
    base = {**BASE, "method": {"name": "ditto", "prox_weights": [0.1]}}
    sweep = read(tmp_path, base=base, grid={FRACTION: [0.5, 1.0]}, seeds=[1])
    folder = tmp_path / "out"
    run_batch(sweep, folder, 1, ignore)
    for name in ("checkpoints", "clients"):
        assert list(folder.glob(f"runs/*/{name}")) == []


def write(sweep: Sweep, folder: Path) -> None:
    outcomes = run_batch(sweep, folder, 1, ignore)
    write_batch(sweep, outcomes, rows_of(sweep, outcomes), folder)


def outputs(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_what_a_sweep_writes_no_more_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    tuned = {"evaluate_on": "validation", "seeds": [1]}
    write(read(tmp_path, x=NEIGHBORS, **tuned), folder)
    tables = {"runs", "points.csv", "table.csv", "table.md"}
    plots = {"plot.svg", "plot.pdf", "plot.png"}
    assert outputs(folder) == tables | plots | {"chosen.yaml"}
    (folder / "plot.py").write_text("mine")
    write(read(tmp_path, seeds=[1]), folder)
    assert outputs(folder) == tables | {"plot.py"}
    # Without a point to choose no choice stays.
    write(read(tmp_path, **tuned), folder)
    assert (folder / "chosen.yaml").is_file()
    with pytest.raises(RunError, match="no point of the variant"):
        write(read(tmp_path, grid={"training.learning_rate": [1e30]}, **tuned), folder)
    assert not (folder / "chosen.yaml").exists()
    # A table of one's own is not written over.
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "table.csv").write_text("mine")
    with pytest.raises(FolderTakenError, match="is not empty"):
        write(read(tmp_path, seeds=[1]), mine)
    assert outputs(mine) == {"table.csv"}
    assert (mine / "table.csv").read_text() == "mine"


# Tuning on validation data, testing over seeds, and going on where it was left.


def as_csv(comparison: Comparison, outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the table but for how long the runs took."""
    text = csv_of(comparison, outcomes, rows_of(comparison, outcomes))
    lines = list(csv.DictReader(io.StringIO(text)))
    return [{**line, "seconds": ""} for line in lines]


def test_the_best_on_validation_data_is_tested(tmp_path: Path, made: Made) -> None:
    comparison, progress = plan(tmp_path), list[Progress]()
    mean, memory, drift = run_batch(comparison, tmp_path / "runs", 1, progress.append)
    assert num_runs(comparison, tmp_path / "runs") == (4 + 6, 4 + 6)
    # The second of a pair that trains alike finds both rounds made.
    assert sorted(rounds(made)) == [*6 * [0], *4 * [2]]
    # Two trainings are tuned, of two runs each; two are tested, with each of two seeds.
    steps = 2 * (2 + 2) + 2 * ((2 + 2) + (2 + 1))
    assert progress[0].total == num_steps(comparison) == steps
    assert progress[-1].done == progress[-1].total == progress[0].total
    assert {step.at_start for step in progress} == {0}
    for outcome in (mean, memory):
        slow, fast = outcome.candidates
        assert slow.score is not None
        assert fast.score is not None
        assert fast.score > slow.score
        assert outcome.point is fast.point
    assert drift.candidates == ()
    assert list(drift.runs) == [1, 2]
    # The four runs on validation data read no test split, the others read theirs.
    tuned = [json.loads((path / "results.json").read_text()) for path, _ in made[:4]]
    kinds = {
        results["manifest"]["experiment"]["partition"]["evaluate_on"]
        for results in tuned
    }
    assert kinds == {"validation"}


def test_a_row_of_which_all_diverge_is_named(tmp_path: Path) -> None:
    grid, rows = {"training.learning_rate": [1e30, 1e31]}, {"mean": ROWS["mean"]}
    comparison = plan(tmp_path, grid=grid, rows=rows)
    message = "no candidate of the row mean has a score .* training diverged"
    with pytest.raises(RunError, match=message):
        run_batch(comparison, tmp_path / "runs", 1, ignore)


HOT = {
    "method": {"name": "fedavg"},
    "grid": {"training.learning_rate": [1e30]},
    "title": "Hot",
}


def test_what_diverges_is_neither_chosen_nor_in_the_table(tmp_path: Path) -> None:
    grid = {"training.learning_rate": [1e30, 0.1]}
    comparison = plan(tmp_path, grid=grid, rows={"mean": ROWS["mean"], "hot": HOT})
    folder = tmp_path / "runs"
    outcomes = run_batch(comparison, folder, 1, ignore)
    assert outcomes[0].candidates[0].score is None
    assert outcomes[0].point.values == {"training.learning_rate": 0.1}
    assert sorted(outcomes[1].failures) == [1, 2]
    assert outcomes[1].runs == {}
    rows = rows_of(comparison, outcomes)
    cells = table_of(comparison, rows).rows[1]
    assert cells == ("Hot (2 failed)", *(9 * ["-"]))
    # What failed is told with what to delete.
    _, _, tuned, *tested = write_batch(comparison, outcomes, rows, folder).remarks
    assert tuned.startswith("1 of 2 candidates failed on validation data and were not")
    for seed, remark in zip((1, 2), tested, strict=True):
        run = folder_of(comparison.points[-1].runs[seed], folder)
        assert remark.startswith(f"Hot failed with seed {seed}: round 1: ")
        assert remark.endswith(f". To make it again, delete {run}")
    only = plan(tmp_path, rows={"mean": HOT})
    with pytest.raises(RunError, match="the reference row mean failed with seed 1"):
        run_batch(only, tmp_path / "runs", 1, ignore)


def test_a_fault_ends_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise DataError("the disk is gone")

    comparison = plan(tmp_path, rows={"mean": ROWS["mean"]}, seeds=[1])
    with monkeypatch.context() as patch:
        patch.setattr(family_runs, "simulate", broken)
        with pytest.raises(DataError, match="the disk is gone"):
            run_batch(comparison, tmp_path / "runs", 1, ignore)
    assert not list((tmp_path / "runs").rglob(FAILED))
    assert len(run_batch(comparison, tmp_path / "runs", 1, ignore)) == 1


def test_tuning_reads_no_test_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All images of the test split are made invalid: tuning ends with equal scores."""
    comparison = plan(tmp_path, rows={"mean": ROWS["mean"]}, seeds=[1])
    expected = run_batch(comparison, tmp_path / "sound", 1, ignore)

    load = DigitsSettings.load

    def spoilt(settings: DigitsSettings) -> Dataset:
        data = load(settings)
        test = replace(data.test, images=np.zeros_like(data.test.images))
        return replace(data, test=test)

    monkeypatch.setattr(DigitsSettings, "load", spoilt)
    spoilt_rows = run_batch(comparison, tmp_path / "spoilt", 1, ignore)
    assert len(expected) == 1
    for row, spoilt_row in zip(expected, spoilt_rows, strict=True):
        assert [tried.score for tried in row.candidates] == [
            tried.score for tried in spoilt_row.candidates
        ]
        tested = [(run / "clients.csv").read_bytes() for run in row.runs.values()]
        assert tested != [
            (run / "clients.csv").read_bytes() for run in spoilt_row.runs.values()
        ]


@pytest.mark.slow
def test_processes_make_the_same(
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


# Worker processes: what they tell, and those that end before their work is done.


def test_processes_that_are_killed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "make_runs", die)
    families: list[Any] = [Doomed(), Doomed()]
    with pytest.raises(RunError, match=r"worker process was killed.*fewer .*--workers"):
        list(workers.run_in_workers(families, 1))
    assert multiprocessing.active_children() == []


def test_processes_send_their_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "make_runs", send_one_event)
    families: list[Any] = [Doomed()] * 2
    sent = [event for some in workers.run_in_workers(families, 1) for event in some]
    assert sorted(number for number, _ in sent) == [0, 1]
    assert {event.stage for _, event in sent} == {RunStage.ROUND}


def test_a_row_that_follows_is_tuned_after_its_leader(
    tmp_path: Path, made: Made
) -> None:
    memory = {
        "method": {"name": "knn_per"},
        "follows": "mean",
        "grid": {"personalization.num_neighbors": [1, 3]},
    }
    rows = {"memory": memory, "mean": ROWS["mean"]}
    comparison, progress = plan(tmp_path, rows=rows), list[Progress]()
    row_runs = run_batch(comparison, tmp_path / "out", 1, progress.append)
    mean, follower = row_runs[1], row_runs[0]
    rate = mean.point.values["training.learning_rate"]
    assert follower.point.values["training.learning_rate"] == rate
    assert [
        candidate.point.values["personalization.num_neighbors"]
        for candidate in follower.candidates
    ] == [1, 3]
    # Two rates, then the best one's twice; both rows with two seeds share trainings.
    assert len([*(tmp_path / "out/runs").iterdir()]) == 2 + 2 + 2 * 2
    assert progress[-1].done == progress[-1].total
    assert num_runs(comparison, tmp_path / "out") == (8, 8)

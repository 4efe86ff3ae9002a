"""A sweep makes what is missing, trains once and embeds once."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import knnper.simulation.batches.family as family_runs
from knnper.errors import FolderTakenError, RunError
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.outputs import write_batch
from knnper.simulation.batches.plan import Sweep
from knnper.simulation.batches.progress import Progress
from knnper.simulation.batches.runner import (
    Outcome,
    families_of,
    folder_of,
    num_steps,
    run_batch,
)
from knnper.simulation.batches.tables import csv_text, rows_of, run_rows
from knnper.simulation.run import simulate
from knnper.strategies.core.task import EmbeddingPool, Task
from tests.simulation.batches.small_sweep import (
    BASE,
    FRACTION,
    NEIGHBORS,
    ignore,
    read,
    rounds,
)


def points(outcomes: Sequence[Outcome]) -> str:
    return csv_text(run_rows(outcomes))


def several(tmp_path: Path) -> Sweep:
    return read(tmp_path, vary={FRACTION: [0.5, 1.0], NEIGHBORS: [1, 5]})


def test_what_does_not_change_training_is_trained_once(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    sweep, told = several(tmp_path), list[Progress]()
    outcomes = run_batch(sweep, tmp_path / "out", 1, told.append)
    # Two seeds, each with a training of two rounds and four runs.
    assert sorted(rounds(made)) == [0, 0, *(6 * [2])]
    assert told[-1].done == told[-1].total == num_steps(sweep) == 2 * (2 + 4)
    assert {one.found for one in told} == {0}
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
    sweep = read(tmp_path, vary={"partition.alpha": [0.1, 1.0], NEIGHBORS: [1, 5]})
    families = families_of(sweep.experiments, tmp_path, ["knnper"])
    assert [len(family.runs) for family in families] == [2, 2, 2, 2]
    assert num_steps(sweep) == 4 * (2 + 2)


def test_interrupted_in_the_middle_it_makes_only_what_is_missing(
    tmp_path: Path, made: list[tuple[Path, int]], monkeypatch: pytest.MonkeyPatch
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
    told = list[Progress]()
    found = run_batch(sweep, folder, 1, told.append)
    # Of the first seed two runs are left, which train no more; the second has none.
    assert rounds(made) == [2, 2, 0, 2, 2, 2]
    assert before.isdisjoint(path for path, _ in made)
    assert told[0].done == told[-1].found == 2 + 2
    assert points(found) == points(expected)


def test_what_is_done_is_not_done_again(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    sweep, folder = read(tmp_path), tmp_path / "out"
    first = run_batch(sweep, folder, 1, ignore)
    made.clear()
    told = list[Progress]()
    again = run_batch(sweep, folder, 1, told.append)
    assert made == []
    (only,) = told
    assert only.done == only.found == only.total == num_steps(sweep)
    assert points(again) == points(first)

    lost = first[1].runs[2]
    shutil.rmtree(lost)
    run_batch(sweep, folder, 1, ignore)
    assert made == [(lost, 2)]


def test_a_file_that_grows_trains_nothing_anew(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    folder = tmp_path / "out"
    run_batch(read(tmp_path), folder, 1, ignore)
    kept = sorted(path.parent for path in folder.glob("runs/*/checkpoints"))
    assert len(kept) == 2  # one run of each seed
    made.clear()
    run_batch(read(tmp_path, vary={NEIGHBORS: [1, 5, 9]}), folder, 1, ignore)
    assert rounds(made) == [2, 2]
    assert sorted(path.parent for path in folder.glob("runs/*/checkpoints")) == kept


def test_embeddings_are_computed_once_and_the_bits_are_the_same(
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
        vary={
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
    for one, other in zip(shared, apart, strict=True):
        for name in ("clients.csv", "personalization.jsonl"):
            content = (one.runs[1] / name).read_bytes()
            assert content == (other.runs[1] / name).read_bytes()


def test_a_method_with_fewer_rounds_ends_with_all_steps(tmp_path: Path) -> None:
    sweep = read(tmp_path, base={**BASE, "method": {"name": "local"}}, vary={})
    told = list[Progress]()
    run_batch(sweep, tmp_path / "out", 1, told.append)
    assert told[-1].done == told[-1].total <= num_steps(sweep)


def test_rounds_count_while_a_run_goes_on(tmp_path: Path) -> None:
    sweep, folder = read(tmp_path, seeds=[1]), tmp_path / "out"
    run = RunFolder.create(
        folder_of(sweep.experiments[0], folder), sweep.experiments[0]
    )
    run.append_round({"server_round": 1})
    told = list[Progress]()
    run_batch(sweep, folder, 1, told.append)
    assert told[0].done == 1
    assert told[-1].done == told[-1].total


def test_models_of_all_clients_are_not_kept(tmp_path: Path) -> None:
    base = {**BASE, "method": {"name": "ditto", "prox_weights": [0.1]}}
    folder = tmp_path / "out"
    run_batch(read(tmp_path, base=base, vary={FRACTION: [0.5, 1.0]}), folder, 1, ignore)
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


def test_without_a_point_to_choose_no_choice_stays(tmp_path: Path) -> None:
    folder, tuned = tmp_path / "out", {"evaluate_on": "validation", "seeds": [1]}
    write(read(tmp_path, vary={"training.learning_rate": [0.1]}, **tuned), folder)
    assert (folder / "chosen.yaml").is_file()
    with pytest.raises(RunError, match="no point of the variant"):
        write(read(tmp_path, vary={"training.learning_rate": [1e30]}, **tuned), folder)
    assert not (folder / "chosen.yaml").exists()


def test_a_table_of_ones_own_is_not_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "table.csv").write_text("mine")
    with pytest.raises(FolderTakenError, match="is not empty"):
        write(read(tmp_path, seeds=[1]), folder)
    assert outputs(folder) == {"table.csv"}
    assert (folder / "table.csv").read_text() == "mine"

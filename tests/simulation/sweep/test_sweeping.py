"""A sweep makes what is missing, trains once and embeds once."""

import multiprocessing
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import knnper.simulation.batches.runner as playing
from knnper.errors import RunError
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.plan import Sweep
from knnper.simulation.batches.progress import Progress
from knnper.simulation.batches.runner import families_of, folder_of
from knnper.simulation.batches.tables import (
    RunningOutcome,
    csv_text,
    num_steps,
    run_rows,
    run_sweep,
)
from knnper.simulation.run import simulate
from knnper.strategies.core.task import EmbeddingPool, Task
from tests.simulation.sweep.small_sweep import (
    BASE,
    FRACTION,
    NEIGHBORS,
    in_this_process,
    read,
)


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "slow" not in request.keywords:
        where = "knnper.simulation.batches.tables.play_side_by_side"
        monkeypatch.setattr(where, in_this_process)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """Return a list that grows with each run: its folder, and the rounds it had."""
    runs: list[tuple[Path, int]] = []

    def noted(bench: Any, folder: RunFolder, *others: Any) -> Any:
        runs.append((folder.path, len(folder.rounds())))
        return simulate(bench, folder, *others)

    monkeypatch.setattr(playing, "simulate", noted)
    return runs


def ignore(progress: object) -> None:
    """Want to know nothing of how a sweep gets on."""


def points(outcomes: Sequence[RunningOutcome]) -> str:
    return csv_text(run_rows(outcomes))


def several(tmp_path: Path) -> Sweep:
    return read(tmp_path, vary={FRACTION: [0.5, 1.0], NEIGHBORS: [1, 5]})


def test_what_does_not_change_training_is_trained_once(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    sweep, told = several(tmp_path), list[Progress]()
    outcomes = run_sweep(sweep, tmp_path / "out", 1, told.append)
    # Two seeds, each with a training of two rounds and four runs.
    assert sorted(rounds for _, rounds in made) == [0, 0, *(6 * [2])]
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
    assert [len(family.orders) for family in families] == [2, 2, 2, 2]
    assert num_steps(sweep) == 4 * (2 + 2)


def test_interrupted_in_the_middle_it_makes_only_what_is_missing(
    tmp_path: Path, made: list[tuple[Path, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = several(tmp_path)
    expected = run_sweep(sweep, tmp_path / "whole", 1, ignore)
    made.clear()

    def until_the_third(bench: Any, folder: RunFolder, *others: Any) -> Any:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append((folder.path, len(folder.rounds())))
        return simulate(bench, folder, *others)

    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(playing, "simulate", until_the_third)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(sweep, folder, 1, ignore)
    before = {path for path, _ in made}
    made.clear()
    told = list[Progress]()
    found = run_sweep(sweep, folder, 1, told.append)
    # Of the first seed two runs are left, which train no more; the second has none.
    assert [rounds for _, rounds in made] == [2, 2, 0, 2, 2, 2]
    assert before.isdisjoint(path for path, _ in made)
    assert told[0].done == told[-1].found == 2 + 2
    assert points(found) == points(expected)


def test_what_is_done_is_not_done_again(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    sweep, folder = read(tmp_path), tmp_path / "out"
    first = run_sweep(sweep, folder, 1, ignore)
    made.clear()
    told = list[Progress]()
    again = run_sweep(sweep, folder, 1, told.append)
    assert made == []
    (only,) = told
    assert only.done == only.found == only.total == num_steps(sweep)
    assert points(again) == points(first)

    lost = first[1].runs[2]
    shutil.rmtree(lost)
    run_sweep(sweep, folder, 1, ignore)
    assert made == [(lost, 2)]


def test_a_file_that_grows_trains_nothing_anew(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    folder = tmp_path / "out"
    run_sweep(read(tmp_path), folder, 1, ignore)
    kept = sorted(path.parent for path in folder.glob("runs/*/checkpoints"))
    assert len(kept) == 2  # one run of each seed
    made.clear()
    run_sweep(read(tmp_path, vary={NEIGHBORS: [1, 5, 9]}), folder, 1, ignore)
    assert [rounds for _, rounds in made] == [2, 2]
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
    shared = run_sweep(sweep, tmp_path / "shared", 1, ignore)
    num_shared = sum(embedded)
    embedded.clear()
    monkeypatch.setattr(playing, "EmbeddingPool", lambda kept: EmbeddingPool())
    apart = run_sweep(sweep, tmp_path / "apart", 1, ignore)
    assert sum(embedded) == 4 * num_shared
    assert points(shared) == points(apart)
    for one, other in zip(shared, apart, strict=True):
        for name in ("clients.csv", "personalization.jsonl"):
            content = (one.runs[1] / name).read_bytes()
            assert content == (other.runs[1] / name).read_bytes()


def test_a_point_that_diverges_is_left_out(tmp_path: Path) -> None:
    sweep = read(tmp_path, vary={"training.learning_rate": [1e30, 0.1]}, seeds=[1])
    hot, sound = run_sweep(sweep, tmp_path / "out", 1, ignore)
    assert "lower training.learning_rate" in hot.failures[1]
    assert hot.runs == {}
    assert list(sound.runs) == [1]


def test_a_method_with_fewer_rounds_ends_with_all_steps(tmp_path: Path) -> None:
    sweep = read(tmp_path, base={**BASE, "method": {"name": "local"}}, vary={})
    told = list[Progress]()
    run_sweep(sweep, tmp_path / "out", 1, told.append)
    assert told[-1].done == told[-1].total <= num_steps(sweep)


def test_rounds_count_while_a_run_goes_on(tmp_path: Path) -> None:
    sweep, folder = read(tmp_path, seeds=[1]), tmp_path / "out"
    run = RunFolder.create(
        folder_of(sweep.experiments[0], folder), sweep.experiments[0]
    )
    run.append_round({"server_round": 1})
    told = list[Progress]()
    run_sweep(sweep, folder, 1, told.append)
    assert told[0].done == 1
    assert told[-1].done == told[-1].total


@pytest.mark.slow
def test_in_processes_it_is_the_same(tmp_path: Path) -> None:
    """One process, two, and two that are interrupted and begin again."""
    sweep, told = several(tmp_path), list[Progress]()

    def leave(progress: Progress) -> None:
        if progress.done > progress.found:
            raise KeyboardInterrupt

    expected = points(run_sweep(sweep, tmp_path / "one", 1, ignore))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, tmp_path / "two", 2, leave)
    assert multiprocessing.active_children() == []
    again = run_sweep(sweep, tmp_path / "two", 2, told.append)
    assert points(again) == expected
    assert told[-1].done == told[-1].total <= num_steps(sweep)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with (
        RunFolder(folder).locked(),
        pytest.raises(RunError, match="another process is at work"),
    ):
        run_sweep(read(tmp_path), folder, 1, ignore)


def test_models_of_all_clients_are_not_kept(tmp_path: Path) -> None:
    base = {**BASE, "method": {"name": "ditto", "prox_weights": [0.1]}}
    folder = tmp_path / "out"
    run_sweep(read(tmp_path, base=base, vary={FRACTION: [0.5, 1.0]}), folder, 1, ignore)
    for name in ("checkpoints", "clients"):
        assert list(folder.glob(f"runs/*/{name}")) == []

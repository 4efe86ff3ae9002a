"""What a family of runs knows of those that were made before."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import knnper.simulation.batches.family as family_runs
from knnper.server.distribution import DistributionError
from knnper.server.rounds import TooManyFailuresError
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.family import (
    FAILED,
    Event,
    Family,
    is_done,
    why_failed,
)
from knnper.simulation.batches.folder import CODE, num_made_otherwise, sign, sign_as
from knnper.simulation.batches.runner import families_of
from knnper.simulation.run import simulate
from tests.simulation.batches.small_sweep import NEIGHBORS, read, rounds

RATE = "training.learning_rate"
FINGERPRINT = "knnper.simulation.batches.folder.code_fingerprint"


def family(folder: Path, neighbors: list[int], rate: float = 0.1) -> Family:
    vary = {NEIGHBORS: neighbors}
    sweep = read(folder, vary=vary, set={RATE: rate}, seeds=[1])
    (found,) = families_of(
        sweep.experiments, folder / "out", ["knnper"], keeps_training=True
    )
    return found


def make(one: Family) -> None:
    family_runs.make_runs(one, list[Event]().append)


def signatures(found: Family) -> list[str]:
    return [(folder / CODE).read_text() for folder in found.runs]


def test_a_run_that_goes_on_keeps_the_code_that_began_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = family(tmp_path, [1])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(family_runs, "simulate", interrupted)
        patch.setattr(FINGERPRINT, lambda: "old")
        with pytest.raises(KeyboardInterrupt):
            make(one)
    make(one)
    assert signatures(one) == ["old"]
    assert num_made_otherwise(one.runs) == 1


def test_who_takes_a_training_over_takes_its_code_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[tuple[Path, int]]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(FINGERPRINT, lambda: "old")
        make(family(tmp_path, [1]))
    both = family(tmp_path, [1, 5])
    make(both)
    assert rounds(made) == [0, 2]
    assert signatures(both) == ["old", "old"]


def test_other_code_is_never_forgotten(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    (old / CODE).write_text("old")
    sign(new)
    sign_as(old, new)
    assert num_made_otherwise([old, new]) == 1
    sign_as(new, old)
    assert num_made_otherwise([old, new]) == 2


def test_a_training_that_diverged_before_is_not_made_again(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    make(family(tmp_path, [1], rate=1e30))
    assert len(made) == 1
    both = family(tmp_path, [1, 5], rate=1e30)
    make(both)
    assert len(made) == 1
    reasons = {why_failed(folder) for folder in both.runs}
    (reason,) = reasons
    assert "lower training.learning_rate" in (reason or "")


def test_a_hand_over_that_fails_leaves_its_training_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[tuple[Path, int]]
) -> None:
    def failing_first(bench: Any, folder: RunFolder, *others: Any) -> Any:
        made.append((folder.path, len(folder.rounds())))
        found = simulate(bench, folder, *others)
        if bench.experiment.personalization.settings.num_neighbors == 1:
            (folder.path / "results.json").unlink()
            raise DistributionError("client 0000 could not be served")
        return found

    monkeypatch.setattr(family_runs, "simulate", failing_first)
    both = family(tmp_path, [1, 5])
    make(both)
    assert rounds(made) == [0, 2]
    first, second = both.runs
    assert "could not be served" in (why_failed(first) or "")
    assert RunFolder(second).is_finished()

    # Nor is it taken for a training that diverges when it is found.
    shutil.rmtree(second)
    make(both)
    assert RunFolder(second).is_finished()
    assert (first / FAILED).is_file()


def failing(*_: Any) -> None:
    raise TooManyFailuresError("round 1: a fault of yesterday's code")


def test_what_other_code_failed_at_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[tuple[Path, int]]
) -> None:
    one = family(tmp_path, [1])
    folder = next(iter(one.runs))
    with monkeypatch.context() as patch:
        patch.setattr(family_runs, "simulate", failing)
        patch.setattr(FINGERPRINT, lambda: "old")
        make(one)
        assert is_done(folder)
    assert not is_done(folder)
    make(one)
    assert rounds(made) == [0]
    assert RunFolder(folder).is_finished()
    assert why_failed(folder) is None
    assert num_made_otherwise([folder]) == 0
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_this_code_failed_at_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[tuple[Path, int]]
) -> None:
    one = family(tmp_path, [1])
    with monkeypatch.context() as patch:
        patch.setattr(family_runs, "simulate", failing)
        make(one)
    make(one)
    assert rounds(made) == []
    shutil.rmtree(next(iter(one.runs)))
    make(one)
    assert rounds(made) == [0]


def test_what_two_versions_failed_at_is_made_again_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[tuple[Path, int]]
) -> None:
    both = family(tmp_path, [1, 5], rate=1e30)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(family_runs, "simulate", interrupted)
        patch.setattr(FINGERPRINT, lambda: "old")
        with pytest.raises(KeyboardInterrupt):
            make(both)
    make(both)  # goes on with what the other began, and fails
    assert signatures(both) == ["old", "old"]
    make(both)
    make(both)
    assert rounds(made) == [0, 0]
    assert num_made_otherwise(both.runs) == 0
    assert all(is_done(folder) for folder in both.runs)


def test_a_failure_that_was_deleted_in_part_does_not_return(tmp_path: Path) -> None:
    one = family(tmp_path, [1])
    folder = next(iter(one.runs))
    left = folder.with_name(f".{folder.name}.discarded")
    for path in (left, folder):
        path.mkdir(parents=True)
        (path / FAILED).write_text("a fault\n")
    make(one)
    assert RunFolder(folder).is_finished()
    assert not left.exists()

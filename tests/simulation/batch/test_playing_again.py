"""What a family of runs knows of those that were made before."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import knnper.simulation.batches.runner as playing
from knnper.server.distribution import DistributionError
from knnper.server.rounds import TooManyFailuresError
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.folder import CODE, num_made_otherwise, sign, sign_as
from knnper.simulation.batches.runner import (
    FAILED,
    Family,
    families_of,
    is_done,
    play,
    why_failed,
)
from knnper.simulation.run import simulate
from tests.simulation.sweep.small_sweep import NEIGHBORS, read

RATE = "training.learning_rate"
FINGERPRINT = "knnper.simulation.batches.folder.code_fingerprint"


def family(folder: Path, neighbors: list[int], rate: float = 0.1) -> Family:
    vary = {NEIGHBORS: neighbors}
    sweep = read(folder, vary=vary, set={RATE: rate}, seeds=[1])
    (found,) = families_of(
        sweep.experiments, folder / "out", ["knnper"], keeps_training=True
    )
    return found


def signatures(found: Family) -> list[str]:
    return [(order.folder / CODE).read_text() for order in found.orders]


def test_a_run_that_goes_on_keeps_the_code_that_began_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = family(tmp_path, [1])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(playing, "simulate", interrupted)
        patch.setattr(FINGERPRINT, lambda: "old")
        with pytest.raises(KeyboardInterrupt):
            play(one)
    play(one)
    assert signatures(one) == ["old"]
    assert num_made_otherwise([one.orders[0].folder]) == 1


def test_who_takes_a_training_over_takes_its_code_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[int]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(FINGERPRINT, lambda: "old")
        play(family(tmp_path, [1]))
    both = family(tmp_path, [1, 5])
    play(both)
    assert made == [0, 2]
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
    tmp_path: Path, made: list[int]
) -> None:
    play(family(tmp_path, [1], rate=1e30))
    assert len(made) == 1
    both = family(tmp_path, [1, 5], rate=1e30)
    play(both)
    assert len(made) == 1
    reasons = {why_failed(order.folder) for order in both.orders}
    (reason,) = reasons
    assert "lower training.learning_rate" in (reason or "")


def test_a_hand_over_that_fails_leaves_its_training_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[int]
) -> None:
    def failing_first(bench: Any, folder: RunFolder, *others: Any) -> Any:
        made.append(len(folder.rounds()))
        found = simulate(bench, folder, *others)
        if bench.experiment.personalization.settings.num_neighbors == 1:
            (folder.path / "results.json").unlink()
            raise DistributionError("client 0000 could not be served")
        return found

    monkeypatch.setattr(playing, "simulate", failing_first)
    both = family(tmp_path, [1, 5])
    play(both)
    assert made == [0, 2]
    first, second = (order.folder for order in both.orders)
    assert "could not be served" in (why_failed(first) or "")
    assert RunFolder(second).is_finished()

    # Nor is it taken for a training that diverges when it is found.
    shutil.rmtree(second)
    play(both)
    assert RunFolder(second).is_finished()
    assert (first / FAILED).is_file()


def failing(*_: Any) -> None:
    raise TooManyFailuresError("round 1: a fault of yesterday's code")


def test_what_other_code_failed_at_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[int]
) -> None:
    one = family(tmp_path, [1])
    folder = one.orders[0].folder
    with monkeypatch.context() as patch:
        patch.setattr(playing, "simulate", failing)
        patch.setattr(FINGERPRINT, lambda: "old")
        play(one)
        assert is_done(folder)
    assert not is_done(folder)
    play(one)
    assert made == [0]
    assert RunFolder(folder).is_finished()
    assert why_failed(folder) is None
    assert num_made_otherwise([folder]) == 0
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_this_code_failed_at_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[int]
) -> None:
    one = family(tmp_path, [1])
    with monkeypatch.context() as patch:
        patch.setattr(playing, "simulate", failing)
        play(one)
    play(one)
    assert made == []
    shutil.rmtree(one.orders[0].folder)
    play(one)
    assert made == [0]


def test_what_two_versions_failed_at_is_made_again_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[int]
) -> None:
    both = family(tmp_path, [1, 5], rate=1e30)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(playing, "simulate", interrupted)
        patch.setattr(FINGERPRINT, lambda: "old")
        with pytest.raises(KeyboardInterrupt):
            play(both)
    play(both)  # goes on with what the other began, and fails
    assert signatures(both) == ["old", "old"]
    play(both)
    play(both)
    assert made == [0, 0]
    assert num_made_otherwise(order.folder for order in both.orders) == 0
    assert all(is_done(order.folder) for order in both.orders)


def test_a_failure_that_was_deleted_in_part_does_not_return(tmp_path: Path) -> None:
    one = family(tmp_path, [1])
    folder = one.orders[0].folder
    left = folder.with_name(f".{folder.name}.discarded")
    for path in (left, folder):
        path.mkdir(parents=True)
        (path / FAILED).write_text("a fault\n")
    play(one)
    assert RunFolder(folder).is_finished()
    assert not left.exists()

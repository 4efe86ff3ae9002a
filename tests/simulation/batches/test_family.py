"""What a family of runs knows of those that were made before."""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import knnper.simulation.batches.family as family_runs
from knnper.errors import CheckpointError, RunError
from knnper.server.observer import Observer
from knnper.server.rounds import TooManyFailuresError
from knnper.server.run import DistributionError
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.family import FAILED, Event, Family, is_done, why_failed
from knnper.simulation.batches.folder import (
    CODE,
    Inputs,
    keep_inputs,
    num_made_otherwise,
    sign,
    sign_as,
)
from knnper.simulation.batches.plan import Sweep
from knnper.simulation.batches.runner import Outcome, families_of, run_batch
from knnper.simulation.batches.tables import run_rows
from knnper.simulation.workbench import open_workbench, simulate
from tests.simulation.batches.small_sweep import NEIGHBORS, Made, ignore, read, rounds

RATE = "training.learning_rate"
FINGERPRINT = "knnper.simulation.batches.folder.code_fingerprint"


def family(folder: Path, neighbors: list[int], rate: float = 0.1) -> Family:
    vary = {NEIGHBORS: neighbors}
    sweep = read(folder, vary=vary, set={RATE: rate}, seeds=[1])
    (found,) = families_of(
        sweep.experiments, folder / "out", ["knnper"], keeps_training=True
    )
    return found


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def failing(*_: Any) -> None:
    raise TooManyFailuresError("round 1: a fault of yesterday's code")


def make(one: Family) -> None:
    family_runs.make_runs(one, list[Event]().append)


MakeBy = Callable[..., None]


@pytest.fixture
def make_by(monkeypatch: pytest.MonkeyPatch) -> MakeBy:
    """Return what makes a family with a fault in place of a run, or by other code."""

    def make_by(one: Family, fault: Any = None, code: str | None = None) -> None:
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            if code is not None:
                patch.setattr(FINGERPRINT, lambda: code)
            if fault is not None:
                patch.setattr(family_runs, "simulate", fault)
            make(one)
            assert fault is not interrupted

    return make_by


def signatures(found: Family) -> list[str]:
    return [(folder / CODE).read_text() for folder in found.runs]


def test_a_run_keeps_the_code_that_began_it(tmp_path: Path, make_by: MakeBy) -> None:
    one = family(tmp_path, [1])
    make_by(one, interrupted, "old")
    make(one)
    assert signatures(one) == ["old"]
    assert num_made_otherwise(one.runs) == 1


def test_who_takes_a_training_over_takes_its_code_over(
    tmp_path: Path, make_by: MakeBy, made: Made
) -> None:
    make_by(family(tmp_path, [1]), code="old")
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


def test_what_diverged_is_not_made_again(tmp_path: Path, made: Made) -> None:
    make(family(tmp_path, [1], rate=1e30))
    assert len(made) == 1
    both = family(tmp_path, [1, 5], rate=1e30)
    make(both)
    assert len(made) == 1
    reasons = {why_failed(folder) for folder in both.runs}
    (reason,) = reasons
    assert "lower training.learning_rate" in (reason or "")


def test_a_failed_distribution_leaves_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
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


def test_what_other_code_failed_at_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_by: MakeBy, made: Made
) -> None:
    one = family(tmp_path, [1])
    folder = next(iter(one.runs))
    make_by(one, failing, "old")
    with monkeypatch.context() as patch:
        patch.setattr(FINGERPRINT, lambda: "old")
        assert is_done(folder)
    assert not is_done(folder)
    make(one)
    assert rounds(made) == [0]
    assert RunFolder(folder).is_finished()
    assert why_failed(folder) is None
    assert num_made_otherwise([folder]) == 0
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_this_code_failed_at_is_not_tried_again(
    tmp_path: Path, make_by: MakeBy, made: Made
) -> None:
    one = family(tmp_path, [1])
    make_by(one, failing)
    make(one)
    assert rounds(made) == []
    shutil.rmtree(next(iter(one.runs)))
    make(one)
    assert rounds(made) == [0]


def test_what_two_versions_failed_at_is_made_again_by_one(
    tmp_path: Path, make_by: MakeBy, made: Made
) -> None:
    both = family(tmp_path, [1, 5], rate=1e30)
    make_by(both, interrupted, "old")
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


# Finished runs whose training a sweep takes over.


def swept(sweep: Sweep, folder: Path, *earlier: Path) -> list[Outcome]:
    return run_batch(sweep, folder, 1, ignore, earlier=earlier)


def figures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [dict(row) for row in run_rows(outcomes)]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return read(tmp_path, seeds=[1])


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Return a finished run of FedAvg, which trains as kNN-Per does."""
    fedavg = {"set": {"method.name": "fedavg"}, "vary": {}}
    return trained(read(tmp_path, seeds=[1], **fedavg), tmp_path)


def trained(sweep: Sweep, tmp_path: Path) -> Path:
    """Return a finished run of a sweep's only experiment."""
    (one,) = sweep.experiments
    bench = open_workbench(one)
    folder = RunFolder.create(tmp_path / "earlier", one)
    sign(folder.path)
    simulate(bench, folder, Observer(), ["knnper", "simulate"])
    return folder.path


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_its_training_is_not_made_again(
    sweep: Sweep, earlier: Path, tmp_path: Path, made: Made
) -> None:
    expected = figures(swept(sweep, tmp_path / "anew"))
    before = content(earlier)
    made.clear()
    found = swept(sweep, tmp_path / "out", earlier)
    assert rounds(made) == [2, 2]
    assert figures(found) == expected
    assert content(earlier) == before
    # Where all is made the run may be gone.
    shutil.rmtree(earlier)
    assert figures(swept(sweep, tmp_path / "out", earlier)) == expected


def test_others_of_the_sweep_are_trained(
    earlier: Path, tmp_path: Path, made: Made
) -> None:
    swept(read(tmp_path, seeds=[1, 2]), tmp_path / "out", earlier)
    assert rounds(made) == [2, 2, 0, 2]


def shorten(run: Path) -> None:
    for path in run.glob("checkpoints/*/state.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])


def other_split(run: Path) -> None:
    split = RunFolder(run).results()["manifest"]["partition_hash"]
    results = run / "results.json"
    results.write_text(results.read_text().replace(split, "0" * 64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "earlier holds no run"),
        (lambda run: (run / "results.json").unlink(), "finished .* knnper .* --resume"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "round 2 in .*, found none"),
        (shorten, "none of the checkpoints in"),
        (other_split, "the data is not what it was in the run in"),
        (
            lambda run: keep_inputs(run, Inputs(data="0" * 64, weights=None)),
            "the data set is not what it was .* or leave the run away to train anew",
        ),
        (lambda run: shutil.copytree(run, f"{run}-copy"), "copy were trained the same"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(
    sweep: Sweep,
    earlier: Path,
    tmp_path: Path,
    change: Callable[[Path], object],
    message: str,
) -> None:
    change(earlier)
    runs = [earlier, *tmp_path.glob("earlier-copy")]
    with pytest.raises((RunError, CheckpointError), match=message):
        swept(sweep, tmp_path / "out", *runs)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"seeds": [1, 2], "set": {"training.learning_rate": 0.2}},
            r"asked for: training.learning_rate: found 0.1, expected 0.2\. Make",
        ),
        ({"seeds": [2, 3]}, "asked for: seeds: found 1, expected 2"),
    ],
)
def test_a_run_that_was_trained_otherwise_is_refused(
    earlier: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError, match=message):
        swept(read(tmp_path, **changes), tmp_path / "out", earlier)
    assert not (tmp_path / "out").exists()


def test_it_takes_the_place_of_rounds_that_were_begun(
    sweep: Sweep,
    earlier: Path,
    tmp_path: Path,
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = figures(swept(sweep, tmp_path / "anew"))

    def interrupted(bench: Any, folder: RunFolder, *others: Any) -> Any:
        simulate(bench, folder, *others)
        (folder.path / "results.json").unlink()
        shutil.rmtree(max(folder.checkpoints.glob("round-*")))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(family_runs, "simulate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            swept(sweep, tmp_path / "out")
    made.clear()
    assert figures(swept(sweep, tmp_path / "out", earlier)) == expected
    assert rounds(made) == [2, 2]


def test_a_state_that_none_goes_on_from_is_refused(tmp_path: Path) -> None:
    """Dapper counts rounds in the state of the method that it is on top of."""
    plain: dict[str, Any] = {"method.name": "fedavg", "partition.proxy_fraction": 0.2}
    on_top = {**plain, "personalization": {"name": "dapper"}}
    earlier = trained(read(tmp_path, seeds=[1], vary={}, set=plain), tmp_path)
    dapper = read(tmp_path, seeds=[1], vary={}, set=on_top)
    message = "keeps another state than that of fedavg asked for, which adds to it"
    with pytest.raises(RunError, match=message):
        swept(dapper, tmp_path / "out", earlier)


def test_client_states_are_taken_over(tmp_path: Path, made: Made) -> None:
    settings = {"method.name": "ditto", "run.checkpoint_every": 1}
    ditto = read(tmp_path, seeds=[1], vary={}, set=settings)
    expected = figures(swept(ditto, tmp_path / "anew"))
    earlier = trained(ditto, tmp_path)
    made.clear()
    assert figures(swept(ditto, tmp_path / "out", earlier)) == expected
    assert rounds(made) == [2]
    shutil.rmtree(earlier / "clients")
    with pytest.raises(RunError, match="expected the states of the clients in"):
        swept(ditto, tmp_path / "again", earlier)

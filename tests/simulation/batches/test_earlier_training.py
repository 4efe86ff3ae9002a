"""Finished runs whose training a sweep takes over."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import knnper.simulation.batches.family as family_runs
from knnper.errors import CheckpointError, RunError
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.folder import Inputs, keep_inputs, sign
from knnper.simulation.batches.plan import Sweep
from knnper.simulation.batches.runner import Outcome, run_batch
from knnper.simulation.batches.tables import run_rows
from knnper.simulation.run import simulate
from knnper.simulation.workbench import open_workbench
from tests.simulation.batches.small_sweep import ignore, read, rounds


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
    sweep: Sweep, earlier: Path, tmp_path: Path, made: list[tuple[Path, int]]
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
    earlier: Path, tmp_path: Path, made: list[tuple[Path, int]]
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
    made: list[tuple[Path, int]],
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


def test_states_of_clients_are_taken_over_and_missed(
    tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
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

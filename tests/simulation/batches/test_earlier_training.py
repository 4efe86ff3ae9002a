"""Finished runs whose training a sweep takes over."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import knnper.simulation.batches.family as family_runs
from knnper.errors import CheckpointError, RunError
from knnper.server.observer import SilentObserver
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.folder import Inputs, keep_inputs, sign
from knnper.simulation.batches.plan import Sweep
from knnper.simulation.batches.runner import Outcome, run_batch
from knnper.simulation.batches.tables import run_rows
from knnper.simulation.run import simulate
from knnper.simulation.workbench import open_workbench
from tests.simulation.batches.small_sweep import NEIGHBORS, ignore, read, rounds


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
    simulate(bench, folder, SilentObserver(), ["knnper", "simulate"])
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


def test_others_of_the_sweep_are_trained(
    earlier: Path, tmp_path: Path, made: list[tuple[Path, int]]
) -> None:
    swept(read(tmp_path, seeds=[1, 2]), tmp_path / "out", earlier)
    assert rounds(made) == [2, 2, 0, 2]


def test_a_run_that_was_trained_otherwise_is_refused(
    earlier: Path, tmp_path: Path
) -> None:
    rate = "training.learning_rate"
    other = read(tmp_path, seeds=[1, 2], set={rate: 0.2})
    message = (
        r"earlier was trained otherwise than all that is asked for: "
        r"training.learning_rate: found 0.1, expected 0.2\. Make the settings equal, "
        r"or leave the run away"
    )
    with pytest.raises(RunError, match=message):
        swept(other, tmp_path / "out", earlier)
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_not_done_is_refused(
    sweep: Sweep, earlier: Path, tmp_path: Path
) -> None:
    (earlier / "results.json").unlink()
    message = "is not done, expected a finished one; .* knnper simulate --resume"
    with pytest.raises(RunError, match=message):
        swept(sweep, tmp_path / "out", earlier)


def test_a_run_that_lost_its_state_is_refused(
    sweep: Sweep, earlier: Path, tmp_path: Path
) -> None:
    (earlier / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"checkpoint of round 2 in .*, found none"):
        swept(sweep, tmp_path / "out", earlier)
    assert not (tmp_path / "out").exists()


def test_a_damaged_state_is_refused(
    sweep: Sweep, earlier: Path, tmp_path: Path
) -> None:
    for path in earlier.glob("checkpoints/*/state.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="none of the checkpoints in"):
        swept(sweep, tmp_path / "out", earlier)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_run_is_refused(sweep: Sweep, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nowhere holds no run"):
        swept(sweep, tmp_path / "out", tmp_path / "nowhere")


def test_another_split_of_the_data_is_refused(
    sweep: Sweep, earlier: Path, tmp_path: Path
) -> None:
    results = earlier / "results.json"
    split = RunFolder(earlier).results()["manifest"]["partition_hash"]
    results.write_text(results.read_text().replace(split, "0" * 64))
    with pytest.raises(RunError, match="the data is not what it was in the run in"):
        swept(sweep, tmp_path / "out", earlier)


def test_any_value_of_k_takes_it_over(earlier: Path, tmp_path: Path) -> None:
    (outcome,) = swept(
        read(tmp_path, seeds=[1], vary={NEIGHBORS: [3]}), tmp_path / "out", earlier
    )
    states = {
        RunFolder(run).results()["training"]["state_sha256"]
        for run in (earlier, outcome.runs[1])
    }
    assert len(states) == 1


def test_another_seed_is_called_as_a_sweep_calls_it(
    earlier: Path, tmp_path: Path
) -> None:
    other = read(tmp_path, seeds=[2, 3])
    with pytest.raises(RunError, match="asked for: seeds: found 1, expected 2"):
        swept(other, tmp_path / "out", earlier)


def test_other_data_is_refused(sweep: Sweep, earlier: Path, tmp_path: Path) -> None:
    keep_inputs(earlier, Inputs(data="0" * 64, weights=None))
    message = "the data set is not what it was .* or leave the run away to train anew"
    with pytest.raises(RunError, match=message):
        swept(sweep, tmp_path / "out", earlier)


def test_two_runs_of_one_training_are_refused(
    sweep: Sweep, earlier: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(earlier, tmp_path / "copy")
    message = "earlier and .*copy were trained the same, expected one of each training"
    with pytest.raises(RunError, match=message):
        swept(sweep, tmp_path / "out", earlier, copy)


def test_where_all_is_made_the_run_may_be_gone(
    sweep: Sweep, earlier: Path, tmp_path: Path
) -> None:
    first = swept(sweep, tmp_path / "out", earlier)
    shutil.rmtree(earlier)
    assert figures(swept(sweep, tmp_path / "out", earlier)) == figures(first)


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


class TestStatesOfClients:
    """A method whose clients keep models of their own."""

    @pytest.fixture
    def ditto(self, tmp_path: Path) -> Sweep:
        settings = {"method.name": "ditto", "run.checkpoint_every": 1}
        return read(tmp_path, seeds=[1], vary={}, set=settings)

    def test_they_are_taken_over(
        self, ditto: Sweep, tmp_path: Path, made: list[tuple[Path, int]]
    ) -> None:
        expected = figures(swept(ditto, tmp_path / "anew"))
        earlier = trained(ditto, tmp_path)
        made.clear()
        assert figures(swept(ditto, tmp_path / "out", earlier)) == expected
        assert rounds(made) == [2]

    def test_without_them_the_run_is_refused(
        self, ditto: Sweep, tmp_path: Path
    ) -> None:
        earlier = trained(ditto, tmp_path)
        shutil.rmtree(earlier / "clients")
        with pytest.raises(RunError, match="expected the states of the clients in"):
            swept(ditto, tmp_path / "out", earlier)

"""A sweep's folder: other sweeps stay out, and nothing in it is out of date."""

from pathlib import Path

import pytest

from knnper.errors import FolderTakenError, RunError
from knnper.simulation.batches.plan import Sweep
from knnper.simulation.batches.tables import estimated, run_sweep, write_sweep
from knnper.simulation.reports.tables import Shown
from tests.simulation.sweep.small_sweep import NEIGHBORS, in_this_process, read

RATE = "training.learning_rate"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "knnper.simulation.batches.tables.play_side_by_side"
    monkeypatch.setattr(where, in_this_process)


def ignore(progress: object) -> None:
    """Want to know nothing of how a sweep gets on."""


def play(sweep: Sweep, folder: Path) -> Shown:
    outcomes = run_sweep(sweep, folder, 1, ignore)
    return write_sweep(sweep, outcomes, estimated(outcomes), folder)


def outputs(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_what_a_sweep_writes_no_more_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    tuned = {"evaluate_on": "validation", "seeds": [1]}
    play(read(tmp_path, x=NEIGHBORS, **tuned), folder)
    tables = {"runs", "points.csv", "table.csv", "table.md"}
    plots = {"plot.svg", "plot.pdf", "plot.png"}
    assert outputs(folder) == tables | plots | {"chosen.yaml"}
    (folder / "plot.py").write_text("mine")
    play(read(tmp_path, seeds=[1]), folder)
    assert outputs(folder) == tables | {"plot.py"}


def test_without_a_point_to_choose_no_choice_stays(tmp_path: Path) -> None:
    folder, tuned = tmp_path / "out", {"evaluate_on": "validation", "seeds": [1]}
    play(read(tmp_path, vary={RATE: [0.1]}, **tuned), folder)
    assert (folder / "chosen.yaml").is_file()
    with pytest.raises(RunError, match="no point of the variant"):
        play(read(tmp_path, vary={RATE: [1e30]}, **tuned), folder)
    assert not (folder / "chosen.yaml").exists()


def test_another_sweep_needs_another_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    play(read(tmp_path, seeds=[1]), folder)
    table = (folder / "table.csv").read_bytes()
    with pytest.raises(FolderTakenError, match="holds the sweep small, expected the"):
        play(read(tmp_path, "name=other", seeds=[1]), folder)
    assert (folder / "table.csv").read_bytes() == table


def test_a_table_of_ones_own_is_not_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "table.csv").write_text("mine")
    with pytest.raises(FolderTakenError, match="is not empty and holds no runs of a"):
        play(read(tmp_path, seeds=[1]), folder)
    assert outputs(folder) == {"table.csv"}
    assert (folder / "table.csv").read_text() == "mine"

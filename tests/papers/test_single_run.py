"""A run keeps the number of threads that ``auto`` meant when it began."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import knnper.process as machine
import papers.reproduce as single_run
from knnper.errors import FolderTakenError
from knnper.experiment import Experiment
from knnper.loading import load_experiment
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.workbench import Workbench, experiment_catalogue
from papers.reproduce import make_run
from tests.papers.small_files import BASE


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows by the threads of each run that is interrupted."""
    found: list[object] = []

    def interrupted(bench: Workbench, *_: Any) -> None:
        found.append(bench.experiment.run.threads_per_worker)
        raise KeyboardInterrupt

    monkeypatch.setattr(single_run, "simulate", interrupted)
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    return found


def experiment(threads: int | str) -> Experiment:
    run = {"engine": "serial", "threads_per_worker": threads}
    return load_experiment({**BASE, "run": run}, experiment_catalogue())


def interrupt(settings: Experiment, folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_run(settings, folder, Observer())


def test_another_machine_goes_on_with_the_first_ones_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: list[object]
) -> None:
    for cores in (4, 2):
        monkeypatch.setattr(machine, "usable_cores", lambda cores=cores: cores)
        interrupt(experiment("auto"), tmp_path / "run")
    assert threads == [4, 4]
    begun = RunFolder(tmp_path / "run").experiment(experiment_catalogue())
    assert begun.run.threads_per_worker == 4


def test_the_number_of_workers_makes_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: list[object]
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    settings = experiment("auto")
    for num_workers in (1, 2):
        run = replace(settings.run, engine="flower", num_workers=num_workers)
        interrupt(replace(settings, run=run), tmp_path / "run")
    assert threads == [4, 4]


def test_a_number_that_was_edited_is_another_run(
    tmp_path: Path, threads: list[object]
) -> None:
    interrupt(experiment(1), tmp_path / "run")
    with pytest.raises(FolderTakenError, match="holds a run with other settings"):
        make_run(experiment(2), tmp_path / "run", Observer())

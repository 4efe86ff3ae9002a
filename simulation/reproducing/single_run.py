"""One run in a folder of its own, made once."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from knnper.config.document import results_identity
from knnper.config.errors import FolderTakenError
from knnper.config.sections import Experiment
from knnper.machine import with_fixed_threads
from server.observer import Observer
from server.run_folder import RunFolder
from server.run_marks import EXPERIMENT
from simulation.batch.code import sign
from simulation.batch.inputs import inputs_of, keep_inputs, require_inputs
from simulation.catalogue import experiment_catalogue
from simulation.runner import simulate
from simulation.workbench import open_workbench

COMMAND = ("knnper", "reproduce")


def make_run(
    experiment: Experiment,
    path: Path,
    observer: Observer,
    command: Sequence[str] = COMMAND,
) -> RunFolder:
    """Return the folder of a finished run; made, or gone on with, where it is not.

    Parameters
    ----------
    experiment
        What to run. Where ``auto`` stands for a number of threads, it is that with
        which the run began, here or on another machine.
    path
        The folder.
    observer
        Is told of every step.
    command
        What to type to have it, for the run's manifest.

    Raises
    ------
    FolderTakenError, RunError
        If the folder holds something else, a run of another experiment or one that was
        made from other data, or the run cannot go on.
    DataError
        If the data cannot be loaded.
    """
    inputs = inputs_of(experiment)
    require_inputs(path, inputs)
    folder, settings = _taken_up(path, experiment)
    if folder.is_finished():
        return folder
    keep_inputs(path, inputs)
    sign(path)
    simulate(open_workbench(settings), folder, observer, command)
    return folder


def _taken_up(path: Path, experiment: Experiment) -> tuple[RunFolder, Experiment]:
    """Return the run's folder, and the experiment with the threads it began with."""
    if not (path / EXPERIMENT).is_file():
        settings = with_fixed_threads(experiment)
        return RunFolder.create(path, settings), settings
    folder = RunFolder.open(path)
    found = folder.experiment(experiment_catalogue())
    settings = _with_threads_of(found, experiment)
    if results_identity(found) != results_identity(settings):
        raise FolderTakenError(
            f"{path} holds a run with other settings; delete it to run the file as it "
            "is now, or choose another folder with --output"
        )
    return folder, settings


def _with_threads_of(begun: Experiment, experiment: Experiment) -> Experiment:
    if experiment.run.threads_per_worker != "auto":
        return experiment
    threads = begun.run.threads_per_worker
    return replace(experiment, run=replace(experiment.run, threads_per_worker=threads))

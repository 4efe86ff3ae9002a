"""One run in a folder of its own, made once."""

from pathlib import Path

from knnper.config.document import results_identity
from knnper.config.errors import FolderTakenError
from knnper.config.sections import Experiment
from server.observer import Observer
from server.run_folder import RunFolder
from server.run_marks import EXPERIMENT
from simulation.batch.code import sign
from simulation.batch.inputs import inputs_of, keep_inputs, require_inputs
from simulation.catalogue import experiment_catalogue
from simulation.runner import simulate
from simulation.workbench import open_workbench

COMMAND = ("knnper", "reproduce")


def make_run(experiment: Experiment, path: Path, observer: Observer) -> RunFolder:
    """Return the folder of a finished run; made, or gone on with, where it is not.

    Parameters
    ----------
    experiment
        What to run, with a fixed number of threads.
    path
        The folder.
    observer
        Is told of every step.

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
    folder = _taken_up(path, experiment)
    if folder.is_finished():
        return folder
    keep_inputs(path, inputs)
    sign(path)
    simulate(open_workbench(experiment), folder, observer, COMMAND)
    return folder


def _taken_up(path: Path, experiment: Experiment) -> RunFolder:
    if not (path / EXPERIMENT).is_file():
        return RunFolder.create(path, experiment)
    folder = RunFolder.open(path)
    found = folder.experiment(experiment_catalogue())
    if results_identity(found) != results_identity(experiment):
        raise FolderTakenError(
            f"{path} holds a run with other settings; delete it to run the file as it "
            "is now, or choose another folder with --output"
        )
    return folder

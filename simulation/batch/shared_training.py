"""A training that several runs have in common, and who takes it over."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from knnper.config.document import results_identity
from knnper.config.errors import CheckpointError, RunError
from knnper.config.sections import Choice, Experiment, Settings
from server.checkpoint import CheckpointFolder
from server.run_folder import RunFolder
from simulation.batch.code import sign_as
from simulation.batch.inputs import inputs_of, require_inputs
from simulation.partition.settings import PartitionSettings
from simulation.trained_model import ended_run
from simulation.workbench import Workbench
from strategies.catalogue import METHODS
from strategies.core.method import AS_IT_IS, NoSettings
from strategies.core.records import NoState, Record

CLIENTS = "clients"
"""In a run's folder: the clients' states, for methods that have any."""


@dataclass(frozen=True)
class Training:
    """Where the last state of a training is.

    Attributes
    ----------
    state_type
        Its type.
    folder
        Of the run that made it.
    identity
        The fingerprint of its experiment, as the checkpoint has it.
    """

    state_type: type[Record]
    folder: RunFolder
    identity: str


def training_identity(experiment: Experiment) -> str:
    """Return what two experiments have in common that train the same."""
    return results_identity(as_trained(experiment))


def as_trained(experiment: Experiment) -> Experiment:
    """Return one experiment for all that train as this one does.

    They may differ in what is put on top of the method alone, in the name that the
    method has with it, and in how much data the clients have that never train.
    """
    build = METHODS[experiment.method.name].build
    name = next(name for name, spec in METHODS.items() if spec.build is build)
    return replace(
        experiment,
        partition=_as_trained_on(experiment.partition),
        method=replace(experiment.method, name=name),
        personalization=Choice(AS_IT_IS, NoSettings()),
    )


def _as_trained_on(partition: Choice[Settings]) -> Choice[Settings]:
    settings = partition.settings
    if not isinstance(settings, PartitionSettings):
        return partition
    return replace(partition, settings=replace(settings, unseen_train_fraction=1.0))


def training_in(run: Path) -> Training:
    """Return the training of a finished run, which must have its last state still.

    Raises
    ------
    RunError
        If it has not, or its data is not what it was, as far as the run tells.
    CheckpointError
        If the state cannot be read.
    DataError
        If the data cannot be loaded.
    """
    ended = ended_run(run)
    now = inputs_of(ended.experiment)
    require_inputs(run, now, "leave the run away to train anew")
    keeps_states = ended.bench.method.client_state_type is not NoState
    if keeps_states and not (run / CLIENTS).is_dir():
        raise RunError(
            f"expected the states of the clients in {run / CLIENTS}, found none; bring "
            "them back, or leave the run away to train anew"
        )
    return Training(ended.bench.method.state_type, ended.folder, ended.identity)


def take_over(bench: Workbench, folder: RunFolder, training: Training) -> None:
    """Put another run's last state where this one goes on from it.

    Where it cannot be read any more, the rounds are made anew.
    """
    others = training.folder
    theirs = CheckpointFolder(others.checkpoints, training.identity)
    try:
        last = theirs.load_latest(training.state_type)
    except CheckpointError:
        return
    if last is None or last.server_round != bench.method.num_rounds:
        return
    if (others.path / CLIENTS).is_dir():
        shutil.copytree(
            others.path / CLIENTS, folder.path / CLIENTS, dirs_exist_ok=True
        )
    folder.drop_rounds_after(0)
    for record in others.rounds():
        folder.append_round(record)
    ours = CheckpointFolder(folder.checkpoints, results_identity(bench.experiment))
    ours.save(last.server_round, last.state, last.history)
    sign_as(folder.path, others.path)

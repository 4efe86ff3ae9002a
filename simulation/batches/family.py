"""Families: runs with the same training, which one process makes in turn."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from typing_extensions import override

from knnper.errors import CheckpointError, RunError
from knnper.experiment import Experiment
from knnper.experiment_file import from_json, results_identity
from knnper.files import write_atomically
from knnper.server.checkpoints import CheckpointFolder
from knnper.server.distribution import DistributionError
from knnper.server.explosion import ExplodedError
from knnper.server.observer import Observer
from knnper.server.rounds import TooManyFailuresError
from knnper.server.run_folder import RunFolder
from knnper.settings import Choice
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.continuation import copy_training
from knnper.simulation.engines import simulate
from knnper.simulation.origin import (
    Inputs,
    inputs_of,
    is_of_this_code,
    keep_inputs,
    require_inputs,
    sign,
    sign_as,
)
from knnper.simulation.partition.settings import PartitionSettings
from knnper.simulation.partition.split import fingerprint
from knnper.simulation.trained_model import ended_run
from knnper.simulation.workbench import CLIENTS, Workbench, open_workbench
from knnper.strategies.catalogue import trained_as
from knnper.strategies.core.embedding_pool import EmbeddingPool, KeptEmbeddings
from knnper.strategies.core.method import AS_IT_IS, NoSettings
from knnper.strategies.core.records import NoState, Record

FAILED = "failed.txt"  # in a run's folder: the reason why it has no results


class RunStage(Enum):
    """A stage of a run."""

    TRAINS = auto()
    """Training of ``num_rounds`` rounds starts or resumes with ``first_round``."""
    ROUND = auto()
    """A round ended."""
    ENDED = auto()
    """The run has results, or has failed."""


@dataclass(frozen=True)
class Event:
    """A stage of a run."""

    stage: RunStage
    num_rounds: int = 0
    first_round: int = 0


SendEvent = Callable[[Event], None]


class EventObserver(Observer):
    """Sends an event for each step of a training."""

    def __init__(self, send: SendEvent) -> None:
        self._send = send

    @override
    def training_started(self, num_rounds: int, first_round: int) -> None:
        self._send(Event(RunStage.TRAINS, num_rounds, first_round))

    @override
    def round_finished(self, record: Mapping[str, float | int]) -> None:
        self._send(Event(RunStage.ROUND))


@dataclass(frozen=True)
class Family:
    """Runs with the same training.

    Attributes
    ----------
    runs
        The experiments by the run's folder, as `to_json` writes them.
    num_rounds
        The configured number; a method may make fewer.
    command
        The command for the runs' manifests.
    keeps_training
        Whether one run keeps its last state, so that a run that is added later need
        not be trained. Not if clients have states of their own.
    earlier
        A finished run with the same training, which the family reuses.
    """

    runs: Mapping[Path, str]
    num_rounds: int
    command: tuple[str, ...]
    keeps_training: bool = False
    earlier: Path | None = None

    @property
    def experiments(self) -> list[Experiment]:
        """The experiments of its runs, in their order."""
        return [read_json(text) for text in self.runs.values()]

    @property
    def is_done(self) -> bool:
        """Whether all its runs ended."""
        return all(map(is_done, self.runs))


def read_json(text: str) -> Experiment:
    """Return the experiment that `to_json` wrote."""
    return from_json(text, experiment_catalogue())


def training_identity(experiment: Experiment) -> str:
    """Return a fingerprint that is equal for experiments with the same training."""
    return results_identity(as_trained(experiment))


def as_trained(experiment: Experiment) -> Experiment:
    """Return an experiment without the settings that do not change its training.

    These are the personaliser, the name of the method with it, the metrics, and how
    much data unseen clients have.
    """
    partition = experiment.partition
    if isinstance(partition.settings, PartitionSettings):
        settings = replace(partition.settings, unseen_train_fraction=1.0)
        partition = replace(partition, settings=settings)
    method_name = trained_as(experiment.method.name)
    return replace(
        experiment,
        partition=partition,
        method=replace(experiment.method, name=method_name),
        personalization=Choice(AS_IT_IS, NoSettings()),
        run=replace(experiment.run, metrics=()),
    )


def is_done(folder: Path) -> bool:
    """Return whether a run ended: with results, or by failing with this code."""
    # A failure with other code may be that code's fault.
    if (folder / FAILED).is_file():
        return is_of_this_code(folder)
    return RunFolder(folder).is_finished()


def why_failed(folder: Path) -> str | None:
    """Return why a run that ended has no results; None where it has."""
    path = folder / FAILED
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


@dataclass(frozen=True)
class Training:
    """The last state of a training: its type, its run and the run's fingerprint."""

    state_type: type[Record]
    folder: RunFolder
    identity: str


def load_training(run: Path) -> Training:
    """Return the training of a finished run.

    Raises RunError if the run has lost its last state or its clients' states, or if its
    data has changed.
    """
    ended = ended_run(run)
    inputs = inputs_of(ended.experiment)
    require_inputs(run, inputs, "leave the run away to train again")
    has_client_states = ended.bench.method.client_state_type is not NoState
    if has_client_states and not (run / CLIENTS).is_dir():
        raise RunError(
            f"expected the states of the clients in {run / CLIENTS}, found none; bring "
            "them back, or leave the run away to train again"
        )
    return Training(ended.bench.method.state_type, ended.folder, ended.identity)


def make_runs(family: Family, send: SendEvent) -> None:
    """Make the missing runs of a family and send their events.

    The runs share one training and, where one model embeds, their embeddings.
    """
    runner = _FamilyRunner(family, send)
    for folder, text in family.runs.items():
        is_missing = not is_done(folder)
        runner.make(folder, read_json(text))
        if is_missing:
            send(Event(RunStage.ENDED))
        if folder not in runner.folders_with_state():
            _remove_states(folder)
    for folder in runner.folders_with_state():
        # The models of all clients would take gigabytes.
        if not family.keeps_training or (folder / CLIENTS).is_dir():
            _remove_states(folder)


class _FamilyRunner:
    """Makes the runs of a family.

    Trainings are known by the type of the server's state: methods of a family may add
    to the state of the method that they train as.
    """

    def __init__(self, family: Family, send: SendEvent) -> None:
        self._command: Sequence[str] = family.command
        self._send = send
        self._pool = EmbeddingPool(KeptEmbeddings() if len(family.runs) > 1 else None)
        self._earlier = load_training(family.earlier) if family.earlier else None
        self._trained: dict[type[Record], Training] = {}
        self._diverged: dict[type[Record], tuple[str, Path]] = {}
        self._inputs: Inputs | None = None

    def make(self, path: Path, experiment: Experiment) -> None:
        """Make a run unless it is done."""
        bench = open_workbench(experiment, pool=self._pool)
        # The runs of a family have all inputs but the split in common.
        self._inputs = self._inputs or inputs_of(bench.experiment)
        inputs = replace(self._inputs, split=fingerprint(bench.partition))
        require_inputs(path, inputs)
        if is_done(path):
            self._remember(bench, RunFolder(path))
            return
        folder = _prepare_folder(path, bench.experiment)
        keep_inputs(folder.path, inputs)
        try:
            self._run(bench, folder)
        # A learning rate may be too large: that is a result, and the other runs go on.
        except (TooManyFailuresError, ExplodedError, DistributionError) as error:
            write_atomically(folder.path / FAILED, f"{error}\n")
        self._remember(bench, folder)

    def folders_with_state(self) -> set[Path]:
        """Return the folders of one run for each type of state."""
        return {training.folder.path for training in self._trained.values()}

    def _run(self, bench: Workbench, folder: RunFolder) -> None:
        state_type = bench.method.state_type
        if state_type in self._diverged:  # this run would diverge in the same way
            reason, origin = self._diverged[state_type]
            sign_as(folder.path, origin)
            raise TooManyFailuresError(reason)
        training = self._trained.get(state_type, self._earlier)
        if training is not None and training.state_type is state_type:
            _reuse_training(bench, folder, training)
        sign(folder.path)
        simulate(bench, folder, EventObserver(self._send), self._command)

    def _remember(self, bench: Workbench, folder: RunFolder) -> None:
        """Remember the training of a run that ended, or why it diverged."""
        state_type = bench.method.state_type
        reason = why_failed(folder.path)
        # A run with all rounds failed in its personalisation.
        if reason and len(folder.rounds()) < bench.method.num_rounds:
            self._diverged.setdefault(state_type, (reason, folder.path))
        elif folder.checkpoints.is_dir():
            identity = results_identity(bench.experiment)
            training = Training(state_type, folder, identity)
            self._trained.setdefault(state_type, training)


def _reuse_training(bench: Workbench, folder: RunFolder, training: Training) -> None:
    """Copy another run's last state, so that this run resumes from it."""
    source = training.folder
    checkpoints = CheckpointFolder(source.checkpoints, training.identity)
    try:
        last = checkpoints.load_latest(training.state_type)
    except CheckpointError:
        return  # a damaged checkpoint: train again
    if last is None or last.server_round != bench.method.num_rounds:
        return
    copy_training(source, last, folder, results_identity(bench.experiment))
    sign_as(folder.path, source.path)


def _prepare_folder(path: Path, experiment: Experiment) -> RunFolder:
    """Return the run's folder, to resume or, after a failure, to begin again."""
    if (path / FAILED).is_file():
        # Renamed first: a folder that is deleted in part must not count as a run.
        discarded = path.with_name(f".{path.name}.discarded")
        shutil.rmtree(discarded, ignore_errors=True)
        path.rename(discarded)
        shutil.rmtree(discarded)
    if not (path / "experiment.yaml").is_file():
        return RunFolder.create(path, experiment)
    return RunFolder.open(path)


def _remove_states(folder: Path) -> None:
    """Remove the files of a run that ended that only a resumed run needs."""
    if is_done(folder):
        for name in ("checkpoints", CLIENTS, "tensorboard"):
            shutil.rmtree(folder / name, ignore_errors=True)

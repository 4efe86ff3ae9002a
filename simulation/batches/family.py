"""Runs that train the same: made by one process, what they share once."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from knnper.errors import CheckpointError, RunError
from knnper.experiment import Choice, Experiment, from_json, results_identity
from knnper.files import write_atomically
from knnper.server.checkpoints import CheckpointFolder
from knnper.server.distribution import DistributionError
from knnper.server.explosion import ExplodedError
from knnper.server.observer import Observer
from knnper.server.rounds import TooManyFailuresError
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.continuation import CLIENTS, copy_training
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
from knnper.simulation.partition.schemes import PartitionSettings
from knnper.simulation.partition.split import fingerprint
from knnper.simulation.trained_model import ended_run
from knnper.simulation.workbench import Workbench, open_workbench
from knnper.strategies.catalogue import trained_as
from knnper.strategies.core.method import AS_IT_IS, NoSettings
from knnper.strategies.core.records import NoState, Record
from knnper.strategies.core.task import EmbeddingPool, KeptEmbeddings

FAILED = "failed.txt"  # in a run's folder: why it ended without results


class Step(Enum):
    """What happened to a run."""

    BEGAN = auto()
    """A run of a family began; ``count`` is its place among the family's."""
    TRAINS = auto()
    """Training of so many rounds goes on, ``first`` of them the next."""
    ROUND = auto()
    """A round was made."""
    ENDED = auto()
    """The run has results, or has failed."""


@dataclass(frozen=True)
class Event:
    """A step of a run, in seconds of a clock that all processes of a machine share."""

    step: Step
    at: float
    count: int = 0
    first: int = 0


Tell = Callable[[Event], None]


class TellingObserver(Observer):
    """Tells the steps of a run."""

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock

    def training_started(self, num_rounds: int, first_round: int) -> None:
        """Tell which rounds there are."""
        self._tell(Event(Step.TRAINS, self._clock(), num_rounds, first_round))

    def round_finished(self, record: Mapping[str, float | int]) -> None:  # noqa: ARG002 - an observer's
        """Tell that there is one more."""
        self._tell(Event(Step.ROUND, self._clock()))


@dataclass(frozen=True)
class Family:
    """Runs that train the same."""

    runs: Mapping[Path, str]  # by the run's folder, its experiment as `to_json` has it
    num_rounds: int  # that the experiments ask for; a method may make fewer
    command: tuple[str, ...]  # what made them, for their manifests
    # Whether one keeps its last state in the end, so that another that is added later
    # need not be trained. Not so where clients have states too.
    keeps_training: bool = False
    earlier: Path | None = None  # a finished run, whose training they take over

    @property
    def experiments(self) -> list[Experiment]:
        """What its runs run, in their order."""
        return [read_json(text) for text in self.runs.values()]

    @property
    def is_made(self) -> bool:
        """Whether all its runs ended."""
        return all(map(is_done, self.runs))


def read_json(text: str) -> Experiment:
    """Return the experiment that `to_json` wrote."""
    return from_json(text, experiment_catalogue())


def training_identity(experiment: Experiment) -> str:
    """Return what two experiments have in common that train the same."""
    return results_identity(as_trained(experiment))


def as_trained(experiment: Experiment) -> Experiment:
    """Return one experiment for all that train as this one does."""
    # What is put on top may differ, the name that the method has with it, how much data
    # the clients have that never train, and what is measured.
    name = trained_as(experiment.method.name)
    partition = experiment.partition
    if isinstance(partition.settings, PartitionSettings):
        settings = replace(partition.settings, unseen_train_fraction=1.0)
        partition = replace(partition, settings=settings)
    return replace(
        experiment,
        partition=partition,
        method=replace(experiment.method, name=name),
        personalization=Choice(AS_IT_IS, NoSettings()),
        run=replace(experiment.run, metrics=()),
    )


def is_done(folder: Path) -> bool:
    """Return whether a run ended: with results, or by failing with this code."""
    # Of other code: the fault may have been that code's.
    if (folder / FAILED).is_file():
        return is_of_this_code(folder)
    return RunFolder(folder).is_finished()


def why_failed(folder: Path) -> str | None:
    """Return why a run that ended has no results; None where it has."""
    path = folder / FAILED
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


@dataclass(frozen=True)
class Training:
    """Where the last state of a training is: its type, its run and the fingerprint."""

    state_type: type[Record]
    folder: RunFolder
    identity: str


def training_in(run: Path) -> Training:
    """Return the training of a finished run, which must have its last state still."""
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


def make_runs(family: Family, tell: Tell) -> None:
    """Make the runs that are missing, each step told; what they share is made once."""
    maker = _Maker(family, tell)
    for place, (folder, text) in enumerate(family.runs.items()):
        is_new = not is_done(folder)
        if is_new:
            tell(Event(Step.BEGAN, time.monotonic(), place))
        maker.make(folder, read_json(text))
        if is_new:
            tell(Event(Step.ENDED, time.monotonic()))
        if folder not in maker.with_state():
            _tidy(folder)
    for folder in maker.with_state():
        # Models of all clients would take gigabytes.
        if not family.keeps_training or (folder / CLIENTS).is_dir():
            _tidy(folder)


class _Maker:
    """Makes runs of one training; knows of it by the type of its state."""

    def __init__(self, family: Family, tell: Tell) -> None:
        self._command: Sequence[str] = family.command
        self._tell = tell
        self._pool = EmbeddingPool(KeptEmbeddings() if len(family.runs) > 1 else None)
        self._earlier = training_in(family.earlier) if family.earlier else None
        self._trained: dict[type[Record], Training] = {}
        self._diverged: dict[type[Record], tuple[str, Path]] = {}
        self._inputs: Inputs | None = None

    def make(self, path: Path, experiment: Experiment) -> None:
        """Make a run, unless it is there."""
        bench = open_workbench(experiment, pool=self._pool)
        # Runs that train the same have all but the split in common.
        self._inputs = self._inputs or inputs_of(bench.experiment)
        inputs = replace(self._inputs, split=fingerprint(bench.partition))
        require_inputs(path, inputs)
        if is_done(path):
            self._recall(bench, RunFolder(path))
            return
        folder = _folder(path, bench.experiment)
        keep_inputs(folder.path, inputs)
        try:
            self._run(bench, folder)
        # A rate too large, say: that is a finding, and the others go on.
        except (TooManyFailuresError, ExplodedError, DistributionError) as error:
            write_atomically(folder.path / FAILED, f"{error}\n")
        self._recall(bench, folder)

    def with_state(self) -> set[Path]:
        """Return the folders of one run for each type of state, which have it."""
        return {training.folder.path for training in self._trained.values()}

    def _run(self, bench: Workbench, folder: RunFolder) -> None:
        kind = bench.method.state_type
        if kind in self._diverged:  # and would again
            reason, origin = self._diverged[kind]
            sign_as(folder.path, origin)
            raise TooManyFailuresError(reason)
        training = self._trained.get(kind, self._earlier)
        if training is not None and training.state_type is kind:
            _take_over(bench, folder, training)
        sign(folder.path)
        simulate(bench, folder, TellingObserver(self._tell), self._command)

    def _recall(self, bench: Workbench, folder: RunFolder) -> None:
        """Remember how the training of a run that ended went."""
        kind, reason = bench.method.state_type, why_failed(folder.path)
        # Personalisation fails after the last round.
        if reason and len(folder.rounds()) < bench.method.num_rounds:
            self._diverged.setdefault(kind, (reason, folder.path))
        elif folder.checkpoints.is_dir():
            identity = results_identity(bench.experiment)
            self._trained.setdefault(kind, Training(kind, folder, identity))


def _take_over(bench: Workbench, folder: RunFolder, training: Training) -> None:
    """Put another run's last state where this one resumes from it."""
    others = training.folder
    theirs = CheckpointFolder(others.checkpoints, training.identity)
    try:  # what cannot be read any more is trained anew
        last = theirs.load_latest(training.state_type)
    except CheckpointError:
        return
    if last is None or last.server_round != bench.method.num_rounds:
        return
    copy_training(others, last, folder, results_identity(bench.experiment))
    sign_as(folder.path, others.path)


def _folder(path: Path, experiment: Experiment) -> RunFolder:
    """Return the run's folder, with what was left there; a failure begins anew."""
    if (path / FAILED).is_file():
        # One that is deleted in part alone is no run's any more.
        discarded = path.with_name(f".{path.name}.discarded")
        shutil.rmtree(discarded, ignore_errors=True)
        path.rename(discarded)
        shutil.rmtree(discarded)
    if not (path / "experiment.yaml").is_file():
        return RunFolder.create(path, experiment)
    return RunFolder.open(path)


def _tidy(folder: Path) -> None:
    """Remove what only a run that goes on needs."""
    if is_done(folder):
        for name in ("checkpoints", CLIENTS, "tensorboard"):
            shutil.rmtree(folder / name, ignore_errors=True)

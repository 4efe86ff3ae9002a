"""Runs that share their training, made one after the other."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from knnper.config.document import from_json, results_identity, to_json
from knnper.config.sections import Experiment
from knnper.durable_files import write_atomically
from server.explosion import ExplodedError
from server.hand_over import HandOverError
from server.rounds import TooManyFailuresError
from server.run_folder import RunFolder
from simulation.batch.code import is_of_this_code, sign, sign_as
from simulation.batch.events import Event, Step, Tell, TellingObserver, nobody
from simulation.batch.inputs import Inputs, inputs_of, keep_inputs, require_inputs
from simulation.batch.shared_training import Training, take_over, training_in
from simulation.catalogue import experiment_catalogue
from simulation.partition.split import fingerprint
from simulation.runner import simulate
from simulation.workbench import Workbench, open_workbench
from strategies.core.embedding_pool import EmbeddingPool, KeptEmbeddings
from strategies.core.records import Record

FAILED = "failed.txt"
"""In a run's folder: why it ended without results."""


@dataclass(frozen=True)
class Order:
    """One run.

    Attributes
    ----------
    experiment
        As `to_json` writes it.
    folder
        Where to.
    """

    experiment: str
    folder: Path

    @classmethod
    def of(cls, experiment: Experiment, folder: Path) -> "Order":
        """Return the order to run ``experiment`` in ``folder``."""
        return cls(to_json(experiment), folder)


@dataclass(frozen=True)
class Family:
    """Runs that train the same.

    Attributes
    ----------
    orders
        The runs, of one `training_identity`.
    num_rounds
        That the experiments ask for; a method may make fewer.
    command
        What made them, for their manifests.
    keeps_training
        Whether one of them keeps its last state in the end, so that another that is
        added to the family later need not be trained. Not so where clients have states
        too.
    earlier
        A finished run elsewhere, whose training they take over.
    """

    orders: tuple[Order, ...]
    num_rounds: int
    command: tuple[str, ...]
    keeps_training: bool = False
    earlier: Path | None = None


def is_done(folder: Path) -> bool:
    """Return whether a run ended: with results, or by failing with this code.

    What failed with other code is made again, since the fault may have been that
    code's.
    """
    if (folder / FAILED).is_file():
        return is_of_this_code(folder)
    return RunFolder(folder).is_finished()


def why_failed(folder: Path) -> str | None:
    """Return why a run that ended has no results; None where it has."""
    path = folder / FAILED
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def play(family: Family, tell: Tell = nobody) -> None:
    """Make the runs that are missing; what they share is computed once.

    That is the rounds, and the images as the trained model embeds them.

    Parameters
    ----------
    family
        The runs.
    tell
        Is told each step.

    Raises
    ------
    KnnPerError
        If a run cannot be made. One whose clients fail, as they do where a rate is too
        large, is a finding: the reason stays in its folder, and the others go on.
    """
    player = _Player(
        family.command, family.earlier, tell, keeps_embeddings=len(family.orders) > 1
    )
    for place, order in enumerate(family.orders):
        is_new = not is_done(order.folder)
        if is_new:
            tell(Event(Step.BEGAN, time.monotonic(), place))
        player.play(order)
        if is_new:
            tell(Event(Step.ENDED, time.monotonic()))
        if order.folder not in player.with_state():
            _tidy(order.folder)
    for folder in player.with_state():
        # Models of all clients would take gigabytes.
        if not family.keeps_training or (folder / "clients").is_dir():
            _tidy(folder)


class _Player:
    """Plays runs of one training; knows of it by the type of its state.

    What is put on top of a method may add to its state; it trains the same then.
    """

    def __init__(
        self,
        command: Sequence[str],
        earlier: Path | None,
        tell: Tell,
        *,
        keeps_embeddings: bool,
    ) -> None:
        self._command = command
        self._tell = tell
        self._pool = EmbeddingPool(KeptEmbeddings() if keeps_embeddings else None)
        self._earlier = None if earlier is None else training_in(earlier)
        self._trained: dict[type[Record], Training] = {}
        self._diverged: dict[type[Record], tuple[str, Path]] = {}
        self._inputs: Inputs | None = None

    def play(self, order: Order) -> None:
        """Make a run, unless it is there."""
        experiment = from_json(order.experiment, experiment_catalogue())
        bench = open_workbench(experiment, pool=self._pool)
        inputs = self._inputs_of(bench)
        require_inputs(order.folder, inputs)
        if is_done(order.folder):
            self._recall(bench, RunFolder(order.folder))
            return
        folder = _folder(order.folder, bench.experiment)
        keep_inputs(folder.path, inputs)
        try:
            self._make(bench, folder)
        except (TooManyFailuresError, ExplodedError, HandOverError) as error:
            write_atomically(folder.path / FAILED, f"{error}\n")
        self._recall(bench, folder)

    def with_state(self) -> set[Path]:
        """Return the folders of one run for each type of state, which have it."""
        return {training.folder.path for training in self._trained.values()}

    def _make(self, bench: Workbench, folder: RunFolder) -> None:
        kind = bench.method.state_type
        if kind in self._diverged:  # and would again
            reason, origin = self._diverged[kind]
            sign_as(folder.path, origin)
            raise TooManyFailuresError(reason)
        training = self._trained.get(kind, self._earlier)
        if training is not None and training.state_type is kind:
            take_over(bench, folder, training)
        sign(folder.path)
        simulate(bench, folder, TellingObserver(self._tell), self._command)

    def _recall(self, bench: Workbench, folder: RunFolder) -> None:
        """Remember how the training of a run that ended went."""
        kind, reason = bench.method.state_type, why_failed(folder.path)
        # A hand-over fails after the last round.
        if reason and len(folder.rounds()) < bench.method.num_rounds:
            self._diverged.setdefault(kind, (reason, folder.path))
        elif folder.checkpoints.is_dir():
            identity = results_identity(bench.experiment)
            self._trained.setdefault(kind, Training(kind, folder, identity))

    def _inputs_of(self, bench: Workbench) -> Inputs:
        # Runs that train the same have all but the split in common.
        self._inputs = self._inputs or inputs_of(bench.experiment)
        return replace(self._inputs, split=fingerprint(bench.partition))


def _folder(path: Path, experiment: Experiment) -> RunFolder:
    """Return the run's folder, with what was left there; a failure begins anew."""
    if (path / FAILED).is_file():
        _discard(path)
    if not (path / "experiment.yaml").is_file():
        return RunFolder.create(path, experiment)
    return RunFolder.open(path)


def _discard(folder: Path) -> None:
    """Delete a run's folder; one that is deleted in part alone is no run's any more."""
    discarded = folder.with_name(f".{folder.name}.discarded")
    shutil.rmtree(discarded, ignore_errors=True)
    folder.rename(discarded)
    shutil.rmtree(discarded)


def _tidy(folder: Path) -> None:
    """Remove what only a run that goes on needs."""
    if is_done(folder):
        for name in ("checkpoints", "clients", "tensorboard"):
            shutil.rmtree(folder / name, ignore_errors=True)

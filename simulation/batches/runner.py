"""Finished runs whose training a batch need not make again."""

import concurrent.futures
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, TypeVar

from knnper.errors import CheckpointError, RunError
from knnper.experiment import Choice, Experiment, Settings
from knnper.files import write_atomically
from knnper.lifeline import die_with_parent
from knnper.loading import (
    dotted,
    from_json,
    relevant_settings,
    results_identity,
    to_json,
)
from knnper.server.checkpoint import CheckpointFolder
from knnper.server.comparison import ExplodedError
from knnper.server.distribution import DistributionError
from knnper.server.observer import SilentObserver
from knnper.server.rounds import TooManyFailuresError
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.folder import (
    INPUTS,
    RUNS,
    Inputs,
    inputs_of,
    is_of_this_code,
    keep_inputs,
    require_inputs,
    sign,
    sign_as,
    split_of,
)
from knnper.simulation.partition.assignment import PartitionSettings
from knnper.simulation.partition.split import fingerprint
from knnper.simulation.run import simulate
from knnper.simulation.trained_model import ended_run
from knnper.simulation.workbench import Workbench, experiment_catalogue, open_workbench
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.method import AS_IT_IS, NoSettings
from knnper.strategies.core.records import NoState, Record
from knnper.strategies.core.task import EmbeddingPool, KeptEmbeddings


class Step(Enum):
    """What happened."""

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
    """A step of a run.

    Attributes
    ----------
    step
        What happened.
    at
        When, in seconds of a clock that all processes of a machine share.
    count, first
        See `Step`.
    """

    step: Step
    at: float
    count: int = 0
    first: int = 0


Tell = Callable[[Event], None]


def nobody(event: Event) -> None:
    """Tell nobody."""


class TellingObserver(SilentObserver):
    """Tells the steps of a run.

    Parameters
    ----------
    tell
        Takes each.
    clock
        Returns seconds.
    """

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock

    def training_started(self, num_rounds: int, first_round: int) -> None:
        """Tell which rounds there are."""
        self._tell(Event(Step.TRAINS, self._clock(), num_rounds, first_round))

    def round_finished(self, record: Mapping[str, float | int]) -> None:  # noqa: ARG002 - an observer's
        """Tell that there is one more."""
        self._tell(Event(Step.ROUND, self._clock()))


Told = tuple[int, Event]
"""Which family, and what of it."""

_queue: "SimpleQueue[Told] | None" = None


def begin_worker(parent: int, queue: "SimpleQueue[Told]") -> None:
    """Set a worker process up: it ends with its parent, and tells a queue."""
    global _queue
    die_with_parent(parent)
    _queue = queue


def play_telling(play: Callable[[Any, Tell], None], number: int, family: Any) -> None:
    """Play the ``number``-th family in a worker process."""
    queue = _queue
    play(family, nobody if queue is None else lambda event: queue.put((number, event)))


def told_by(queue: "SimpleQueue[Told]") -> Iterator[Told]:
    """Yield what was told until now."""
    while not queue.empty():
        yield queue.get()


def new_queue() -> "SimpleQueue[Told]":
    """Return a queue from worker processes, which do not share memory with this one."""
    return multiprocessing.get_context("spawn").SimpleQueue()


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
        except (TooManyFailuresError, ExplodedError, DistributionError) as error:
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


T = TypeVar("T")


def key_of(experiment: Experiment) -> str:
    """Return a short name of an experiment's folder: equal results, equal names."""
    return results_identity(experiment)[:16]


def folder_of(experiment: Experiment, folder: Path) -> Path:
    """Return where in the folder of a batch an experiment's run is."""
    return folder / RUNS / key_of(experiment)


def by_seed(
    experiments: Mapping[int, Experiment], folder: Path
) -> tuple[dict[int, Path], dict[int, str]]:
    """Return the folders of the runs that have results, and why the others have none.

    Parameters
    ----------
    experiments
        What was run, by seed.
    folder
        Of the batch.
    """
    paths = {seed: folder_of(run, folder) for seed, run in experiments.items()}
    reasons = {seed: why_failed(path) for seed, path in paths.items()}
    failures = {seed: reason for seed, reason in reasons.items() if reason is not None}
    runs = {seed: path for seed, path in paths.items() if seed not in failures}
    return runs, failures


def failure_remark(what: str, seed: int, reason: str, run: Path) -> str:
    """Return what to tell of a run that failed.

    Parameters
    ----------
    what
        Was run.
    seed
        With which it failed.
    reason
        Why.
    run
        Its folder.
    """
    again = f"To make it again, delete {run}"
    return f"{what} failed with seed {seed}: {reason}. {again}"


def families_of(
    experiments: Iterable[Experiment],
    folder: Path,
    command: Sequence[str],
    *,
    keeps_training: bool = False,
) -> list[Family]:
    """Return the runs of a batch, each once, those that train the same together.

    Parameters
    ----------
    experiments
        What to run.
    folder
        Holds a folder for each run.
    command, keeps_training
        See `Family`.
    """
    found: dict[str, dict[Path, Experiment]] = {}
    for experiment in experiments:
        runs = found.setdefault(training_identity(experiment), {})
        runs.setdefault(folder_of(experiment, folder), experiment)
    return [
        _family(runs, tuple(command), keeps_training=keeps_training)
        for runs in found.values()
    ]


def _family(
    runs: Mapping[Path, Experiment], command: tuple[str, ...], *, keeps_training: bool
) -> Family:
    first = next(iter(runs.values()))
    return Family(
        orders=tuple(Order.of(run, folder) for folder, run in runs.items()),
        num_rounds=first.training.num_rounds,
        command=command,
        keeps_training=keeps_training,
    )


def require_same_inputs(families: Iterable[Family]) -> None:
    """Do nothing if all runs that are there were made from the data as it is now.

    And from the same split of it, which other code may deal in another way.

    Raises
    ------
    RunError
        As `require_inputs`.
    DataError
        If the data cannot be loaded or dealt.
    """
    inputs: dict[str, Inputs] = {}
    splits: dict[str, str] = {}
    for order in (order for family in families for order in family.orders):
        if not (order.folder / INPUTS).is_file():
            continue
        found = _once(inputs, order, ("data", "model"), inputs_of)
        # Before the split, since data of another size may not be dealt at all.
        require_inputs(order.folder, found)
        split = _once(splits, order, ("data", "partition", "run"), split_of)
        require_inputs(order.folder, replace(found, split=split))


def _once(
    known: dict[str, T],
    order: Order,
    sections: Iterable[str],
    find: Callable[[Experiment], T],
) -> T:
    """Return what depends on these sections of an order alone, found only once."""
    document = json.loads(order.experiment)
    key = json.dumps([document[section] for section in sections])
    if key not in known:
        known[key] = find(from_json(order.experiment, experiment_catalogue()))
    return known[key]


def is_made(family: Family) -> bool:
    """Return whether all runs of a family ended."""
    return all(is_done(order.folder) for order in family.orders)


_TYPED = {"run.seed": "seeds", "run.gpu": "run.gpus_per_client"}
"""What a batch calls some of the settings that results depend on."""


def with_earlier_training(
    families: Sequence[Family], runs: Iterable[Path]
) -> list[Family]:
    """Return the families, each with the training of an earlier run that is its own.

    Where all is made already, nothing is asked of the earlier runs.

    Parameters
    ----------
    families
        Of a batch.
    runs
        Folders of finished runs.

    Raises
    ------
    RunError
        If a folder holds no finished run, or one that no family trains like, if two
        trained the same, and as `training_in`.
    CheckpointError, DataError
        As `training_in`.
    """
    found = list(families)
    if all(is_made(family) for family in families):
        return found
    for run in runs:
        number = _number_of(run, found)
        # Now, so that a batch does not fall over it when others train already.
        _require_use(run, training_in(run).state_type, found[number])
        found[number] = replace(found[number], earlier=run)
    return found


def _number_of(run: Path, families: Sequence[Family]) -> int:
    """Return the place of the one family that trains as a run did."""
    earlier = _finished(run)
    experiments = [_experiments(family)[0] for family in families]
    identities = [training_identity(one) for one in experiments]
    if training_identity(earlier) not in identities:
        raise RunError(_no_match(run, earlier, experiments))
    number = identities.index(training_identity(earlier))
    other = families[number].earlier
    if other is not None:
        raise RunError(
            f"the runs in {other} and {run} were trained the same, expected one of "
            "each training; leave one of them away"
        )
    return number


def _finished(run: Path) -> Experiment:
    folder = RunFolder.open(run)
    if not folder.is_finished():
        raise RunError(
            f"the run in {run} is not done, expected a finished one; go on with it "
            f"first: knnper simulate --resume {run}"
        )
    return folder.experiment(experiment_catalogue())


def _require_use(run: Path, state_type: type, family: Family) -> None:
    """Refuse a state that none of the family's runs can go on from."""
    kinds = {
        (one.method.name, one.personalization.name): one for one in _experiments(family)
    }
    types = {open_workbench(one).method.state_type for one in kinds.values()}
    if state_type not in types:
        names = ", ".join(sorted({method for method, _ in kinds}))
        raise RunError(
            f"the server of the run in {run} keeps another state than that of {names} "
            "asked for, which adds to it while it trains; leave the run away to train "
            "anew"
        )


def _experiments(family: Family) -> list[Experiment]:
    catalogue = experiment_catalogue()
    return [from_json(order.experiment, catalogue) for order in family.orders]


def _no_match(run: Path, earlier: Experiment, others: Iterable[Experiment]) -> str:
    found = _settings(earlier)
    differences = [list(_differences(_settings(one), found)) for one in others]
    nearest = min(differences, key=len)
    return (
        f"the run in {run} was trained otherwise than all that is asked for: "
        f"{'; '.join(nearest)}. Make the settings equal, or leave the run away to "
        "train anew"
    )


def _settings(experiment: Experiment) -> Mapping[str, Any]:
    return dict(dotted(relevant_settings(as_trained(experiment))))


def _differences(
    expected: Mapping[str, Any], found: Mapping[str, Any]
) -> Iterator[str]:
    for key in dict.fromkeys((*found, *expected)):
        here, there = found.get(key, "nothing"), expected.get(key, "nothing")
        if here != there:
            yield f"{_TYPED.get(key, key)}: found {here}, expected {there}"


SECONDS_BETWEEN_LOOKS = 1.0


def play_side_by_side(
    families: Sequence[Family], num_workers: int
) -> Iterator[Sequence[Told]]:
    """Play the families; yield about once a second what the workers told since.

    Parameters
    ----------
    families
        One process plays a family.
    num_workers
        Processes; what they compute does not depend on it.

    Raises
    ------
    KnnPerError
        If a run cannot be made, or the system ends a process. What runs then is ended,
        and can be taken up again.
    """
    if not families:
        return
    queue = new_queue()
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=begin_worker,
        initargs=(os.getpid(), queue),
    )
    try:
        left = {
            pool.submit(play_telling, play, number, family)
            for number, family in enumerate(families)
        }
        while left:
            done, left = concurrent.futures.wait(
                left, SECONDS_BETWEEN_LOOKS, concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                future.result()
            yield list(told_by(queue))
    except concurrent.futures.BrokenExecutor as error:
        raise RunError(
            "a worker process was killed, most likely because the memory was full; use "
            "fewer of them with --workers. The same command goes on with what is done"
        ) from error
    except BaseException:
        # A family may go on for minutes.
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)

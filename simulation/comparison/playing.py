"""Runs of a comparison, those that share their training one after the other."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from knnper.config.document import from_json, results_identity, to_json
from knnper.config.errors import CheckpointError
from knnper.config.sections import Choice, Experiment
from knnper.durable_files import write_atomically
from server.checkpoint import CheckpointFolder
from server.hand_over import HandOverError
from server.observer import SilentObserver
from server.rounds import TooManyFailuresError
from server.run_folder import RunFolder
from simulation.catalogue import experiment_catalogue
from simulation.comparison.code import sign
from simulation.runner import simulate
from simulation.workbench import Workbench, open_workbench
from strategies.catalogue import METHODS
from strategies.core.method import AS_IT_IS, NoSettings
from strategies.core.records import Record

_Trained = tuple[Workbench, RunFolder]

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


def training_identity(experiment: Experiment) -> str:
    """Return what two experiments have in common that train the same.

    They may differ in what is put on top of the method alone, and in the name that
    the method has with it.
    """
    build = METHODS[experiment.method.name].build
    name = next(name for name, spec in METHODS.items() if spec.build is build)
    return results_identity(
        replace(
            experiment,
            method=replace(experiment.method, name=name),
            personalization=Choice(AS_IT_IS, NoSettings()),
        )
    )


def is_done(folder: Path) -> bool:
    """Return whether a run ended, with results or by diverging."""
    return (folder / FAILED).is_file() or RunFolder(folder).is_finished()


def why_failed(folder: Path) -> str | None:
    """Return why a run that ended has no results; None where it has."""
    path = folder / FAILED
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def play(orders: Sequence[Order]) -> None:
    """Make the runs that are missing; the rounds that they share are made once.

    Parameters
    ----------
    orders
        Runs of one `training_identity`.

    Raises
    ------
    KnnPerError
        If a run cannot be made. One whose clients fail, as they do where a rate is too
        large, is a finding: the reason stays in its folder, and the others go on.
    """
    trained: dict[type[Record], _Trained] = {}
    for order in orders:
        if is_done(order.folder):
            _note(trained, _trained_before(order))
            continue
        try:
            _note(trained, _play(order, trained))
        except (TooManyFailuresError, HandOverError) as error:
            write_atomically(order.folder / FAILED, f"{error}\n")
    for order in orders:
        _tidy(order.folder)


def _note(trained: dict[type[Record], _Trained], run: _Trained | None) -> None:
    if run is not None:
        trained.setdefault(run[0].method.state_type, run)


def _trained_before(order: Order) -> _Trained | None:
    """Return a run that was made before and still has its last state."""
    if not (order.folder / "checkpoints").is_dir() or why_failed(order.folder):
        return None
    experiment = from_json(order.experiment, experiment_catalogue())
    return open_workbench(experiment), RunFolder.open(order.folder)


def _play(order: Order, trained: Mapping[type[Record], _Trained]) -> _Trained:
    experiment = from_json(order.experiment, experiment_catalogue())
    bench = open_workbench(experiment)
    folder = _folder(order.folder, experiment)
    sign(folder.path)
    other = trained.get(bench.method.state_type)
    if other is not None:
        _take_over(bench, folder, *other)
    simulate(bench, folder, SilentObserver(), ["knnper", "compare"])
    return bench, folder


def _folder(path: Path, experiment: Experiment) -> RunFolder:
    """Return the run's folder, with what an interrupted comparison left there."""
    if not (path / "experiment.yaml").is_file():
        return RunFolder.create(path, experiment)
    return RunFolder.open(path)


def _take_over(
    bench: Workbench, folder: RunFolder, other: Workbench, others: RunFolder
) -> None:
    """Put another run's last state where this one goes on from it.

    Where it cannot be read any more, the rounds are made anew.
    """
    theirs = CheckpointFolder(others.checkpoints, results_identity(other.experiment))
    try:
        last = theirs.load_latest(other.method.state_type)
    except CheckpointError:
        return
    if last is None or last.server_round != bench.method.num_rounds:
        return
    if (others.path / "clients").is_dir():
        shutil.copytree(
            others.path / "clients", folder.path / "clients", dirs_exist_ok=True
        )
    folder.drop_rounds_after(0)
    for record in others.rounds():
        folder.append_round(record)
    ours = CheckpointFolder(folder.checkpoints, results_identity(bench.experiment))
    ours.save(last.server_round, last.state)


def _tidy(folder: Path) -> None:
    """Remove what only a run that goes on needs."""
    if is_done(folder):
        for name in ("checkpoints", "clients", "tensorboard"):
            shutil.rmtree(folder / name, ignore_errors=True)

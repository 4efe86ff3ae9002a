"""A comparison's rows, tested after every so many rounds.

A run reads its test splits once, after its last round. Many published figures are of
the round that is best on test data: what that adds is seen beside the round that
validation data choose. Nothing is changed by it but the reading.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from knnper.errors import ConfigError, Problem
from knnper.experiment import Experiment, alternatives, results_identity
from knnper.files import JsonLines, write_atomically
from knnper.process import with_fixed_threads
from knnper.server.distribution import ModelDistribution
from knnper.server.observer import RoundRecord
from knnper.server.results import summarise
from knnper.server.rounds import RoundLoop, untrained
from knnper.server.run_folder import (
    EXPERIMENT,
    Checkpoint,
    CheckpointFolder,
    History,
    RunFolder,
)
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.family import as_trained, training_identity
from knnper.simulation.reports.table import Shown, Table, csv_text
from knnper.simulation.serial_engine import SerialFederation
from knnper.simulation.workbench import (
    Workbench,
    build_workbench,
    open_workbench,
    runtime_of,
)

READINGS = "readings.jsonl"  # in the folder of a training
Reading = Mapping[str, Any]
OnRound = Callable[[RoundRecord], None]


def read_rounds(
    plan: Comparison, output: Path, every: int, only: Sequence[str], on_round: OnRound
) -> None:
    """Train what the rows ``only`` need, or all; a training resumes in its folder."""
    problems = [
        Problem(f"rows.{name}", f"found {len(one)} settings to choose from, expected 1")
        for name, one in plan.variants.items()
        if len(one) > 1
    ]
    require_rows(plan, only, problems)
    for place, rows in _trainings(plan, output).items():
        if not only or rows.keys() & set(only):
            _read_training(rows, place, every, on_round)


def require_rows(
    plan: Comparison, names: Sequence[str], problems: Sequence[Problem] = ()
) -> None:
    """Refuse names of rows that are not there, with what else is wrong."""
    unknown = [
        Problem("rows", f"unknown name {one!r}; {alternatives(one, plan.variants)}")
        for one in names
        if one not in plan.variants
    ]
    if unknown or problems:
        raise ConfigError([*problems, *unknown], plan.name)


def _trainings(plan: Comparison, output: Path) -> dict[Path, dict[str, Experiment]]:
    """Return the folder of each training, with the rows that need it."""
    places: dict[str, Path] = {}
    found: dict[Path, dict[str, Experiment]] = {}
    for point in plan.points:
        for seed, run in point.runs.items():
            experiment = with_fixed_threads(run)
            folder = output / f"{point.variant}-seed-{seed}"
            place = places.setdefault(training_identity(experiment), folder)
            found.setdefault(place, {})[point.variant] = experiment
    return found


def _read_training(
    rows: Mapping[str, Experiment], path: Path, every: int, on_round: OnRound
) -> None:
    """Train once for all rows; write what each comes to after its rounds."""
    first = as_trained(next(iter(rows.values())))
    trained = replace(first, run=replace(first.run, checkpoint_every=every))
    bench = open_workbench(trained)
    data = bench.dataset, bench.partition, torch.device("cpu")
    readers = {
        name: build_workbench(experiment, *data) for name, experiment in rows.items()
    }
    is_there = (path / EXPERIMENT).is_file()
    folder = RunFolder.open(path) if is_there else RunFolder.create(path, trained)
    identity = results_identity(trained)
    with folder.locked():
        checkpoints = _Reader(folder.checkpoints, identity, readers, folder)
        start = checkpoints.load_latest(bench.method.state_type)
        start = start or untrained(bench, bench.roster)
        folder.drop_rounds_after(start.server_round)

        def record(figures: RoundRecord) -> None:
            folder.append_round(figures)
            on_round(figures)

        federation = SerialFederation(runtime_of(bench, path))
        RoundLoop(bench, federation, bench.roster, checkpoints, record).train(start)


class _Reader(CheckpointFolder):
    """Tests each checkpoint before it is kept, so that none is without its readings."""

    def __init__(
        self,
        place: Path,
        identity: str,
        readers: Mapping[str, Workbench],
        folder: RunFolder,
    ) -> None:
        super().__init__(place, identity)
        self._readers = readers
        self._run = folder

    def save(
        self,
        server_round: int,
        state: object,
        history: History | None = None,
        earlier: Iterable[Checkpoint] = (),
    ) -> Checkpoint:
        at_present = Checkpoint(server_round, state, "", history or History())
        for row, bench in self._readers.items():
            read = {"row": row, "server_round": server_round}
            read |= self._read(bench, at_present)
            JsonLines(self._run.path / READINGS).append(read)
        return super().save(server_round, state, history, earlier)

    def _read(self, bench: Workbench, trained: Checkpoint) -> dict[str, Any]:
        roster, federation = (
            bench.roster,
            SerialFederation(runtime_of(bench, self._run.path)),
        )
        loop = RoundLoop(bench, federation, roster, self, lambda _: None)
        found = loop.validate(trained)
        distribution = ModelDistribution(bench.method, federation, bench.key)
        served = distribution.personalize(trained, roster.sizes(), roster.seen())
        results = (one for told in served for one in told.values())
        summary = summarise(one for one in results if one is not None and one.seen)
        return {
            "seed": bench.experiment.run.seed,
            "validation": found.get("validation_accuracy_personal"),
            "test": summary.personal.accuracy_weighted,
            "test_mean": summary.personal.accuracy_mean,
            "test_bottom_decile": summary.personal.accuracy_bottom_decile,
            "test_global": summary.reference.accuracy_weighted,
        }


@dataclass(frozen=True)
class BothReadings:
    """Of one row and seed."""

    last: Reading
    chosen: Reading  # the round that is best on validation data, the first of several
    best: Reading  # the same on test data

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> "BothReadings":
        """Return both readings of a row's rounds."""

        def first_best(name: str) -> Reading:
            return max(readings, key=lambda one: (one[name] or 0, -one["server_round"]))

        last = max(readings, key=lambda one: one["server_round"])
        return cls(last, first_best("validation"), first_best("test"))


def readings_in(plan: Comparison, output: Path) -> dict[str, list[BothReadings]]:
    """Return what ``output`` holds so far, by row, one a seed."""
    # A round that was made again has two readings, of which the last counts.
    found = {
        (one["row"], one["seed"], one["server_round"]): one
        for place in _trainings(plan, output)
        if place.is_dir()
        for one in JsonLines(place / READINGS).read()
    }
    write_atomically(output / "readings.csv", csv_text(list(found.values())))
    by_row: dict[str, list[BothReadings]] = {}
    for row in plan.variants:
        for seed in plan.seeds:
            readings = [one for key, one in found.items() if key[:2] == (row, seed)]
            if readings:
                by_row.setdefault(row, []).append(BothReadings.of(readings))
    return by_row


def seconds_in(plan: Comparison, output: Path) -> dict[str, float]:
    """Return the mean seconds of a round of training, by row."""
    return {
        row: fmean(one["seconds"] for one in made)
        for place, rows in _trainings(plan, output).items()
        if place.is_dir() and (made := RunFolder(place).rounds())
        for row in rows
    }


HEADER = ("method", "last round", "chosen on validation", "best on test", "s a round")


def shown(plan: Comparison, output: Path) -> Shown:
    """Return all readings in a folder as a table."""
    seconds = seconds_in(plan, output)
    lines = tuple(
        (
            plan.variants[row][0].title,
            *(cell([getattr(one, kind) for one in both]) for kind in KINDS),
            f"{seconds[row]:.1f}",
        )
        for row, both in readings_in(plan, output).items()
    )
    return left_in(output / "readings.md", Table(TITLE, HEADER, lines))


def left_in(path: Path, table: Table) -> Shown:
    """Write a table down too."""
    write_atomically(path, table.as_markdown())
    return Shown((table,))


TITLE = "Test accuracy in %, weighted by examples (after which round)"
KINDS = ("last", "chosen", "best")


def cell(readings: Sequence[Reading]) -> str:
    """Return the mean over seeds, and the round of each."""
    after = ", ".join(str(one["server_round"]) for one in readings)
    return f"{fmean(100 * one['test'] for one in readings):.2f} ({after})"

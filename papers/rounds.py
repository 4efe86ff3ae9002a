"""Test a comparison's rows at regular intervals of rounds.

A run reads its test splits once, after its last round. Many published figures are those
of the round with the best test accuracy. This module shows the difference to the round
chosen on validation data. Training itself is unchanged.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from knnper import ConfigError, Experiment, Problem
from knnper.experiment_file import results_identity
from knnper.files import JsonLines, write_atomically
from knnper.process import with_fixed_threads
from knnper.server.checkpoints import Checkpoint, CheckpointFolder, History
from knnper.server.distribution import ModelDistribution
from knnper.server.observer import RoundRecord
from knnper.server.results import summarise
from knnper.server.rounds import RoundLoop, untrained
from knnper.server.run_folder import EXPERIMENT, RunFolder
from knnper.settings import alternatives
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
HEADER = ("method", "last round", "chosen on validation", "best on test", "s a round")
TITLE = "Test accuracy in %, weighted by examples (after which round)"
KINDS = ("last", "chosen", "best")


def read_rounds(
    plan: Comparison, output: Path, every: int, only: Sequence[str], on_round: OnRound
) -> None:
    """Train the rows ``only``, or all, and test them; resume unfinished trainings."""
    problems = [
        Problem(
            f"rows.{name}", f"found {len(choices)} settings to choose from, expected 1"
        )
        for name, choices in plan.variants.items()
        if len(choices) > 1
    ]
    require_rows(plan, only, problems)
    for place, rows in _trainings(plan, output).items():
        if not only or rows.keys() & set(only):
            _read_training(rows, place, every, on_round)


def require_rows(
    plan: Comparison, names: Sequence[str], problems: Sequence[Problem] = ()
) -> None:
    """Raise for unknown names of rows, together with ``problems``."""
    unknown = [
        Problem("rows", f"unknown name {row!r}; {alternatives(row, plan.variants)}")
        for row in names
        if row not in plan.variants
    ]
    if unknown or problems:
        raise ConfigError([*problems, *unknown], plan.name)


def _trainings(plan: Comparison, output: Path) -> dict[Path, dict[str, Experiment]]:
    """Return the folder of each training and the rows that share it."""
    places: dict[str, Path] = {}
    experiments_of: dict[Path, dict[str, Experiment]] = {}
    for point in plan.points:
        for seed, run in point.runs.items():
            experiment = with_fixed_threads(run)
            folder = output / f"{point.variant}-seed-{seed}"
            place = places.setdefault(training_identity(experiment), folder)
            experiments_of.setdefault(place, {})[point.variant] = experiment
    return experiments_of


def _read_training(
    rows: Mapping[str, Experiment], path: Path, every: int, on_round: OnRound
) -> None:
    """Train once for all rows, and write the readings of each row."""
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
        checkpoints = _TestedCheckpoints(folder.checkpoints, identity, readers, folder)
        start = checkpoints.load_latest(bench.method.state_type)
        start = start or untrained(bench, bench.roster)
        folder.drop_rounds_after(start.server_round)

        def record(figures: RoundRecord) -> None:
            folder.append_round(figures)
            on_round(figures)

        federation = SerialFederation(runtime_of(bench, path))
        RoundLoop(bench, federation, bench.roster, checkpoints, record).train(start)


class _TestedCheckpoints(CheckpointFolder):
    """Tests each checkpoint before it is stored, so that none lacks its readings."""

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
        roster = bench.roster
        federation = SerialFederation(runtime_of(bench, self._run.path))
        loop = RoundLoop(bench, federation, roster, self, lambda _: None)
        validation = loop.validate(trained)
        distribution = ModelDistribution(bench.method, federation, bench.key)
        served = distribution.personalize(trained, roster.sizes(), roster.seen())
        results = (result for replies in served for result in replies.values())
        summary = summarise(
            result for result in results if result is not None and result.seen
        )
        return {
            "seed": bench.experiment.run.seed,
            "validation": validation.get("validation_accuracy_personal"),
            "test": summary.personal.accuracy_weighted,
            "test_mean": summary.personal.accuracy_mean,
            "test_bottom_decile": summary.personal.accuracy_bottom_decile,
            "test_global": summary.reference.accuracy_weighted,
        }


@dataclass(frozen=True)
class BothReadings:
    """The chosen and the best reading of one row and seed."""

    last: Reading
    chosen: Reading  # first round with the best validation accuracy
    best: Reading  # first round with the best test accuracy

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> "BothReadings":
        """Select both readings from a row's rounds."""

        def first_best(name: str) -> Reading:
            return max(
                readings,
                key=lambda reading: (reading[name] or 0, -reading["server_round"]),
            )

        last = max(readings, key=lambda reading: reading["server_round"])
        return cls(last, first_best("validation"), first_best("test"))


def readings_in(plan: Comparison, output: Path) -> dict[str, list[BothReadings]]:
    """Read the readings in ``output`` by row, one entry per seed."""
    # A repeated round has two readings; the later one counts.
    reading_of = {
        (reading["row"], reading["seed"], reading["server_round"]): reading
        for place in _trainings(plan, output)
        if place.is_dir()
        for reading in JsonLines(place / READINGS).read()
    }
    write_atomically(output / "readings.csv", csv_text(list(reading_of.values())))
    by_row: dict[str, list[BothReadings]] = {}
    for row in plan.variants:
        for seed in plan.seeds:
            readings = [
                reading for key, reading in reading_of.items() if key[:2] == (row, seed)
            ]
            if readings:
                by_row.setdefault(row, []).append(BothReadings.of(readings))
    return by_row


def seconds_in(plan: Comparison, output: Path) -> dict[str, float]:
    """Return the mean seconds of a training round, by row."""
    return {
        row: fmean(record["seconds"] for record in records)
        for place, rows in _trainings(plan, output).items()
        if place.is_dir() and (records := RunFolder(place).rounds())
        for row in rows
    }


def shown(plan: Comparison, output: Path) -> Shown:
    """Build a table of all readings in a folder."""
    seconds = seconds_in(plan, output)
    lines = tuple(
        (
            plan.variants[row][0].title,
            *(cell([getattr(readings, kind) for readings in both]) for kind in KINDS),
            f"{seconds[row]:.1f}",
        )
        for row, both in readings_in(plan, output).items()
    )
    return write_table(output / "readings.md", Table(TITLE, HEADER, lines))


def write_table(path: Path, table: Table) -> Shown:
    """Write a table as Markdown, and return it."""
    write_atomically(path, table.as_markdown())
    return Shown((table,))


def cell(readings: Sequence[Reading]) -> str:
    """Format the mean over seeds, and the round of each seed."""
    after = ", ".join(str(reading["server_round"]) for reading in readings)
    return f"{fmean(100 * reading['test'] for reading in readings):.2f} ({after})"

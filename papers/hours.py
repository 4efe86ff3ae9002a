"""Accuracy against virtual hours, and the share and accuracy of slow clients.

For comparisons with ``training.devices`` in their rows. Each row shows the virtual
hours until the global model first reached given accuracies on validation data and the
staleness of updates. By fifths of the training clients, from the fastest to the
slowest, it shows their participation and their accuracy on test data, with and without
personalisation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from knnper import RunError
from knnper.files import write_atomically
from knnper.server.observer import RoundRecord
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.runner import run_batch
from knnper.simulation.reports.client_table import read_clients
from knnper.simulation.reports.estimate import Estimate, estimate
from knnper.simulation.reports.figure import write_pictures
from knnper.simulation.reports.table import Table, csv_text
from papers.figures import markdown_of

NUM_GROUPS = 5
TARGETS = (0.6, 0.65, 0.7)
HOUR_S = 3600


@dataclass(frozen=True)
class TimedRun:
    """A finished run."""

    rounds: Sequence[RoundRecord]
    clients: pd.DataFrame  # result of `read_clients`
    path: Path = Path()

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Virtual hours and validation accuracy of evaluated global models."""
        return [
            (record["virtual_seconds"] / HOUR_S, record["validation_accuracy"])
            for record in self.rounds
            if record.get("validation_accuracy") is not None
        ]

    def hours_to(self, accuracy: float) -> float | None:
        """Return the virtual hours until ``accuracy`` was first reached, or None."""
        return next(
            (hours for hours, reached in self.curve if reached >= accuracy), None
        )

    @property
    def hours(self) -> float:
        """Virtual hours of the training."""
        return float(self.rounds[-1]["virtual_seconds"]) / HOUR_S

    def mean(self, figure: str) -> float:
        """Return the mean of a figure over the rounds."""
        return fmean(record[figure] for record in self.rounds)

    def fifths(self) -> list[pd.DataFrame]:
        """Return the clients that could be sampled for training, the fastest first."""
        timed = self.clients.dropna(subset="round_seconds")
        ordered = timed.sort_values(["round_seconds", "client"])
        parts = np.array_split(np.arange(len(ordered)), NUM_GROUPS)
        return [ordered.iloc[part] for part in parts if len(part)]


def runs_in(plan: Comparison, folder: Path) -> dict[str, list[TimedRun]]:
    """Return the runs of a comparison by row title, one per seed."""
    if any(experiment.training.devices is None for experiment in plan.experiments):
        raise RunError(
            f"{plan.name}: found rows without virtual time, expected training.devices "
            "in all of them"
        )
    runs_of: dict[str, list[TimedRun]] = {}
    for point in run_batch(plan, folder, 1, lambda _: None):
        for path in point.runs.values():
            run = TimedRun(RunFolder(path).rounds(), read_clients(path), path)
            runs_of.setdefault(point.point.title, []).append(run)
    return runs_of


def _hours(values: Sequence[float | None]) -> str:
    """Format the mean, or a dash unless all runs have a value."""
    known = [value for value in values if value is not None]
    return estimate(known).text(1, 2) if len(known) == len(values) else "-"


def time_table(
    runs_of: Mapping[str, Sequence[TimedRun]], targets: Sequence[float]
) -> Table:
    """Build the table of virtual hours and staleness of each row."""
    cells = [
        [
            "method",
            *(f"hours to {100 * target:g} %" for target in targets),
            "hours in all",
            "staleness",
            "largest",
            "late a round",
        ]
    ]
    for title, runs in runs_of.items():
        largest = max(record["staleness_max"] for run in runs for record in run.rounds)
        cells.append(
            [
                title,
                *(_hours([run.hours_to(target) for run in runs]) for target in targets),
                _hours([run.hours for run in runs]),
                estimate([run.mean("staleness") for run in runs]).text(1, 2),
                str(largest),
                estimate([run.mean("num_late") for run in runs]).text(1, 1),
            ]
        )
    return Table.of_cells("Virtual time", cells)


@dataclass(frozen=True)
class SpeedGroup:
    """A fifth of the training clients, over the seeds."""

    row: str
    number: int  # from 1, the fastest
    rounds: Estimate
    staleness: Estimate
    personal: Estimate
    of_global: Estimate


def groups_of(title: str, runs: Sequence[TimedRun]) -> list[SpeedGroup]:
    """Divide the training clients of a row into fifths by speed."""
    groups = []
    for number, parts in enumerate(
        zip(*(run.fifths() for run in runs), strict=True), 1
    ):
        groups.append(
            SpeedGroup(
                title,
                number,
                estimate([part["num_rounds"].fillna(0).mean() for part in parts]),
                estimate(
                    [
                        part["staleness"].mean()
                        for part in parts
                        if part["staleness"].notna().any()
                    ]
                ),
                estimate([weighted(part, "accuracy") for part in parts]),
                estimate([weighted(part, "accuracy_global") for part in parts]),
            )
        )
    return groups


def weighted(clients: pd.DataFrame, figure: str) -> float:
    """Return the mean of a figure over clients, weighted by test examples."""
    return float(np.average(clients[figure], weights=clients["num_test"]))


def group_table(groups: Sequence[SpeedGroup]) -> Table:
    """Build the table of fast and slow clients."""
    cells = [["method", "fifth", "rounds", "staleness", "global model", "served"]]
    cells += [
        [
            group.row,
            {1: "1, fastest", NUM_GROUPS: f"{NUM_GROUPS}, slowest"}.get(
                group.number, str(group.number)
            ),
            group.rounds.text(1, 1),
            group.staleness.text(1, 1),
            group.of_global.text(),
            group.personal.text(),
        ]
        for group in groups
    ]
    return Table.of_cells("Clients by speed", cells)


def draw(runs_of: Mapping[str, Sequence[TimedRun]]) -> Figure:
    """Draw the accuracy of the global model against virtual hours."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    panel = figure.subplots()
    for title, runs in runs_of.items():
        hours, accuracy = np.mean([run.curve for run in runs], axis=0).T
        panel.plot(hours, 100 * accuracy, label=title, linewidth=1.4)
    panel.set_xscale("log")
    panel.set_xlabel("virtual hours")
    panel.set_ylabel("validation accuracy of the global model, %")
    panel.grid(visible=True, linewidth=0.4)
    panel.legend(frameon=False)
    return figure


def write_hours(
    plan: Comparison, runs: Path, output: Path, targets: Sequence[float] | None
) -> tuple[Table, Table]:
    """Write ``hours`` as .csv, .md and pictures; return the tables."""
    if not all(experiment.run.validate_every for experiment in plan.experiments):
        raise RunError(
            f"{plan.name}: found rows without accuracies on validation data, expected "
            "run.validate_every in all of them, such as 1"
        )
    runs_of = runs_in(plan, runs)
    output.mkdir(parents=True, exist_ok=True)
    rows = [
        {"method": title, "seed": seed, "hours": hours, "validation_accuracy": accuracy}
        for title, of_row in runs_of.items()
        for seed, run in zip(plan.seeds, of_row, strict=True)
        for hours, accuracy in run.curve
    ]
    write_atomically(output / "hours.csv", csv_text(rows))
    # Rows that share a training have the same curve.
    curves: dict[tuple[tuple[tuple[float, float], ...], ...], str] = {}
    for title, of_row in runs_of.items():
        curves.setdefault(tuple(tuple(run.curve) for run in of_row), title)
    alone = {title: runs_of[title] for title in curves.values()}
    write_pictures(output, "hours", draw(alone))
    served = [group for title in runs_of for group in groups_of(title, runs_of[title])]
    tables = time_table(alone, targets or TARGETS), group_table(served)
    write_atomically(output / "hours.md", markdown_of(tables))
    return tables

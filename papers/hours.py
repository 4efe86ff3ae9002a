"""Accuracy against virtual hours, and what becomes of slow clients.

A comparison whose rows have ``training.devices``: for each, after how many virtual
hours the global model first had an accuracy on validation data, how late the updates
were, and by fifths of the clients that train, from the fastest to the slowest, how
often they took part and how accurate they are on their test data, with what is put on
top of the global model and without.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from knnper.errors import RunError
from knnper.files import write_atomically
from knnper.server.observer import RoundRecord
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.runner import run_batch
from knnper.simulation.reports.client_table import (
    read_clients,
)
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
    clients: pd.DataFrame  # as `read_clients` returns them
    path: Path = Path()

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Virtual hours and the global model's validation accuracy, where known."""
        return [
            (one["virtual_seconds"] / HOUR_S, one["validation_accuracy"])
            for one in self.rounds
            if one.get("validation_accuracy") is not None
        ]

    def hours_to(self, accuracy: float) -> float | None:
        """Return when the accuracy was first there; None for never."""
        return next((hours for hours, found in self.curve if found >= accuracy), None)

    @property
    def hours(self) -> float:
        """Virtual hours of the training."""
        return float(self.rounds[-1]["virtual_seconds"]) / HOUR_S

    def mean(self, figure: str) -> float:
        """Return the mean over the rounds."""
        return fmean(one[figure] for one in self.rounds)

    def fifths(self) -> list[pd.DataFrame]:
        """Return the clients that trained, or might have, the fastest first."""
        timed = self.clients.dropna(subset="round_seconds")
        ordered = timed.sort_values(["round_seconds", "client"])
        parts = np.array_split(np.arange(len(ordered)), NUM_GROUPS)
        return [ordered.iloc[part] for part in parts if len(part)]


def runs_in(plan: Comparison, folder: Path) -> dict[str, list[TimedRun]]:
    """Return the runs of a comparison by the title of the row, one a seed."""
    if any(one.training.devices is None for one in plan.experiments):
        raise RunError(
            f"{plan.name}: found rows without virtual time, expected training.devices "
            "in all of them"
        )
    found: dict[str, list[TimedRun]] = {}
    for made in run_batch(plan, folder, 1, lambda _: None):
        for path in made.runs.values():
            run = TimedRun(RunFolder(path).rounds(), read_clients(path), path)
            found.setdefault(made.point.title, []).append(run)
    return found


def _hours(values: Sequence[float | None]) -> str:
    """Return the mean, where all runs got there."""
    known = [one for one in values if one is not None]
    return estimate(known).text(1, 2) if len(known) == len(values) else "-"


def time_table(
    found: Mapping[str, Sequence[TimedRun]], targets: Sequence[float]
) -> Table:
    """Return how long each row took, and how late its updates were."""
    cells = [
        [
            "method",
            *(f"hours to {100 * one:g} %" for one in targets),
            "hours in all",
            "staleness",
            "largest",
            "late a round",
        ]
    ]
    for title, runs in found.items():
        largest = max(one["staleness_max"] for run in runs for one in run.rounds)
        cells.append(
            [
                title,
                *(_hours([one.hours_to(target) for one in runs]) for target in targets),
                _hours([one.hours for one in runs]),
                estimate([one.mean("staleness") for one in runs]).text(1, 2),
                str(largest),
                estimate([one.mean("num_late") for one in runs]).text(1, 1),
            ]
        )
    return Table.of_cells("Virtual time", cells)


@dataclass(frozen=True)
class Group:
    """A fifth of the clients that train, over the seeds."""

    row: str
    number: int  # from 1, the fastest
    rounds: Estimate
    staleness: Estimate
    personal: Estimate
    of_global: Estimate


def groups_of(title: str, runs: Sequence[TimedRun]) -> list[Group]:
    """Return the fifths of a row's clients."""
    made = []
    for number, parts in enumerate(
        zip(*(one.fifths() for one in runs), strict=True), 1
    ):
        made.append(
            Group(
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
    return made


def weighted(clients: pd.DataFrame, figure: str) -> float:
    """Return the mean of a figure of clients by their test examples."""
    return float(np.average(clients[figure], weights=clients["num_test"]))


def group_table(groups: Sequence[Group]) -> Table:
    """Return what becomes of fast and slow clients."""
    cells = [["method", "fifth", "rounds", "staleness", "global model", "served"]]
    cells += [
        [
            one.row,
            {1: "1, fastest", NUM_GROUPS: f"{NUM_GROUPS}, slowest"}.get(
                one.number, str(one.number)
            ),
            one.rounds.text(1, 1),
            one.staleness.text(1, 1),
            one.of_global.text(),
            one.personal.text(),
        ]
        for one in groups
    ]
    return Table.of_cells("Clients by speed", cells)


def draw(found: Mapping[str, Sequence[TimedRun]]) -> Figure:
    """Draw the accuracy of the global model against virtual hours."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    panel = figure.subplots()
    for title, runs in found.items():
        hours, accuracy = np.mean([one.curve for one in runs], axis=0).T
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
    if not all(one.run.validate_every for one in plan.experiments):
        raise RunError(
            f"{plan.name}: found rows without accuracies on validation data, expected "
            "run.validate_every in all of them, such as 1"
        )
    found = runs_in(plan, runs)
    output.mkdir(parents=True, exist_ok=True)
    rows = [
        {"method": title, "seed": seed, "hours": hours, "validation_accuracy": accuracy}
        for title, of_row in found.items()
        for seed, run in zip(plan.seeds, of_row, strict=True)
        for hours, accuracy in run.curve
    ]
    write_atomically(output / "hours.csv", csv_text(rows))
    # What shares its training with another row has the same curve.
    curves: dict[tuple[tuple[tuple[float, float], ...], ...], str] = {}
    for title, of_row in found.items():
        curves.setdefault(tuple(tuple(one.curve) for one in of_row), title)
    alone = {title: found[title] for title in curves.values()}
    write_pictures(output, "hours", draw(alone))
    served = [group for title in found for group in groups_of(title, found[title])]
    tables = time_table(alone, targets or TARGETS), group_table(served)
    write_atomically(output / "hours.md", markdown_of(tables))
    return tables

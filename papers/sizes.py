"""What training costs weak and strong clients, and how accurate it makes them.

A comparison whose rows have ``training.devices``: for each the virtual hours and the
bytes of its training, and the accuracy on their test data of the clients that train,
apart for the weak ones, whose devices are the slower half, and the strong ones. The
speed of a client's device is the same in all rows, whatever network it has there. So is
hardware heterogeneity in Marfoq et al. 2022, Figure 9, where memories differ.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from knnper.errors import RunError
from knnper.files import write_atomically
from knnper.seeding import RandomKey
from knnper.server.observer import RoundRecord
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.label_counts import PARTITION, read_label_counts
from knnper.simulation.partition.split import client_names
from knnper.simulation.reports.estimate import estimate
from knnper.simulation.reports.table import Table
from papers.hours import TimedRun, runs_in, weighted

GIGABYTE = 1e9


Halves = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]
"""The clients that train, and of these the weak and the strong ones."""


def names_in(run: TimedRun) -> Mapping[str, str]:
    """Return what a run calls its clients, by what its results call them."""
    counts = read_label_counts(run.path)
    if counts is None:
        raise RunError(
            f"{run.path} has no {PARTITION}, expected at most 100,000 clients"
        )
    titles = [one.client for one in counts.clients]
    return dict(zip(titles, client_names(len(titles)), strict=True))


def halves(run: TimedRun, seed: int, names: Mapping[str, str]) -> Halves:
    """Return the halves of the clients that train; ``names`` as `names_in` has them."""
    key = RandomKey(seed)
    training = run.clients.dropna(subset="round_seconds")
    devices = [key.device(names[client]) for client in training["client"]]
    ordered = training.iloc[sorted(range(len(devices)), key=devices.__getitem__)]
    middle = len(ordered) // 2
    return ordered, ordered.iloc[:middle], ordered.iloc[middle:]


def _gigabytes(rounds: Sequence[RoundRecord], figure: str) -> float:
    return float(sum(one[figure] for one in rounds)) / GIGABYTE


def size_table(
    found: Mapping[str, Sequence[tuple[TimedRun, Halves]]],
) -> Table:
    """Return hours, bytes and accuracy of each row, over its runs."""
    columns = ["method", "virtual hours", "GB down", "GB up", "seen", "weak", "strong"]
    cells = [columns]
    for title, made in found.items():
        runs, parts = zip(*made, strict=True)
        cells.append(
            [
                title,
                estimate([one.hours for one in runs]).text(1, 2),
                *(
                    estimate([_gigabytes(one.rounds, name) for one in runs]).text(1, 2)
                    for name in ("bytes_down", "bytes_up")
                ),
                *(
                    estimate([weighted(one, "accuracy") for one in group]).text()
                    for group in zip(*parts, strict=True)
                ),
            ]
        )
    return Table.of_cells("Unequal clients", cells)


def write_sizes(plan: Comparison, runs: Path, output: Path) -> Table:
    """Write ``sizes.md``; return the table."""
    found = {
        title: [
            (run, halves(run, seed, names_in(run)))
            for run, seed in zip(of_row, plan.seeds, strict=True)
        ]
        for title, of_row in runs_in(plan, runs).items()
    }
    table = size_table(found)
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "sizes.md", table.as_markdown())
    return table

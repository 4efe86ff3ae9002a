"""Cost of training, and accuracy of weak and strong clients.

For comparisons with ``training.devices`` in their rows. Each row shows the virtual
hours and the bytes of its training, and the test accuracy of the training clients: of
all, of the weak half with the slower devices, and of the strong half. The speed of a
client's device is the same in all rows, independent of its network. Marfoq et al. 2022,
Figure 9, varies the memories in the same way.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from knnper import RandomKey, RunError
from knnper.files import write_atomically
from knnper.server.observer import RoundRecord
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.label_counts import PARTITION, read_label_counts
from knnper.simulation.partition.split import client_names
from knnper.simulation.reports.estimate import estimate
from knnper.simulation.reports.table import Table
from papers.hours import TimedRun, runs_in, weighted

GIGABYTE = 1e9


Halves = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]
"""The training clients: all, the weak half and the strong half."""


def names_in(run: TimedRun) -> Mapping[str, str]:
    """Map the names of clients in results to those in the run."""
    counts = read_label_counts(run.path)
    if counts is None:
        raise RunError(
            f"{run.path} has no {PARTITION}, expected at most 100,000 clients"
        )
    titles = [client_counts.client for client_counts in counts.clients]
    return dict(zip(titles, client_names(len(titles)), strict=True))


def halves(run: TimedRun, seed: int, names: Mapping[str, str]) -> Halves:
    """Divide the training clients into halves; ``names`` comes from `names_in`."""
    key = RandomKey(seed)
    training = run.clients.dropna(subset="round_seconds")
    devices = [key.device(names[client]) for client in training["client"]]
    ordered = training.iloc[sorted(range(len(devices)), key=devices.__getitem__)]
    middle = len(ordered) // 2
    return ordered, ordered.iloc[:middle], ordered.iloc[middle:]


def _gigabytes(rounds: Sequence[RoundRecord], figure: str) -> float:
    return float(sum(record[figure] for record in rounds)) / GIGABYTE


def size_table(
    runs_of: Mapping[str, Sequence[tuple[TimedRun, Halves]]],
) -> Table:
    """Build the table of hours, bytes and accuracy of each row, over its runs."""
    columns = ["method", "virtual hours", "GB down", "GB up", "seen", "weak", "strong"]
    cells = [columns]
    for title, pairs in runs_of.items():
        runs, parts = zip(*pairs, strict=True)
        cells.append(
            [
                title,
                estimate([run.hours for run in runs]).text(1, 2),
                *(
                    estimate([_gigabytes(run.rounds, name) for run in runs]).text(1, 2)
                    for name in ("bytes_down", "bytes_up")
                ),
                *(
                    estimate([weighted(client, "accuracy") for client in group]).text()
                    for group in zip(*parts, strict=True)
                ),
            ]
        )
    return Table.of_cells("Unequal clients", cells)


def write_sizes(plan: Comparison, runs: Path, output: Path) -> Table:
    """Write ``sizes.md``; return the table."""
    runs_of = {
        title: [
            (run, halves(run, seed, names_in(run)))
            for run, seed in zip(of_row, plan.seeds, strict=True)
        ]
        for title, of_row in runs_in(plan, runs).items()
    }
    table = size_table(runs_of)
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "sizes.md", table.as_markdown())
    return table

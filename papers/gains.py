"""Gain of a memory by client, over comparisons, against three properties of clients.

The gain is the accuracy of a client with a memory minus that of the global model on the
same test examples. It is drawn against the client's number of training examples,
against the skew of its labels, ½ Σ_y |p_y - q_y| between its label shares and those of
all clients together, and against the accuracy of the global model. For each property,
the clients of a comparison are divided into five groups of equal size. A point is the
mean over a group, weighted by test examples and averaged over seeds; its bar is the 95
% interval over seeds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from knnper import RunError
from knnper.files import write_atomically
from knnper.simulation.batches.comparison import read_comparison
from knnper.simulation.batches.runner import run_batch
from knnper.simulation.label_counts import read_label_counts
from knnper.simulation.reports.client_table import read_clients
from knnper.simulation.reports.estimate import Estimate, estimate
from knnper.simulation.reports.figure import write_pictures
from knnper.simulation.reports.table import Table, csv_text

Floats = NDArray[np.float64]
NUM_GROUPS = 5
AXES = {
    "size": "examples that a client learns from",
    "skew": "skew of its labels",
    "global": "accuracy of the global model, %",
}


@dataclass(frozen=True)
class ClientGains:
    """The clients of a run, one array entry each."""

    size: Floats
    skew: Floats
    accuracy: Floats
    gain: Floats
    weight: Floats  # test examples

    def along(self, axis: str) -> Floats:
        """Return the values of an axis."""
        return {"size": self.size, "skew": self.skew, "global": self.accuracy}[axis]


@dataclass(frozen=True)
class GainGroup:
    """A group of clients with similar values on one axis."""

    comparison: str
    axis: str
    place: float
    gain: Estimate


def clients_in(run: Path) -> ClientGains:
    """Read the clients of a finished run."""
    counts = read_label_counts(run)
    if counts is None:
        raise RunError(
            f"{run} has no partition.json, expected a finished run of at most 100,000 "
            "clients"
        )
    local = counts.local.astype(np.float64)
    sizes = local.sum(axis=1)
    shares = local / np.maximum(sizes, 1)[:, None]
    skews = np.abs(shares - local.sum(axis=0) / local.sum()).sum(axis=1) / 2
    numbers = {
        client_counts.client: number
        for number, client_counts in enumerate(counts.clients)
    }
    tested = read_clients(run)
    places = tested["client"].map(numbers).to_numpy()
    tested, places = tested[sizes[places] > 0], places[sizes[places] > 0]
    of_global = tested["accuracy_global"].to_numpy()
    gain = tested["accuracy"].to_numpy() - of_global
    weight = tested["num_test"].to_numpy().astype(np.float64)
    return ClientGains(sizes[places], skews[places], of_global, gain, weight)


def groups_of(title: str, runs: Sequence[ClientGains]) -> Iterator[GainGroup]:
    """Yield the groups of a comparison, over runs with different seeds."""
    for axis in AXES:
        everyone = np.concatenate([run.along(axis) for run in runs])
        ends = np.unique(np.quantile(everyone, np.linspace(0, 1, NUM_GROUPS + 1)))
        inner = ends[1:-1]
        members = [np.searchsorted(inner, run.along(axis), "right") for run in runs]
        for number in range(len(inner) + 1):
            members_of = [
                (run, inside)
                for run, group in zip(runs, members, strict=True)
                if (inside := group == number).any()
            ]
            place = np.concatenate(
                [run.along(axis)[inside] for run, inside in members_of]
            )
            gains = [
                float(np.average(run.gain[inside], weights=run.weight[inside]))
                for run, inside in members_of
            ]
            yield GainGroup(title, axis, float(place.mean()), estimate(gains))


def read_gains(files: Sequence[Path], folder: Path, row: str) -> list[GainGroup]:
    """Read the groups of comparisons finished in ``folder``/NAME_OF_FILE."""
    groups = list[GainGroup]()
    for path in files:
        plan = read_comparison(path)
        points = run_batch(plan, folder / path.stem, 1, lambda _: None)
        runs = [point.runs.values() for point in points if point.point.variant == row]
        if not runs:
            raise RunError(f"{path} has no row {row}, expected the name of a row")
        groups += groups_of(plan.name, [clients_in(run) for run in runs[0]])
    return groups


def draw(groups: Sequence[GainGroup]) -> Figure:
    """Draw the gains against each axis."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(AXES), sharey=True)
    for (axis, label), panel in zip(AXES.items(), panels, strict=True):
        scale = 100 if axis == "global" else 1
        for title in dict.fromkeys(group.comparison for group in groups):
            some = [
                group
                for group in groups
                if (group.comparison, group.axis) == (title, axis)
            ]
            panel.errorbar(
                [scale * group.place for group in some],
                [100 * (group.gain.mean or 0) for group in some],
                yerr=[100 * (group.gain.half_width or 0) for group in some],
                marker="o",
                markersize=4,
                capsize=2,
                linewidth=1.2,
                label=title,
            )
        panel.axhline(0, color="0.6", linewidth=0.8)
        panel.set_xlabel(label)
        if axis == "size":
            panel.set_xscale("log")
    panels[0].set_ylabel("gain of a memory, points")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


def write_gains(groups: Sequence[GainGroup], output: Path) -> Table:
    """Write ``gains`` as .csv and pictures; return the table."""
    output.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "comparison": group.comparison,
            "axis": group.axis,
            "place": group.place,
            **group.gain.flat("gain"),
        }
        for group in groups
    ]
    write_atomically(output / "gains.csv", csv_text(rows))
    write_pictures(output, "gains", draw(groups))
    cells = [["comparison", "by", "place", "gain"]]
    cells += [
        [group.comparison, group.axis, f"{group.place:.3g}", group.gain.text()]
        for group in groups
    ]
    return Table.of_cells("What decides whether a memory helps", cells)

"""What decides whether a memory helps: its gain, client by client, over comparisons.

The gain of a client is its accuracy with a memory less that of the global model on the
same test examples. It is drawn against the number of examples that the client learns
from, against the skew of its labels, ½ Σ_y |p_y - q_y| between its shares of the labels
and those of all clients together, and against the accuracy of the global model. Clients
of a comparison are put into five groups of equal size by each; a point is the mean over
the group's clients, weighted by their test examples, averaged over the seeds, and its
bar the 95 % interval over the seeds. What each comparison's clients differ in, labels
or inputs, its name says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from knnper.errors import RunError
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
class Clients:
    """The clients of a run, one entry each."""

    size: Floats
    skew: Floats
    accuracy: Floats
    gain: Floats
    weight: Floats  # test examples

    def along(self, axis: str) -> Floats:
        """Return what an axis shows."""
        return {"size": self.size, "skew": self.skew, "global": self.accuracy}[axis]


@dataclass(frozen=True)
class Group:
    """Clients that are alike in one respect."""

    comparison: str
    axis: str
    place: float
    gain: Estimate


def clients_in(run: Path) -> Clients:
    """Return the clients of a finished run."""
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
    numbers = {one.client: number for number, one in enumerate(counts.clients)}
    tested = read_clients(run)
    places = tested["client"].map(numbers).to_numpy()
    tested, places = tested[sizes[places] > 0], places[sizes[places] > 0]
    of_global = tested["accuracy_global"].to_numpy()
    gain = tested["accuracy"].to_numpy() - of_global
    weight = tested["num_test"].to_numpy().astype(np.float64)
    return Clients(sizes[places], skews[places], of_global, gain, weight)


def groups_of(title: str, runs: Sequence[Clients]) -> Iterator[Group]:
    """Yield the groups of a comparison, whose runs differ in the seed."""
    for axis in AXES:
        everyone = np.concatenate([one.along(axis) for one in runs])
        ends = np.unique(np.quantile(everyone, np.linspace(0, 1, NUM_GROUPS + 1)))
        inner = ends[1:-1]
        members = [np.searchsorted(inner, one.along(axis), "right") for one in runs]
        for number in range(len(inner) + 1):
            found = [
                (one, inside)
                for one, group in zip(runs, members, strict=True)
                if (inside := group == number).any()
            ]
            place = np.concatenate([one.along(axis)[inside] for one, inside in found])
            gains = [
                float(np.average(one.gain[inside], weights=one.weight[inside]))
                for one, inside in found
            ]
            yield Group(title, axis, float(place.mean()), estimate(gains))


def read_gains(files: Sequence[Path], folder: Path, row: str) -> list[Group]:
    """Return the groups of comparisons, each finished in ``folder``/its file's name."""
    found = list[Group]()
    for path in files:
        plan = read_comparison(path)
        made = run_batch(plan, folder / path.stem, 1, lambda _: None)
        runs = [one.runs.values() for one in made if one.point.variant == row]
        if not runs:
            raise RunError(f"{path} has no row {row}, expected the name of a row")
        found += groups_of(plan.name, [clients_in(run) for run in runs[0]])
    return found


def draw(groups: Sequence[Group]) -> Figure:
    """Draw the gains against each axis."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(AXES), sharey=True)
    for (axis, label), panel in zip(AXES.items(), panels, strict=True):
        scale = 100 if axis == "global" else 1
        for title in dict.fromkeys(one.comparison for one in groups):
            some = [
                one for one in groups if (one.comparison, one.axis) == (title, axis)
            ]
            panel.errorbar(
                [scale * one.place for one in some],
                [100 * (one.gain.mean or 0) for one in some],
                yerr=[100 * (one.gain.half_width or 0) for one in some],
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


def write_gains(groups: Sequence[Group], output: Path) -> Table:
    """Write ``gains`` as .csv and pictures; return the table."""
    output.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "comparison": one.comparison,
            "axis": one.axis,
            "place": one.place,
            **one.gain.flat("gain"),
        }
        for one in groups
    ]
    write_atomically(output / "gains.csv", csv_text(rows))
    write_pictures(output, "gains", draw(groups))
    cells = [["comparison", "by", "place", "gain"]]
    cells += [
        [one.comparison, one.axis, f"{one.place:.3g}", one.gain.text()]
        for one in groups
    ]
    return Table.of_cells("What decides whether a memory helps", cells)

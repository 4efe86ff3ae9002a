"""The chart of a partition: every client's examples by label."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from knnper.simulation.label_counts import LabelCounts, read_label_counts
from knnper.simulation.reports.client_table import note_on_sample, sample_names
from knnper.simulation.reports.figure import SERIES, SOFT
from knnper.simulation.reports.picture import WIDTH, DescribedChart, whole_numbers
from knnper.simulation.reports.setups import Setup
from knnper.simulation.reports.text import chart_text

Counts = NDArray[np.int64]
MOST_LABELS_NAMED = 30  # of more labels, only some are named
MOST_CLIENTS_NAMED = 80
_LONGEST_NAME = 14  # characters
_CLASS_HEIGHT = 0.19  # inches
_LEAST_OPAQUE = 0.16


def first_counts(setups: Sequence[Setup]) -> tuple[str, LabelCounts] | None:
    """Return the name and the label counts of the first run that has them."""
    for setup in setups:
        for run in setup.runs:
            if (counts := read_label_counts(run.path)) is not None:
                return run.name, counts
    return None


def ordered_counts(counts: LabelCounts) -> tuple[Counts, int, list[str]]:
    """Order the clients for the chart.

    Seen clients come first; then they are ordered by their most frequent label, then
    by how many examples they have of it.

    Returns
    -------
    Training and validation examples by label, shape (c, M), the number of seen clients
    and the names.
    """
    local = counts.local
    unseen = np.array([not client.seen for client in counts.clients])
    order = np.lexsort((-local.max(axis=1), local.argmax(axis=1), unseen))
    names = [counts.clients[place].client for place in order]
    return local[order].T, int((~unseen).sum()), names


def draw_partition(setups: Sequence[Setup]) -> DescribedChart | None:
    """Draw the first split that a run kept; None where no run did."""
    first = first_counts(setups)
    if first is None:
        return None
    name, counts = first
    sample = sample_names(client.client for client in counts.clients)
    drawn = replace(counts, clients=tuple(counts.clients[place] for place in sample))
    by_class, num_seen, names = ordered_counts(drawn)
    num_classes, num_clients = by_class.shape
    sizes = by_class.sum(axis=0)
    height = 2.4 + min(_CLASS_HEIGHT * num_classes, 6.0)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 2.4], width_ratios=[60, 1])
    above = figure.add_subplot(grid[0, 0])
    below = figure.add_subplot(grid[1, 0], sharex=above)
    above.tick_params(labelbottom=False)
    above.bar(range(num_clients), sizes, width=1.0, color=SERIES[0].light)
    above.set_ylabel("examples")
    whole_numbers(above.yaxis)
    above.grid(visible=False, axis="x")
    _draw_cells(below, by_class, counts.class_names, names)
    _draw_scale(figure.add_subplot(grid[1, 1]), int(by_class.max()))
    if num_seen < num_clients:
        _mark_unseen(above, num_seen)
    every_count = counts.local
    sizes = every_count.sum(axis=1)
    num_labels = (every_count > 0).sum(axis=1)
    return DescribedChart(
        figure,
        f"The split of the run {name}: {len(every_count)} clients, "
        f"{sum(client.seen for client in counts.clients)} of them seen, "
        f"with {sizes.min()} to {sizes.max()} training and validation examples, median "
        f"{np.median(sizes):g}; a client has {np.median(num_labels):g} of the "
        f"{num_classes} labels (median).",
        note_on_sample([("clients", num_clients, len(every_count))]),
    )


def _draw_cells(
    axes: Axes, by_class: Counts, class_names: Sequence[str], names: Sequence[str]
) -> None:
    """Draw one cell a client and label, the denser the more examples it has."""
    share = by_class / max(int(by_class.max()), 1)
    opacity = np.where(by_class > 0, _opacity(share), 0.0)
    axes.imshow(_shaded(opacity), aspect="auto", interpolation="none")
    places = range(0, len(class_names), -(-len(class_names) // MOST_LABELS_NAMED))
    axes.set_yticks(places, [chart_text(class_names[place]) for place in places])
    axes.grid(visible=False)
    axes.set_ylabel("label")
    # Where there is no room for all names, every second, third ... client is named.
    step = -(-len(names) // MOST_CLIENTS_NAMED)
    places = range(0, len(names), step)
    labels = [chart_text(_shortened(names[place])) for place in places]
    axes.set_xticks(places, labels, rotation=90, fontsize=7)
    every = "" if step == 1 else f"; one in {step} is named"
    axes.set_xlabel(f"clients, by their most frequent label{every}")


def _draw_scale(axes: Axes, largest: int) -> None:
    """Draw the scale of the densities of `_draw_cells`."""
    counts = np.linspace(1, max(largest, 1), 64)[:, None]
    axes.imshow(
        _shaded(_opacity(counts / max(largest, 1))),
        aspect="auto",
        origin="lower",
        extent=(0, 1, 1, max(largest, 2)),
    )
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.yaxis.tick_right()
    axes.yaxis.set_label_position("right")
    axes.set_ylabel("examples of a label")
    whole_numbers(axes.yaxis)


def _opacity(share: NDArray[np.float64]) -> NDArray[np.float64]:
    return _LEAST_OPAQUE + (1 - _LEAST_OPAQUE) * share


def _shaded(opacity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return an RGBA image of one colour with an opacity for each cell."""
    image = np.empty((*opacity.shape, 4))
    image[..., :3] = to_rgb(SERIES[0].light)
    image[..., 3] = opacity
    return image


def _shortened(name: str) -> str:
    """Return the name of a client as short as a chart has room for."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _mark_unseen(axes: Axes, num_seen: int) -> None:
    axes.axvline(num_seen - 0.5, color=SOFT.light, linewidth=1.0)
    for text, side, gap in (("seen", "right", -4), ("unseen", "left", 4)):
        axes.annotate(
            text,
            (num_seen - 0.5, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(gap, 0),
            textcoords="offset points",
            horizontalalignment=side,
            verticalalignment="bottom",
        )

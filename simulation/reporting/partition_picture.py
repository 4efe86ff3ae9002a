"""Which client has how much of which label."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from simulation.figures.palette import SERIES, SOFT
from simulation.label_counts import LabelCounts, read_label_counts
from simulation.outside_text import chart_text
from simulation.reporting.drawing import WIDTH, Picture, whole_numbers
from simulation.reporting.setups import Setup

MOST_NAMED = 30
"""Labels that are named; of more, only some are."""

_CLASS_HEIGHT = 0.19  # inches
_LEAST_OPAQUE = 0.16


def first_counts(setups: Sequence[Setup]) -> tuple[str, LabelCounts] | None:
    """Return the first run that kept its label counts, by name, and the counts."""
    for run in (run for setup in setups for run in setup.runs):
        counts = read_label_counts(run.path)
        if counts is not None:
            return run.name, counts
    return None


def ordered_counts(counts: LabelCounts) -> tuple[NDArray[np.int64], int]:
    """Return what clients learn from, and how many of them are seen.

    Returns
    -------
    NDArray
        Training and validation examples by class and client, shape (c, M): seen clients
        first, then by their most frequent label, then by how many they have of it.
    int
        The number of seen clients.
    """
    local = np.array(
        [np.add(one.train, one.validation) for one in counts.clients], dtype=np.int64
    )
    unseen = np.array([not one.seen for one in counts.clients])
    order = np.lexsort((-local.max(axis=1), local.argmax(axis=1), unseen))
    return local[order].T, int((~unseen).sum())


def draw_partition(setups: Sequence[Setup]) -> Picture | None:
    """Draw the first split that a run kept; None where no run did."""
    found = first_counts(setups)
    if found is None:
        return None
    name, counts = found
    by_class, num_seen = ordered_counts(counts)
    height = 1.9 + min(_CLASS_HEIGHT * len(by_class), 6.0)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    sizes, cells = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2.4])
    _draw_sizes(sizes, by_class.sum(axis=0))
    _draw_cells(cells, by_class, counts.class_names)
    _mark_unseen(sizes, num_seen, by_class.shape[1])
    return Picture(figure, _alternative(name, by_class, num_seen))


def _draw_sizes(axes: Axes, sizes: NDArray[np.int64]) -> None:
    axes.bar(range(len(sizes)), sizes, width=1.0, color=SERIES[0].light)
    axes.set_ylabel("examples")
    whole_numbers(axes.yaxis)
    axes.grid(visible=False, axis="x")


def _draw_cells(
    axes: Axes, by_class: NDArray[np.int64], class_names: Sequence[str]
) -> None:
    """Draw one cell a client and label, the denser the more examples it stands for."""
    image = np.empty((*by_class.shape, 4))
    image[..., :3] = to_rgb(SERIES[0].light)
    share = by_class / max(int(by_class.max()), 1)
    opaque = _LEAST_OPAQUE + (1 - _LEAST_OPAQUE) * share
    image[..., 3] = np.where(by_class > 0, opaque, 0.0)
    axes.imshow(image, aspect="auto", interpolation="none")
    step = -(-len(class_names) // MOST_NAMED)
    places = range(0, len(class_names), step)
    names = [chart_text(class_names[place]) for place in places]
    axes.set_yticks(places, names)
    axes.grid(visible=False)
    axes.set_ylabel("label")
    axes.set_xlabel("clients, by their most frequent label")
    whole_numbers(axes.xaxis)


def _mark_unseen(axes: Axes, num_seen: int, num_clients: int) -> None:
    if num_seen == num_clients:
        return
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


def _alternative(name: str, by_class: NDArray[np.int64], num_seen: int) -> str:
    num_classes, num_clients = by_class.shape
    sizes = by_class.sum(axis=0)
    labels = np.median((by_class > 0).sum(axis=0))
    return (
        f"The split of the run {name}: {num_clients} clients, {num_seen} of them seen, "
        f"with {sizes.min()} to {sizes.max()} training and validation examples, median "
        f"{np.median(sizes):g}; a client has {labels:g} of the {num_classes} labels "
        "(median)."
    )

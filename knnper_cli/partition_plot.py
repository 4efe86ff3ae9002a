"""A picture of a partition."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from knnper.errors import RunError

_LARGEST_BUBBLE = 120.0  # square points
_INCHES_PER_CLIENT = 0.12
_INCHES_PER_CLASS = 0.22


def draw_partition(
    class_counts: NDArray[np.int64], class_names: Sequence[str], path: Path
) -> None:
    """Draw a bubble for each client and label, its area the number of examples.

    Parameters
    ----------
    class_counts
        Shape (M, c).
    class_names
        c of them.
    path
        Where to; the ending gives the format.
    """
    num_clients, num_classes = class_counts.shape
    width = min(max(5.0, _INCHES_PER_CLIENT * num_clients), 40.0)
    height = min(max(3.0, _INCHES_PER_CLASS * num_classes), 30.0)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    clients, classes = np.nonzero(class_counts)
    counts = class_counts[clients, classes]
    areas = _LARGEST_BUBBLE * counts / max(counts.max(initial=1), 1)
    axes.scatter(clients, classes, s=areas, c=classes, cmap="tab20", linewidths=0)
    axes.set_yticks(range(num_classes), class_names)
    axes.set_xlabel("client")
    axes.set_ylabel("label")
    axes.set_title(f"{num_clients} clients, {counts.sum()} examples")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RunError(f"the picture {path} cannot be written: {error}") from error

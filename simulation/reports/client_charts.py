"""Charts of single clients: gain over the global model, λ, size of the memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

from knnper.simulation.reports.client_table import (
    clients_of_setup,
    note_on_sample,
    sample_names,
)
from knnper.simulation.reports.figure import SOFT
from knnper.simulation.reports.picture import (
    Colors,
    DescribedChart,
    draw_diagonal,
    first_with_data,
    name_sides,
    small_multiples,
    whole_fractions,
    whole_numbers,
    wrapped,
    write_title,
)
from knnper.simulation.reports.setups import Setup, split_of

NUM_BINS = 20  # of λ over [0, 1]
MOST_CLASSES = 6  # classes of memory sizes
FEWEST_CLIENTS = 5  # in a class
_LARGEST_AREA = 240.0  # square points, of the point with the most clients
_SMALLEST_AREA = 9.0
_WIDE_RANGE = 30.0  # sizes that differ by more than this factor get a logarithmic axis


@dataclass(frozen=True)
class Scatter:
    """How many clients of a setup, of all seeds, have each pair of accuracies.

    Attributes
    ----------
    points
        The number of drawn clients by (seen, accuracy of the global model, own).
    num_better, num_equal, num_worse
        Of all clients, drawn or not, compared with the global model.
    """

    points: Mapping[tuple[bool, float, float], int]
    num_better: int
    num_equal: int
    num_worse: int

    @property
    def num_clients(self) -> int:
        """All clients, drawn or not."""
        return self.num_better + self.num_equal + self.num_worse

    @property
    def verdict(self) -> str:
        """The counts as text."""
        return (
            f"{self.num_better} better, {self.num_equal} equal, {self.num_worse} worse"
        )


def count_points(setup: Setup) -> Scatter | None:
    """Return the scatter of a setup; None where no client's model is its own."""
    clients = clients_of_setup(setup)
    gains = clients["accuracy"] - clients["accuracy_global"]
    num_better, num_worse = int((gains > 0).sum()), int((gains < 0).sum())
    if not setup.has_reference or num_better + num_worse == 0:
        return None
    drawn = clients.iloc[sample_names(clients["client"])]
    points = drawn.groupby(["seen", "accuracy_global", "accuracy"]).size().to_dict()
    num_equal = len(clients) - num_better - num_worse
    return Scatter(points, num_better, num_equal, num_worse)


def scatters(setups: Sequence[Setup]) -> dict[str, Scatter]:
    """Return the scatters by label, of the setups that personalise anything."""
    return first_with_data((setup.label, count_points(setup)) for setup in setups)


def draw_scatters(setups: Sequence[Setup], colors: Colors) -> DescribedChart | None:
    """Draw one panel a setup; None where no client's model is its own."""
    by_label = scatters(setups)
    if not by_label:
        return None
    figure, panels = small_multiples(len(by_label))
    for axes, (label, scatter) in zip(panels, by_label.items(), strict=True):
        draw_diagonal(axes)
        for seen in (True, False):
            _draw_group(axes, scatter.points, seen, colors[label].light)
        write_title(axes, label, scatter.verdict)
        axes.set_aspect("equal")
        whole_fractions(axes, both=True)
    name_sides(panels, "accuracy, global model", "accuracy, own model")
    verdicts = [f"{label}: {scatter.verdict}" for label, scatter in by_label.items()]
    note = note_on_sample(
        (f"clients of {label}", sum(scatter.points.values()), scatter.num_clients)
        for label, scatter in by_label.items()
    )
    text = f"Clients that their own model serves, by method. {'; '.join(verdicts)}."
    return DescribedChart(figure, text, note)


def _draw_group(
    axes: Axes, points: Mapping[tuple[bool, float, float], int], seen: bool, color: str
) -> None:
    """Draw the seen or the unseen clients, the area by the number of clients."""
    most = max(points.values())
    group = [point for point in points if point[0] == seen]
    axes.scatter(
        [point[1] for point in group],
        [point[2] for point in group],
        s=[
            max(_LARGEST_AREA * points[point] / most, _SMALLEST_AREA) for point in group
        ],
        marker="o" if seen else "s",
        facecolors=color if seen else "none",
        edgecolors=color,
        alpha=0.55 if seen else 0.9,
        linewidths=0 if seen else 1.0,
        clip_on=False,
    )


@dataclass(frozen=True)
class WeightCounts:
    """The number of clients with λ = 0, 0.05 ... 1, shape (NUM_BINS + 1,) each."""

    seen: NDArray[np.int64]
    unseen: NDArray[np.int64]
    mean: float  # of λ


def count_weights(clients: pd.DataFrame) -> WeightCounts | None:
    """Count the clients' λ; None where no client has any."""
    mixing = clients.dropna(subset="knn_weight")
    if mixing.empty:
        return None
    bins = (NUM_BINS * mixing["knn_weight"]).round().astype(int)
    seen, unseen = (
        np.bincount(bins[mixing["seen"] == group], minlength=NUM_BINS + 1)
        for group in (True, False)
    )
    return WeightCounts(seen, unseen, float(mixing["knn_weight"].mean()))


def draw_weights(setups: Sequence[Setup], colors: Colors) -> DescribedChart | None:
    """Draw one panel for each setup with a memory; None where there is none."""
    by_label = first_with_data(
        (setup.label, count_weights(clients_of_setup(setup))) for setup in setups
    )
    if not by_label:
        return None
    figure, panels = small_multiples(len(by_label))
    sentences = list[str]()
    for axes, (label, counts) in zip(panels, by_label.items(), strict=True):
        color = colors[label].light
        nothing = np.zeros_like(counts.seen)
        for heights, bottom, face in (
            (counts.seen, nothing, color),
            (counts.unseen, counts.seen, "none"),
        ):
            (occupied,) = np.nonzero(heights)
            axes.bar(
                occupied / NUM_BINS,
                heights[occupied],
                0.8 / NUM_BINS,
                bottom=bottom[occupied],
                facecolor=face,
                edgecolor=color,
                linewidth=1.0,
            )
        axes.set_xlim(-0.05, 1.05)
        axes.grid(visible=False, axis="x")
        write_title(axes, label, f"mean {counts.mean:.2f}")
        bins = ", ".join(
            f"{place / NUM_BINS:g} for {count}"
            for place, count in enumerate(counts.seen + counts.unseen)
            if count
        )
        sentences.append(f"{label}: mean {counts.mean:.2f}; {bins} clients")
    whole_numbers(panels[0].yaxis)
    name_sides(panels, "λ (1: memory alone)", "clients")
    return DescribedChart(figure, f"The clients' λ. {'. '.join(sentences)}.")


@dataclass(frozen=True)
class SizeClass:
    """Clients with memories of about the same size.

    Attributes
    ----------
    smallest, largest, mean_size
        Examples in a memory.
    accuracy, accuracy_global
        Of the clients' own models and of the global one, weighted by test examples.
    """

    smallest: int
    largest: int
    mean_size: float
    num_clients: int
    accuracy: float
    accuracy_global: float

    def describe(self, is_compared: bool) -> str:
        """Return sizes and accuracies as text, the global model's if compared."""
        personal = (
            f"{self.smallest} to {self.largest} examples {100 * self.accuracy:.1f} %"
        )
        reference = f" (global model {100 * self.accuracy_global:.1f} %)"
        return personal + reference if is_compared else personal


def size_classes(clients: pd.DataFrame) -> list[SizeClass]:
    """Split clients into classes of about equal number, the smallest memories first.

    Clients with memories of equal size share a class.
    """
    sized = clients.dropna(subset="num_stored").sort_values("num_stored", kind="stable")
    sizes = sized["num_stored"].astype(int).to_numpy()
    num_classes = min(MOST_CLASSES, max(len(sizes) // FEWEST_CLIENTS, 1))
    numbers = list[int]()
    for place, size in enumerate(sizes):
        number = numbers[-1] if numbers else 0
        is_full = place >= len(sizes) * (number + 1) / num_classes
        numbers.append(number + int(is_full and size != sizes[place - 1]))
    return [
        SizeClass(
            smallest=int(members["num_stored"].iloc[0]),
            largest=int(members["num_stored"].iloc[-1]),
            mean_size=float(members["num_stored"].mean()),
            num_clients=len(members),
            accuracy=_weighted_mean(members, "accuracy"),
            accuracy_global=_weighted_mean(members, "accuracy_global"),
        )
        for _, members in sized.groupby(np.array(numbers, dtype=int))
    ]


def _weighted_mean(clients: pd.DataFrame, column: str) -> float:
    return float(np.average(clients[column], weights=clients["num_test"]))


def draw_store_sizes(setups: Sequence[Setup], colors: Colors) -> DescribedChart | None:
    """Draw one panel for each setup with memories; None where there is none."""
    by_label = first_with_data(
        (setup.label, size_classes(clients_of_setup(setup)) or None) for setup in setups
    )
    if not by_label:
        return None
    figure, panels = small_multiples(len(by_label))
    compared = {setup.label for setup in setups if setup.has_reference}
    for axes, (label, classes) in zip(panels, by_label.items(), strict=True):
        sizes = [size_class.mean_size for size_class in classes]
        personal = [size_class.accuracy for size_class in classes]
        axes.plot(sizes, personal, "o-", color=colors[label].light, markersize=4)
        if label in compared:
            reference = [size_class.accuracy_global for size_class in classes]
            (line,) = axes.plot(sizes, reference, "s--", color=SOFT.light)
            line.set(markersize=3.5, linewidth=1.2)
        axes.set_title(wrapped(label))
        whole_fractions(axes)
    sizes = [part.mean_size for classes in by_label.values() for part in classes]
    if 0 < min(sizes) < max(sizes) / _WIDE_RANGE:
        panels[0].set_xscale("log")
    else:
        whole_numbers(panels[0].xaxis)
    split = split_of(setups)
    name_sides(panels, "examples in the memory", f"{split} accuracy")
    sentences = (
        f"{label}: {', '.join(part.describe(label in compared) for part in classes)}"
        for label, classes in by_label.items()
    )
    beginning = f"{split.capitalize()} accuracy by the size of the memory"
    return DescribedChart(figure, f"{beginning}. {'; '.join(sentences)}.")

"""Learning curves: loss and accuracy by round."""

import contextlib
import io
import itertools
import math
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from xml.etree import ElementTree

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from knnper.simulation.reports.figure import (
    FAINT,
    INK,
    SERIES,
    SOFT,
    Color,
    boxes_told,
    ink,
)
from knnper.simulation.reports.runs import (
    GROUPS,
    ClientRow,
    Row,
    Run,
    Setup,
    chart_text,
    client_rows,
    one_line,
    split_of,
    with_interval,
)
from knnper.simulation.workbench import LabelCounts, read_label_counts
from knnper.strategies.core.predictors import ClientResult, Evaluation

WIDTH = 8.6  # inches, that of the page's text
PANEL_HEIGHT = 2.7  # inches
MOST_SHOWN = 8  # setups in one chart: there are no more colours that are told apart
T = TypeVar("T")
MOST_COLUMNS = 4
_FEWEST_COLUMNS = 3
_TITLE_WIDTH = 26  # characters
_MARGIN = 0.06  # of an axis of fractions beyond its ends, for marks there
_FRACTIONS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_FRACTIONS_BOTH = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Picture:
    """A chart and what it says to whoever cannot see it."""

    figure: Figure
    alternative: str


@boxes_told()
def settle(picture: Picture) -> None:
    """Lay a chart out for good: it is then the same wherever it is written."""
    picture.figure.draw_without_rendering()
    picture.figure.set_layout_engine("none")


@contextlib.contextmanager
def report_style() -> Iterator[None]:
    """Draw as a report does, inside the block."""
    with rc_context(
        {
            **ink(),
            "font.size": 9,
            "axes.titlesize": 9,
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
            "axes.labelsize": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": FAINT.light,
            "grid.linewidth": 0.7,
            "lines.linewidth": 1.6,
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
        }
    ):
        yield


def first_found(found: Iterable[tuple[str, T | None]]) -> dict[str, T]:
    """Return what the first setups have to show, by label; `MOST_SHOWN` at most."""
    there = ((label, one) for label, one in found if one is not None)
    return dict(itertools.islice(there, MOST_SHOWN))


def small_multiples(
    num_panels: int, per_row: int | None = None
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, row by row, on the same axes."""
    columns = per_row or min(max(num_panels, _FEWEST_COLUMNS), MOST_COLUMNS)
    rows = math.ceil(num_panels / columns)
    figure = Figure(figsize=(WIDTH, PANEL_HEIGHT * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for unused in panels[num_panels:]:
        unused.remove()
    for number, panel in enumerate(panels[:num_panels]):
        panel.tick_params(labelbottom=number + columns >= num_panels)
    return figure, panels[:num_panels]


def name_sides(panels: Sequence[Axes], horizontal: str, vertical: str) -> None:
    """Name the axes once: below the lowest panel of a column, left of each row."""
    for panel in panels:
        place = panel.get_subplotspec()
        if place is not None and place.is_first_col():
            panel.set_ylabel(vertical)
        if panel.xaxis.get_tick_params()["labelbottom"]:
            panel.set_xlabel(horizontal)


def whole_fractions(axes: Axes, *, both: bool = False) -> None:
    """Make the vertical axis, or both, one of fractions: all of it, in percent."""
    # One that ends at the data's ends exaggerates differences and cuts marks in half.
    axes.set_ylim(-_MARGIN, 1 + _MARGIN)
    if both:
        axes.set_xlim(-_MARGIN, 1 + _MARGIN)
    for axis in (axes.yaxis, axes.xaxis) if both else (axes.yaxis,):
        axis.set_major_locator(FixedLocator(_FRACTIONS_BOTH if both else _FRACTIONS))
        axis.set_major_formatter(PercentFormatter(1.0, 0, " %"))


def whole_numbers(axis: Axis) -> None:
    """Have ticks at integers alone."""
    axis.set_major_locator(MaxNLocator("auto", steps=(1, 2, 5, 10), integer=True))


def wrapped(label: str) -> str:
    """Return a label, drawn literally, in lines as short as a panel is wide."""
    return "\n".join(map(chart_text, textwrap.wrap(one_line(label), _TITLE_WIDTH)))


def write_title(axes: Axes, title: str, subtitle: str) -> None:
    """Write a title and a smaller line below it."""
    axes.set_title(wrapped(title), pad=16)
    axes.annotate(
        chart_text(subtitle),
        (0.0, 1.0),
        xycoords="axes fraction",
        xytext=(0, 5),
        textcoords="offset points",
        fontsize=8,
    )


def draw_diagonal(axes: Axes) -> None:
    """Draw the line on which both sides are equal, over fractions of 1."""
    axes.plot([0, 1], [0, 1], color=SOFT.light, linewidth=0.9, linestyle=(0, (4, 3)))


def write_at_ends(
    axes: Axes, labels: Sequence[tuple[str, float, Color]], size: float
) -> None:
    """Write labels right of the axes, each near its height, none over another."""
    low, high = axes.get_ylim()
    ordered = sorted(labels, key=lambda label: label[1])
    heights = _apart([(value - low) / (high - low) for _, value, _ in ordered], size)
    for (text, _, color), height in zip(ordered, heights, strict=True):
        axes.annotate(
            text,
            (1.0, height),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            verticalalignment="center",
            color=color.light,
            annotation_clip=False,
        )


def _apart(heights: Sequence[float], distance: float) -> list[float]:
    """Return ascending heights moved up as little as keeps them ``distance`` apart."""
    moved = list[float]()
    for height in heights:
        moved.append(max(height, moved[-1] + distance) if moved else height)
    excess = max(moved[-1] - 1.0, 0.0) if moved else 0.0
    # From the top down again, so that the highest stays inside.
    for place in range(len(moved) - 1, -1, -1):
        limit = 1.0 if place == len(moved) - 1 else moved[place + 1] - distance
        moved[place] = min(moved[place], limit) if excess else moved[place]
    return moved


# What is drawn of ``rounds.jsonl``, with the name of its axis.
FIGURES: Mapping[str, str] = {
    "train_loss": "training loss (nats)",
    "validation_accuracy": "validation accuracy, unpersonalised",
}

_PANEL_HEIGHT = 2.8  # inches
_LINE = 0.062  # of the height of a panel

# A height above the largest loss, which a line at the very top would not have.
_HEADROOM = 1.08


@dataclass(frozen=True)
class Curve:
    """A figure by round."""

    labels: tuple[str, ...]
    rounds: tuple[int, ...]
    by_seed: tuple[tuple[float, ...], ...]

    @property
    def mean(self) -> list[float]:
        """Over the seeds."""
        return [statistics.fmean(values) for values in zip(*self.by_seed, strict=True)]


def learning_curves(setups: Sequence[Setup], figure: str) -> list[Curve]:
    """Return the curves of a figure of ``rounds.jsonl``; none where no run has it."""
    curves = first_found((setup.label, _curve(setup, figure)) for setup in setups)
    found: dict[tuple[object, ...], Curve] = {}
    for label, curve in curves.items():
        values = (curve.rounds, curve.by_seed)
        shared = found[values].labels if values in found else ()
        found[values] = Curve((*shared, label), *values)
    return list(found.values())


def draw_curves(setups: Sequence[Setup], colors: Mapping[str, Color]) -> Picture | None:
    """Draw all learning curves, a panel a figure; None where there are none."""
    curves = {name: learning_curves(setups, name) for name in FIGURES}
    drawn = {name: found for name, found in curves.items() if found}
    if not drawn:
        return None
    size = (WIDTH, _PANEL_HEIGHT * len(drawn))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, found) in zip(panels, drawn.items(), strict=True):
        _draw(axes, found, colors)
        axes.set_title(FIGURES[name])
        if name == "validation_accuracy":
            whole_fractions(axes)
        else:
            axes.set_ylim(0, _HEADROOM * axes.dataLim.ymax or 1.0)
        _name(axes, found, colors)
    whole_numbers(panels[-1].xaxis)
    panels[-1].set_xlabel("round")
    return Picture(figure, _alternative(drawn))


def _curve(setup: Setup, figure: str) -> Curve | None:
    # A run without its file is told of; the others' curves are no worse for that.
    records = [found for run in setup.runs if (found := run.folder.rounds())]
    seeds = [_by_round(one, figure) for one in records]
    rounds = sorted(set.intersection(*map(set, seeds))) if seeds else []
    by_seed = tuple(tuple(seed[one] for one in rounds) for seed in seeds)
    return Curve((setup.label,), tuple(rounds), by_seed) if rounds else None


def _by_round(records: Sequence[Mapping[str, float]], figure: str) -> dict[int, float]:
    return {
        int(record["server_round"]): float(record[figure])
        for record in records
        if record.get(figure) is not None
    }


def _draw(axes: Axes, curves: Sequence[Curve], colors: Mapping[str, Color]) -> None:
    for curve in curves:
        color = colors[curve.labels[0]]
        for values in curve.by_seed if len(curve.by_seed) > 1 else ():
            axes.plot(
                curve.rounds, values, color=color.light, linewidth=0.6, alpha=0.45
            )
        marker = "o" if len(curve.rounds) == 1 else ""
        axes.plot(curve.rounds, curve.mean, color=color.light, marker=marker)


def _name(axes: Axes, curves: Sequence[Curve], colors: Mapping[str, Color]) -> None:
    """Write at its end whose each curve is; the axis must have its limits."""
    labels = [
        ("\n".join(map(wrapped, curve.labels)), curve.mean[-1], colors[curve.labels[0]])
        for curve in curves
    ]
    most_lines = max(label.count("\n") + 1 for label, _, _ in labels)
    write_at_ends(axes, labels, size=_LINE * most_lines)


def _alternative(drawn: Mapping[str, Sequence[Curve]]) -> str:
    told = (
        f"{FIGURES[name]} of {', '.join(curve.labels)} goes from {curve.mean[0]:.3f} "
        f"in round {curve.rounds[0]} to {curve.mean[-1]:.3f} in round "
        f"{curve.rounds[-1]}"
        for name, found in drawn.items()
        for curve in found
    )
    return f"By round: {'; '.join(told)}."


# Colours that follow the page, light or dark, by the name of a CSS variable.
THEMED: Mapping[str, Color] = {
    "ink": INK,
    "soft": SOFT,
    "faint": FAINT,
    **{f"series-{number}": color for number, color in enumerate(SERIES)},
}

_SVG = "{http://www.w3.org/2000/svg}"

_SHADES = {
    "#ffffff": "var(--paper)",
    **{color.light: f"var(--{name})" for name, color in THEMED.items()},
}

_SHADE = re.compile("|".join(map(re.escape, _SHADES)), re.IGNORECASE)


@boxes_told()
def as_svg(picture: Picture, name: str) -> str:
    """Return a chart as an ``svg`` element for the inside of an HTML page."""
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        picture.figure.savefig(text, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # What is about the file, and a style, which would be the whole page's.
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                parent.remove(child)
    for element in root.iter():
        _localise(element, name)
    # The page says how large it is.
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    # Not a title element: browsers would show that over the chart.
    root.set("aria-label", one_line(picture.alternative))
    return ElementTree.tostring(root, encoding="unicode")


def _localise(element: ElementTree.Element, name: str) -> None:
    """Take an element out of its XML document and into the page.

    Each id, and each reference to one, begins with the chart's name.
    """
    element.tag = element.tag.rpartition("}")[2]
    for key, value in list(element.attrib.items()):
        del element.attrib[key]
        plain = key.rpartition("}")[2]
        if key == "id":
            value = f"{name}-{value}"
        elif plain == "href" and value.startswith("#"):
            value = f"#{name}-{value[1:]}"
        value = value.replace("url(#", f"url(#{name}-")
        shaded = _SHADE.sub(lambda found: _SHADES[found.group().lower()], value)
        element.attrib[plain] = shaded


NUM_BINS = 20


@dataclass(frozen=True)
class WeightCounts:
    """How many clients have a λ of about so much."""

    seen: tuple[int, ...]
    unseen: tuple[int, ...]
    mean: float


def weight_counts(clients: Sequence[ClientRow]) -> WeightCounts | None:
    """Return the histogram of the clients that have a λ; None if none has."""
    weights = [one.knn_weight for one in clients if one.knn_weight is not None]
    if not weights:
        return None
    return WeightCounts(
        seen=_counts(clients, seen=True),
        unseen=_counts(clients, seen=False),
        mean=float(np.mean(weights)),
    )


def draw_weights(
    setups: Sequence[Setup], colors: Mapping[str, Color]
) -> Picture | None:
    """Draw a panel a setup that mixes in a memory; None where there is none."""
    found = first_found(
        (setup.label, weight_counts(client_rows(setup))) for setup in setups
    )
    if not found:
        return None
    figure, panels = small_multiples(len(found))
    for axes, (label, counts) in zip(panels, found.items(), strict=True):
        _knn_weights_draw(axes, counts, colors[label])
        write_title(axes, label, f"mean {counts.mean:.2f}")
    whole_numbers(panels[0].yaxis)
    name_sides(panels, "λ (1: memory alone)", "clients")
    return Picture(figure, _knn_weights_alternative(found))


def _counts(clients: Sequence[ClientRow], *, seen: bool) -> tuple[int, ...]:
    bins = [
        round(NUM_BINS * one.knn_weight)
        for one in clients
        if one.knn_weight is not None and one.seen == seen
    ]
    return tuple(np.bincount(bins, minlength=NUM_BINS + 1).tolist())


def _knn_weights_draw(axes: Axes, counts: WeightCounts, color: Color) -> None:
    seen, unseen = np.array(counts.seen), np.array(counts.unseen)
    for heights, bottom, face in (
        (seen, np.zeros_like(seen), color.light),
        (unseen, seen, "none"),
    ):
        (there,) = np.nonzero(heights)
        axes.bar(
            there / NUM_BINS,
            heights[there],
            0.8 / NUM_BINS,
            bottom=bottom[there],
            facecolor=face,
            edgecolor=color.light,
            linewidth=1.0,
        )
    axes.set_xlim(-0.05, 1.05)
    axes.grid(visible=False, axis="x")


def _knn_weights_alternative(found: Mapping[str, WeightCounts]) -> str:
    told = []
    for label, counts in found.items():
        both = np.add(counts.seen, counts.unseen)
        bins = ", ".join(
            f"{place / NUM_BINS:g} for {count}"
            for place, count in enumerate(both)
            if count
        )
        told.append(f"{label}: mean {counts.mean:.2f}; {bins} clients")
    return f"The clients' λ. {'. '.join(told)}."


_ROW_HEIGHT = 0.26  # inches
_FRAME_HEIGHT = 0.9


def draw_averages(
    rows: Sequence[Row], colors: Mapping[str, Color], split: str
) -> Picture | None:
    """Draw the average of every row, a panel a group; None without rows."""
    if not rows:
        return None
    groups = [name for name in GROUPS if any(row.group == name for row in rows)]
    models = list(dict.fromkeys((row.label, row.is_reference) for row in rows))
    size = (WIDTH, _FRAME_HEIGHT + _ROW_HEIGHT * len(models))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True, sharex=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        own = [row for row in rows if row.group == group]
        for row in own:
            color = SOFT if row.is_reference else colors[row.label]
            height = models.index((row.label, row.is_reference))
            _draw_average(axes, height, row, color)
        axes.set_title(f"{group} clients")
        axes.set_xlabel(f"average {split} accuracy (%)")
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.16)
    # Room for the numbers beside the dots is no place for ticks.
    low, high = panels[0].get_xlim()
    panels[0].set_xticks([one for one in panels[0].get_xticks() if 0 <= one <= 100])
    panels[0].set_xlim(low, high)
    names = [chart_text(label) for label, _ in models]
    panels[0].set_yticks(range(len(models)), names)
    panels[0].set_ylim(len(models) - 0.5, -0.5)
    told = (
        f"{row.label} {row.group} {with_interval(row.figures['average'])}"
        for row in rows
    )
    return Picture(figure, f"Average {split} accuracy: {'; '.join(told)}.")


def _draw_average(axes: Axes, height: int, row: Row, color: Color) -> None:
    figure = row.figures["average"]
    if figure.mean is None:
        return
    half_width = figure.half_width or 0.0
    low, high = max(figure.mean - half_width, 0.0), min(figure.mean + half_width, 1.0)
    marker = "D" if row.is_reference else "o"
    axes.plot([100 * low, 100 * high], [height, height], color=color.light)
    axes.plot(100 * figure.mean, height, marker, color=color.light)
    axes.annotate(
        f"{100 * figure.mean:.1f}",
        (100 * high, height),
        xytext=(7, 0),
        textcoords="offset points",
        verticalalignment="center",
        fontsize=8,
    )


MOST_NAMED = 30  # labels that are named; of more, only some are
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
    return Picture(figure, _partition_picture_alternative(name, by_class, num_seen))


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


def _partition_picture_alternative(
    name: str, by_class: NDArray[np.int64], num_seen: int
) -> str:
    num_classes, num_clients = by_class.shape
    sizes = by_class.sum(axis=0)
    labels = np.median((by_class > 0).sum(axis=0))
    return (
        f"The split of the run {name}: {num_clients} clients, {num_seen} of them seen, "
        f"with {sizes.min()} to {sizes.max()} training and validation examples, median "
        f"{np.median(sizes):g}; a client has {labels:g} of the {num_classes} labels "
        "(median)."
    )


_LARGEST_AREA = 90.0  # square points, of all examples in one bin


@dataclass(frozen=True)
class Reliability:
    """The bins of confidence of many test examples, those that hold any."""

    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation]) -> "Reliability":
        """Return the bins of all evaluations pooled."""

        def pooled(bins: str) -> list[float]:
            values = zip(*(getattr(one, bins) for one in evaluations), strict=True)
            return list(map(math.fsum, values))

        counts, correct = pooled("bin_counts"), pooled("bin_correct")
        confidence = pooled("bin_confidence")
        held = [place for place, count in enumerate(counts) if count]
        return cls(
            confidence=tuple(confidence[place] / counts[place] for place in held),
            accuracy=tuple(correct[place] / counts[place] for place in held),
            counts=tuple(int(counts[place]) for place in held),
        )

    @property
    def calibration_error(self) -> float:
        """Mean gap between accuracy and confidence, weighted by the examples."""
        gaps = (
            count * abs(right - sure)
            for count, right, sure in zip(
                self.counts, self.accuracy, self.confidence, strict=True
            )
        )
        return math.fsum(gaps) / sum(self.counts)


@dataclass(frozen=True)
class Panel:
    """One group of clients of a setup."""

    label: str
    group: str
    own: Reliability
    reference: Reliability | None


def panels_of(setups: Sequence[Setup]) -> list[Panel]:
    """Return a panel a group and setup whose clients reported their bins."""
    found = first_found((setup.label, _panels(setup) or None) for setup in setups)
    panels = [panel for panels in found.values() for panel in panels]
    return sorted(panels, key=lambda panel: GROUPS.index(panel.group))


def draw_reliability(
    setups: Sequence[Setup], colors: Mapping[str, Color]
) -> Picture | None:
    """Draw the panels; None where there are none."""
    found = panels_of(setups)
    if not found:
        return None
    # A row a group, where a row has room for all setups.
    num_setups = len({panel.label for panel in found})
    per_row = num_setups if 1 < num_setups <= MOST_COLUMNS else None
    figure, axes_of = small_multiples(len(found), per_row)
    for axes, panel in zip(axes_of, found, strict=True):
        draw_diagonal(axes)
        if panel.reference is not None:
            _reliability_draw(axes, panel.reference, SOFT, "s")
        if panel.own != panel.reference:
            _reliability_draw(axes, panel.own, colors[panel.label], "o")
        write_title(axes, panel.label, f"{panel.group}, {_errors(panel)}")
        axes.set_aspect("equal")
        whole_fractions(axes, both=True)
    name_sides(axes_of, "confidence", "accuracy")
    told = (f"{one.label} ({one.group}): {_errors(one)}" for one in found)
    return Picture(figure, f"Calibration error of all seeds pooled. {'; '.join(told)}.")


def _panels(setup: Setup) -> list[Panel]:
    """Return a panel a group of which any client was tested."""
    tested = [
        result
        for run in setup.runs
        for result in _reported(run)
        if result.personal.num_examples > 0
    ]
    groups = {
        "seen": [result for result in tested if result.seen],
        "unseen": [result for result in tested if not result.seen],
    }
    return [
        Panel(
            setup.label,
            group,
            own=Reliability.of([result.personal for result in results]),
            reference=Reliability.of([result.reference for result in results])
            if setup.has_reference
            else None,
        )
        for group, results in groups.items()
        if results
    ]


def _reported(run: Run) -> list[ClientResult]:
    """Return what clients reported of the last model; none keeps it to itself."""
    model = run.results["training"].get("state_sha256")
    if model is None:
        return []
    handed = run.folder.distributed.reported(model).values()
    return [result for result in handed if result is not None]


def _reliability_draw(axes: Axes, bins: Reliability, color: Color, marker: str) -> None:
    total = sum(bins.counts)
    areas = [_LARGEST_AREA * count / total + 4.0 for count in bins.counts]
    axes.plot(bins.confidence, bins.accuracy, color=color.light, linewidth=1.1)
    axes.scatter(
        bins.confidence,
        bins.accuracy,
        s=areas,
        marker=marker,
        color=color.light,
        linewidths=0,
    )


def _errors(panel: Panel) -> str:
    own = f"error {100 * panel.own.calibration_error:.1f} %"
    if panel.reference is None or panel.own == panel.reference:
        return own
    return f"{own}, global {100 * panel.reference.calibration_error:.1f} %"


_SCATTER_LARGEST_AREA, _SMALLEST_AREA = 240.0, 9.0  # square points
_MARKERS = {True: "o", False: "s"}


@dataclass(frozen=True)
class Scatter:
    """The clients of a setup, of all seeds."""

    points: Mapping[tuple[bool, float, float], int]
    num_better: int
    num_equal: int
    num_worse: int

    @classmethod
    def of(cls, clients: Sequence[ClientRow]) -> "Scatter":
        """Return the scatter of clients."""
        points = Counter(
            (one.seen, one.accuracy_global, one.accuracy) for one in clients
        )
        return cls(
            points,
            num_better=sum(one.accuracy > one.accuracy_global for one in clients),
            num_equal=sum(one.accuracy == one.accuracy_global for one in clients),
            num_worse=sum(one.accuracy < one.accuracy_global for one in clients),
        )

    @property
    def verdict(self) -> str:
        """The counts as text."""
        return (
            f"{self.num_better} better, {self.num_equal} equal, {self.num_worse} worse"
        )


def scatters(setups: Sequence[Setup]) -> dict[str, Scatter]:
    """Return the scatters by label, of the setups that personalise anything."""
    found = (
        (setup.label, Scatter.of(client_rows(setup)) if setup.has_reference else None)
        for setup in setups
    )
    return first_found(
        (label, one if one and one.num_better + one.num_worse else None)
        for label, one in found
    )


def draw_scatters(
    setups: Sequence[Setup], colors: Mapping[str, Color]
) -> Picture | None:
    """Draw a panel a setup; None where no client's model is its own."""
    found = scatters(setups)
    if not found:
        return None
    figure, panels = small_multiples(len(found))
    for axes, (label, scatter) in zip(panels, found.items(), strict=True):
        draw_diagonal(axes)
        _scatter_draw(axes, scatter, colors[label])
        write_title(axes, label, scatter.verdict)
        axes.set_aspect("equal")
        whole_fractions(axes, both=True)
    name_sides(panels, "accuracy, global model", "accuracy, own model")
    told = (f"{label}: {scatter.verdict}" for label, scatter in found.items())
    return Picture(
        figure, f"Clients that their own model serves, by method. {'; '.join(told)}."
    )


def _scatter_draw(axes: Axes, scatter: Scatter, color: Color) -> None:
    most = max(scatter.points.values())
    for seen, marker in _MARKERS.items():
        points = {key: count for key, count in scatter.points.items() if key[0] == seen}
        axes.scatter(
            [point[1] for point in points],
            [point[2] for point in points],
            s=[
                max(_SCATTER_LARGEST_AREA * count / most, _SMALLEST_AREA)
                for count in points.values()
            ],
            marker=marker,
            facecolors=color.light if seen else "none",
            edgecolors=color.light,
            alpha=0.55 if seen else 0.9,
            linewidths=0 if seen else 1.0,
            clip_on=False,
        )


MOST_CLASSES = 6
FEWEST_CLIENTS = 5
_WIDE_RANGE = 30.0


@dataclass(frozen=True)
class SizeClass:
    """Clients with memories of about the same size."""

    smallest: int
    largest: int
    mean_size: float
    num_clients: int
    accuracy: float
    accuracy_global: float


def size_classes(clients: Sequence[ClientRow]) -> list[SizeClass]:
    """Return classes of about as many clients each, the smallest memories first."""
    sized = sorted(
        (one for one in clients if one.num_stored is not None),
        key=lambda one: one.num_stored or 0,
    )
    count = min(MOST_CLASSES, max(len(sized) // FEWEST_CLIENTS, 1))
    classes: list[list[ClientRow]] = []
    for place, client in enumerate(sized):
        is_full = place >= len(sized) * len(classes) / count
        if not classes or (
            is_full and client.num_stored != sized[place - 1].num_stored
        ):
            classes.append([])
        classes[-1].append(client)
    return [_size_class(found) for found in classes]


def draw_store_sizes(
    setups: Sequence[Setup], colors: Mapping[str, Color]
) -> Picture | None:
    """Draw a panel a setup with memories; None where there is none."""
    found = first_found(
        (setup.label, size_classes(client_rows(setup)) or None) for setup in setups
    )
    if not found:
        return None
    figure, panels = small_multiples(len(found))
    compared = {setup.label for setup in setups if setup.has_reference}
    for axes, (label, classes) in zip(panels, found.items(), strict=True):
        sizes = [one.mean_size for one in classes]
        own = [one.accuracy for one in classes]
        axes.plot(sizes, own, "o-", color=colors[label].light, markersize=4)
        if label in compared:
            reference = [one.accuracy_global for one in classes]
            (line,) = axes.plot(sizes, reference, "s--", color=SOFT.light)
            line.set(markersize=3.5, linewidth=1.2)
        axes.set_title(wrapped(label))
        whole_fractions(axes)
    sizes = [one.mean_size for classes in found.values() for one in classes]
    if 0 < min(sizes) < max(sizes) / _WIDE_RANGE:
        panels[0].set_xscale("log")
    else:
        whole_numbers(panels[0].xaxis)
    name_sides(panels, "examples in the memory", f"{split_of(setups)} accuracy")
    told = (
        _told(label, classes, label in compared) for label, classes in found.items()
    )
    beginning = f"{split_of(setups).capitalize()} accuracy by the size of the memory"
    return Picture(figure, f"{beginning}. {'; '.join(told)}.")


def _size_class(clients: Sequence[ClientRow]) -> SizeClass:
    sizes = [one.num_stored or 0 for one in clients]
    tests = [one.num_test for one in clients]
    return SizeClass(
        smallest=min(sizes),
        largest=max(sizes),
        mean_size=statistics.fmean(sizes),
        num_clients=len(clients),
        accuracy=statistics.fmean((one.accuracy for one in clients), tests),
        accuracy_global=statistics.fmean(
            (one.accuracy_global for one in clients), tests
        ),
    )


def _told(label: str, classes: Sequence[SizeClass], is_compared: bool) -> str:
    """Return the numbers of a panel as text."""

    def told(one: SizeClass) -> str:
        own = f"{one.smallest} to {one.largest} examples {100 * one.accuracy:.1f} %"
        reference = f" (global model {100 * one.accuracy_global:.1f} %)"
        return own + reference if is_compared else own

    return f"{label}: {', '.join(map(told, classes))}"

"""The charts of a report, each with a text that says the same."""

import io
import itertools
import math
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from xml.etree import ElementTree

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from knnper.server.results import PooledBins, Total
from knnper.simulation.label_counts import LabelCounts, read_label_counts
from knnper.simulation.reports.accuracy_table import ModelRow
from knnper.simulation.reports.client_table import (
    ClientRow,
    client_rows,
    note_on_sample,
    sampled,
)
from knnper.simulation.reports.figure import (
    FAINT,
    INK,
    SERIES,
    SOFT,
    Color,
    boxes_told,
    ink,
)
from knnper.simulation.reports.finished_run import GROUPS
from knnper.simulation.reports.setups import Setup, split_of
from knnper.simulation.reports.text import chart_text, one_line

WIDTH = 8.6  # inches, that of the page's text
PANEL_HEIGHT = 2.7  # inches
MOST_SHOWN = 8  # setups in one chart: there are no more colours that are told apart
T = TypeVar("T")
Colors = Mapping[str, Color]  # by the label of a setup
Counts = NDArray[np.int64]
MOST_COLUMNS = 4
_FEWEST_COLUMNS = 3
_TITLE_WIDTH = 26  # characters
_MARGIN = 0.06  # of an axis of fractions beyond its ends, for marks there
_FRACTIONS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_FRACTIONS_BOTH = (0.0, 0.5, 1.0)

# What is drawn of ``rounds.jsonl``, with the name of its axis.
FIGURES: Mapping[str, str] = {
    "train_loss": "training loss (nats)",
    "validation_accuracy": "validation accuracy, unpersonalised",
}
_PERSONAL = "validation_accuracy_personal"
_BOTH = "validation accuracy, personalised; dashed: unpersonalised"
_CURVES_HEIGHT = 2.8  # inches
_LINE = 0.062  # of the height of a panel

# A height above the largest loss, which a line at the very top would not have.
_HEADROOM = 1.08

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
NUM_BINS = 20
_ROW_HEIGHT, _FRAME_HEIGHT = 0.26, 0.9  # inches
MOST_NAMED = 30  # labels that are named; of more, only some are
MOST_CLIENTS_NAMED = 80
_LONGEST_NAME = 14  # characters
_CLASS_HEIGHT = 0.19  # inches
_LEAST_OPAQUE = 0.16
_BIN_AREA = 90.0  # square points, of all examples in one bin
_LARGEST_AREA, _SMALLEST_AREA = 240.0, 9.0  # square points
MOST_CLASSES, FEWEST_CLIENTS = 6, 5
_WIDE_RANGE = 30.0


@dataclass(frozen=True)
class Picture:
    """A chart and what it says to whoever cannot see it."""

    figure: Figure
    alternative: str
    note: str = ""  # on what is not drawn


def report_style() -> AbstractContextManager[None]:
    """Draw as a report does, inside the block."""
    return rc_context(
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
    )


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


@dataclass(frozen=True)
class Curve:
    """A figure by round."""

    labels: tuple[str, ...]
    rounds: tuple[int, ...]
    by_seed: tuple[tuple[float, ...], ...]
    setup: str = ""  # whose colour it has
    is_dashed: bool = False

    @property
    def mean(self) -> list[float]:
        """Over the seeds."""
        return [statistics.fmean(values) for values in zip(*self.by_seed, strict=True)]


def learning_curves(setups: Sequence[Setup], figure: str) -> list[Curve]:
    """Return the curves of a figure of ``rounds.jsonl``; none where no run has it."""
    return _shared((label, label, one) for label, one in _found(setups, figure).items())


def validation_curves(setups: Sequence[Setup]) -> list[Curve]:
    """Return those of the personalised models, and of global ones that differ."""
    own = _found(setups, _PERSONAL)
    if not own:
        return learning_curves(setups, "validation_accuracy")
    of_global = [
        (label, f"{label}, unpersonalised", values)
        for label, values in _found(setups, "validation_accuracy").items()
        if own.get(label) != values
    ]
    return [
        *_shared((label, label, values) for label, values in own.items()),
        *(replace(one, is_dashed=True) for one in _shared(of_global)),
    ]


def _found(setups: Sequence[Setup], figure: str) -> dict[str, tuple[Any, ...]]:
    return first_found((setup.label, _curve(setup, figure)) for setup in setups)


def _shared(found: Iterable[tuple[str, str, tuple[Any, ...]]]) -> list[Curve]:
    """Return one curve of equal values, each of a setup and with a name."""
    curves: dict[tuple[Any, ...], Curve] = {}
    for setup, name, values in found:
        named = curves.setdefault(values, Curve((), values[0], values[1], setup))
        curves[values] = replace(named, labels=(*named.labels, name))
    return list(curves.values())


def _curve(setup: Setup, figure: str) -> tuple[Any, ...] | None:
    """Return the rounds that all seeds have, and the values of each seed."""
    # A run without its file is told of; the others' curves are no worse for that.
    seeds = [
        {
            int(record["server_round"]): float(record[figure])
            for record in records
            if record.get(figure) is not None
        }
        for run in setup.runs
        if (records := run.folder.rounds())
    ]
    rounds = sorted(set.intersection(*map(set, seeds))) if seeds else []
    by_seed = tuple(tuple(seed[one] for one in rounds) for seed in seeds)
    return (tuple(rounds), by_seed) if rounds else None


def draw_curves(setups: Sequence[Setup], colors: Colors) -> Picture | None:
    """Draw all learning curves, a panel a figure; None where there are none."""
    curves = {
        "train_loss": learning_curves(setups, "train_loss"),
        "validation_accuracy": validation_curves(setups),
    }
    drawn = {name: found for name, found in curves.items() if found}
    titles = dict(FIGURES)
    if _found(setups, _PERSONAL):
        titles["validation_accuracy"] = _BOTH
    if not drawn:
        return None
    size, told = (WIDTH, _CURVES_HEIGHT * len(drawn)), list[str]()
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, found) in zip(panels, drawn.items(), strict=True):
        for curve in found:
            color = colors[curve.setup].light
            for values in curve.by_seed if len(curve.by_seed) > 1 else ():
                axes.plot(curve.rounds, values, color=color, linewidth=0.6, alpha=0.45)
            marker = "o" if len(curve.rounds) == 1 else ""
            style = "--" if curve.is_dashed else "-"
            axes.plot(curve.rounds, curve.mean, style, color=color, marker=marker)
            told.append(
                f"{titles[name]} of {', '.join(curve.labels)} goes from "
                f"{curve.mean[0]:.3f} in round {curve.rounds[0]} to "
                f"{curve.mean[-1]:.3f} in round {curve.rounds[-1]}"
            )
        axes.set_title(titles[name])
        if name == "validation_accuracy":
            whole_fractions(axes)
        else:
            axes.set_ylim(0, _HEADROOM * axes.dataLim.ymax or 1.0)
        _name_curves(axes, found, colors)
    whole_numbers(panels[-1].xaxis)
    panels[-1].set_xlabel("round")
    return Picture(figure, f"By round: {'; '.join(told)}.")


def _name_curves(axes: Axes, curves: Sequence[Curve], colors: Colors) -> None:
    """Write right of the axes, which have limits, whose each curve is at its end."""
    low, high = axes.get_ylim()
    ordered = sorted(curves, key=lambda curve: curve.mean[-1])
    texts = ["\n".join(map(wrapped, curve.labels)) for curve in ordered]
    size = _LINE * max(text.count("\n") + 1 for text in texts)
    heights = _apart([(one.mean[-1] - low) / (high - low) for one in ordered], size)
    for curve, text, height in zip(ordered, texts, heights, strict=True):
        axes.annotate(
            text,
            (1.0, height),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            verticalalignment="center",
            color=colors[curve.setup].light,
            annotation_clip=False,
        )


def _apart(heights: Sequence[float], distance: float) -> list[float]:
    """Return ascending heights moved up as little as keeps them ``distance`` apart."""
    moved = list[float]()
    for height in heights:
        moved.append(max(height, moved[-1] + distance) if moved else height)
    if moved and moved[-1] > 1:
        # From the top down again, so that the highest stays inside.
        limit = 1.0
        for place in reversed(range(len(moved))):
            moved[place] = min(moved[place], limit)
            limit = moved[place] - distance
    return moved


@boxes_told()
def as_svg(picture: Picture, name: str) -> str:
    """Return a chart as an ``svg`` element for the inside of an HTML page."""
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        picture.figure.savefig(text, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())
    for element in root.iter():
        for child in list(element):
            # What is about the file, and a style, which would be the whole page's.
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                element.remove(child)
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


def weight_counts(clients: Iterable[ClientRow]) -> tuple[Counts, Counts, float] | None:
    """Return how many seen and unseen clients have λ = 0, 0.05 ... 1, and its mean."""
    counts, total = np.zeros((2, NUM_BINS + 1), np.int64), Total()
    for one in clients:
        if one.knn_weight is not None:
            counts[int(not one.seen), round(NUM_BINS * one.knn_weight)] += 1
            total.add(one.knn_weight)
    num_clients = int(counts.sum())
    return (*counts, total.value / num_clients) if num_clients else None


def draw_weights(setups: Sequence[Setup], colors: Colors) -> Picture | None:
    """Draw a panel a setup that mixes in a memory; None where there is none."""
    found = first_found(
        (setup.label, weight_counts(client_rows(setup))) for setup in setups
    )
    if not found:
        return None
    figure, panels = small_multiples(len(found))
    told = list[str]()
    for axes, (label, (seen, unseen, mean)) in zip(panels, found.items(), strict=True):
        color = colors[label].light
        nothing = np.zeros_like(seen)
        for heights, bottom, face in ((seen, nothing, color), (unseen, seen, "none")):
            (there,) = np.nonzero(heights)
            axes.bar(
                there / NUM_BINS,
                heights[there],
                0.8 / NUM_BINS,
                bottom=bottom[there],
                facecolor=face,
                edgecolor=color,
                linewidth=1.0,
            )
        axes.set_xlim(-0.05, 1.05)
        axes.grid(visible=False, axis="x")
        write_title(axes, label, f"mean {mean:.2f}")
        bins = ", ".join(
            f"{place / NUM_BINS:g} for {count}"
            for place, count in enumerate(seen + unseen)
            if count
        )
        told.append(f"{label}: mean {mean:.2f}; {bins} clients")
    whole_numbers(panels[0].yaxis)
    name_sides(panels, "λ (1: memory alone)", "clients")
    return Picture(figure, f"The clients' λ. {'. '.join(told)}.")


def draw_averages(
    rows: Sequence[ModelRow], colors: Colors, split: str
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
        for row in (one for one in rows if one.group == group):
            color = SOFT if row.is_reference else colors[row.label]
            _draw_average(axes, models.index((row.label, row.is_reference)), row, color)
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
    told = [
        f"{row.label} {row.group} {row.figures['average'].percent()}" for row in rows
    ]
    return Picture(figure, f"Average {split} accuracy: {'; '.join(told)}.")


def _draw_average(axes: Axes, height: int, row: ModelRow, color: Color) -> None:
    figure = row.figures["average"]
    if figure.mean is None:
        return
    half_width = figure.half_width or 0.0
    low, high = max(figure.mean - half_width, 0.0), min(figure.mean + half_width, 1.0)
    marker = "D" if row.is_reference else "o"
    style = ":" if figure.mark else "-"
    axes.plot([100 * low, 100 * high], [height, height], style, color=color.light)
    axes.plot(100 * figure.mean, height, marker, color=color.light)
    axes.annotate(
        f"{100 * figure.mean:.1f}",
        (100 * high, height),
        xytext=(7, 0),
        textcoords="offset points",
        verticalalignment="center",
        fontsize=8,
    )


def first_counts(setups: Sequence[Setup]) -> tuple[str, LabelCounts] | None:
    """Return the first run that kept its label counts, by name, and the counts."""
    runs = (run for setup in setups for run in setup.runs)
    found = ((run.name, read_label_counts(run.path)) for run in runs)
    return next(((name, counts) for name, counts in found if counts), None)


def ordered_counts(counts: LabelCounts) -> tuple[Counts, int, list[str]]:
    """Return what clients learn from, how many of them are seen, and their names.

    The counts have shape (c, M).

    Seen clients come first, then by their most frequent label, then by how many
    examples they have of it.
    """
    local = counts.local
    unseen = np.array([not one.seen for one in counts.clients])
    order = np.lexsort((-local.max(axis=1), local.argmax(axis=1), unseen))
    names = [counts.clients[place].client for place in order]
    return local[order].T, int((~unseen).sum()), names


def draw_partition(setups: Sequence[Setup]) -> Picture | None:
    """Draw the first split that a run kept; None where no run did."""
    found = first_counts(setups)
    if found is None:
        return None
    name, counts = found
    drawn = replace(counts, clients=tuple(sampled(counts.clients)))
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
    of_all = counts.local
    sizes, num_labels = of_all.sum(axis=1), (of_all > 0).sum(axis=1)
    return Picture(
        figure,
        f"The split of the run {name}: {len(of_all)} clients, "
        f"{sum(one.seen for one in counts.clients)} of them seen, "
        f"with {sizes.min()} to {sizes.max()} training and validation examples, median "
        f"{np.median(sizes):g}; a client has {np.median(num_labels):g} of the "
        f"{num_classes} labels (median).",
        note_on_sample([("clients", num_clients, len(of_all))]),
    )


def _draw_cells(
    axes: Axes, by_class: Counts, class_names: Sequence[str], names: Sequence[str]
) -> None:
    """Draw one cell a client and label, the denser the more examples it stands for."""
    share = by_class / max(int(by_class.max()), 1)
    opacity = np.where(by_class > 0, _opacity(share), 0.0)
    axes.imshow(_shaded(opacity), aspect="auto", interpolation="none")
    places = range(0, len(class_names), -(-len(class_names) // MOST_NAMED))
    axes.set_yticks(places, [chart_text(class_names[place]) for place in places])
    axes.grid(visible=False)
    axes.set_ylabel("label")
    # Each client is named where there is room, else every second, third ...
    step = -(-len(names) // MOST_CLIENTS_NAMED)
    places = range(0, len(names), step)
    shown = [chart_text(_shortened(names[place])) for place in places]
    axes.set_xticks(places, shown, rotation=90, fontsize=7)
    every = "" if step == 1 else f"; one in {step} is named"
    axes.set_xlabel(f"clients, by their most frequent label{every}")


def _draw_scale(axes: Axes, largest: int) -> None:
    """Draw how many examples each density of `_draw_cells` stands for."""
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
    """Return the first colour of a series with an opacity for each cell, RGBA."""
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


@dataclass(frozen=True)
class Reliability:
    """The bins of confidence of many test examples, those that hold any."""

    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, pooled: PooledBins) -> "Reliability":
        """Return the bins of evaluations that hold any."""
        confidence, correct, counts = pooled.confidence, pooled.correct, pooled.counts
        held = [place for place, count in enumerate(counts) if count > 0]
        return cls(
            tuple(confidence[place] / counts[place] for place in held),
            tuple(correct[place] / counts[place] for place in held),
            tuple(counts[place] for place in held),
        )

    @property
    def calibration_error(self) -> float:
        """Mean gap between accuracy and confidence, weighted by the examples."""
        bins = zip(self.counts, self.accuracy, self.confidence, strict=True)
        gaps = (count * abs(right - sure) for count, right, sure in bins)
        return math.fsum(gaps) / sum(self.counts)


@dataclass(frozen=True)
class Panel:
    """One group of clients of a setup."""

    label: str
    group: str
    own: Reliability
    reference: Reliability | None

    @property
    def errors(self) -> str:
        """Both calibration errors as text."""
        own = f"error {100 * self.own.calibration_error:.1f} %"
        if self.reference is None or self.own == self.reference:
            return own
        return f"{own}, global {100 * self.reference.calibration_error:.1f} %"


def panels_of(setups: Sequence[Setup]) -> list[Panel]:
    """Return a panel a group and setup whose clients reported their bins."""
    found = first_found((setup.label, _panels(setup) or None) for setup in setups)
    panels = [panel for panels in found.values() for panel in panels]
    return sorted(panels, key=lambda panel: GROUPS.index(panel.group))


def _panels(setup: Setup) -> list[Panel]:
    """Return a panel a group of which any client was tested."""
    pooled = {group: (PooledBins(), PooledBins()) for group in GROUPS}
    for run in setup.runs:
        for result in run.client_results():
            if result.personal.num_examples > 0:
                own, reference = pooled["seen" if result.seen else "unseen"]
                own.add(result.personal)
                reference.add(result.reference)
    return [
        Panel(
            setup.label,
            group,
            Reliability.of(own),
            Reliability.of(reference) if setup.has_reference else None,
        )
        for group, (own, reference) in pooled.items()
        if any(own.counts)
    ]


def draw_reliability(setups: Sequence[Setup], colors: Colors) -> Picture | None:
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
            _draw_bins(axes, panel.reference, SOFT, "s")
        if panel.own != panel.reference:
            _draw_bins(axes, panel.own, colors[panel.label], "o")
        write_title(axes, panel.label, f"{panel.group}, {panel.errors}")
        axes.set_aspect("equal")
        whole_fractions(axes, both=True)
    name_sides(axes_of, "confidence", "accuracy")
    told = (f"{one.label} ({one.group}): {one.errors}" for one in found)
    return Picture(figure, f"Calibration error of all seeds pooled. {'; '.join(told)}.")


def _draw_bins(axes: Axes, bins: Reliability, color: Color, marker: str) -> None:
    at, shade = (bins.confidence, bins.accuracy), color.light
    areas = [_BIN_AREA * count / sum(bins.counts) + 4.0 for count in bins.counts]
    axes.plot(*at, color=shade, linewidth=1.1)
    axes.scatter(*at, s=areas, marker=marker, color=shade, linewidths=0)


@dataclass(frozen=True)
class Scatter:
    """How many clients of a setup, of all seeds, are at each point."""

    points: Mapping[tuple[bool, float, float], int]  # of those that are drawn
    num_better: int
    num_equal: int
    num_worse: int

    @property
    def num_clients(self) -> int:
        """All, drawn or not."""
        return self.num_better + self.num_equal + self.num_worse

    @property
    def verdict(self) -> str:
        """The counts as text."""
        return (
            f"{self.num_better} better, {self.num_equal} equal, {self.num_worse} worse"
        )


def scatters(setups: Sequence[Setup]) -> dict[str, Scatter]:
    """Return the scatters by label, of the setups that personalise anything."""

    def scatter(setup: Setup) -> Scatter | None:
        signs: Counter[int] = Counter()

        def counted() -> Iterator[ClientRow]:
            for one in client_rows(setup):
                gain = one.accuracy - one.accuracy_global
                signs[(gain > 0) - (gain < 0)] += 1
                yield one

        points = Counter(
            (one.seen, one.accuracy_global, one.accuracy) for one in sampled(counted())
        )
        if not setup.has_reference or signs[1] + signs[-1] == 0:
            return None
        return Scatter(points, signs[1], signs[0], signs[-1])

    return first_found((setup.label, scatter(setup)) for setup in setups)


def draw_scatters(setups: Sequence[Setup], colors: Colors) -> Picture | None:
    """Draw a panel a setup; None where no client's model is its own."""
    found = scatters(setups)
    if not found:
        return None
    figure, panels = small_multiples(len(found))
    for axes, (label, scatter) in zip(panels, found.items(), strict=True):
        draw_diagonal(axes)
        for seen in (True, False):
            _draw_clients(axes, scatter.points, seen, colors[label].light)
        write_title(axes, label, scatter.verdict)
        axes.set_aspect("equal")
        whole_fractions(axes, both=True)
    name_sides(panels, "accuracy, global model", "accuracy, own model")
    told = "; ".join(f"{label}: {scatter.verdict}" for label, scatter in found.items())
    note = note_on_sample(
        (f"clients of {label}", sum(one.points.values()), one.num_clients)
        for label, one in found.items()
    )
    text = f"Clients that their own model serves, by method. {told}."
    return Picture(figure, text, note)


def _draw_clients(
    axes: Axes, points: Mapping[tuple[bool, float, float], int], seen: bool, color: str
) -> None:
    most, group = max(points.values()), [point for point in points if point[0] == seen]
    axes.scatter(
        [point[1] for point in group],
        [point[2] for point in group],
        s=[max(_LARGEST_AREA * points[one] / most, _SMALLEST_AREA) for one in group],
        marker="o" if seen else "s",
        facecolors=color if seen else "none",
        edgecolors=color,
        alpha=0.55 if seen else 0.9,
        linewidths=0 if seen else 1.0,
        clip_on=False,
    )


@dataclass(frozen=True)
class SizeClass:
    """Clients with memories of about the same size."""

    smallest: int
    largest: int
    mean_size: float
    num_clients: int
    accuracy: float
    accuracy_global: float

    def told(self, is_compared: bool) -> str:
        """Return its numbers as text."""
        own = f"{self.smallest} to {self.largest} examples {100 * self.accuracy:.1f} %"
        reference = f" (global model {100 * self.accuracy_global:.1f} %)"
        return own + reference if is_compared else own


def size_classes(clients: Iterable[ClientRow]) -> list[SizeClass]:
    """Return classes of about as many clients each, the smallest memories first."""
    sized = [(one.num_stored, one) for one in clients if one.num_stored is not None]
    sized.sort(key=lambda one: one[0])
    count = min(MOST_CLASSES, max(len(sized) // FEWEST_CLIENTS, 1))
    classes: list[list[tuple[int, ClientRow]]] = []
    for place, client in enumerate(sized):
        is_full = place >= len(sized) * len(classes) / count
        if not classes or (is_full and client[0] != sized[place - 1][0]):
            classes.append([])
        classes[-1].append(client)
    return [
        SizeClass(
            found[0][0],
            found[-1][0],
            statistics.fmean(size for size, _ in found),
            len(found),
            *(
                statistics.fmean(
                    [getattr(one, name) for _, one in found],
                    [one.num_test for _, one in found],
                )
                for name in ("accuracy", "accuracy_global")
            ),
        )
        for found in classes
    ]


def draw_store_sizes(setups: Sequence[Setup], colors: Colors) -> Picture | None:
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
        f"{label}: {', '.join(one.told(label in compared) for one in classes)}"
        for label, classes in found.items()
    )
    beginning = f"{split_of(setups).capitalize()} accuracy by the size of the memory"
    return Picture(figure, f"{beginning}. {'; '.join(told)}.")

"""What the charts of a report have in common."""

import contextlib
import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, PercentFormatter

from simulation.figures.lettering import boxes_told, font_families
from simulation.figures.palette import FAINT, INK, SOFT, Color
from simulation.outside_text import chart_text, one_line

WIDTH = 8.6  # inches, that of the page's text
PANEL_HEIGHT = 2.7  # inches
MOST_SHOWN = 8
"""Setups in one chart: there are no more colours that are told apart."""

T = TypeVar("T")

MOST_COLUMNS = 4
_FEWEST_COLUMNS = 3
_TITLE_WIDTH = 26  # characters
_MARGIN = 0.06
"""Of an axis of fractions beyond its ends, for marks there."""

_FRACTIONS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_FRACTIONS_BOTH = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Picture:
    """A chart and what it says to whoever cannot see it.

    Attributes
    ----------
    figure
        The chart.
    alternative
        Its message with the main numbers, as sentences.
    """

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
            "font.family": font_families(),
            "font.size": 9,
            "axes.titlesize": 9,
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
            "axes.labelsize": 9,
            "axes.labelcolor": INK.light,
            "axes.titlecolor": INK.light,
            "axes.edgecolor": SOFT.light,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": FAINT.light,
            "grid.linewidth": 0.7,
            "text.color": INK.light,
            "xtick.color": SOFT.light,
            "ytick.color": SOFT.light,
            "xtick.labelcolor": INK.light,
            "ytick.labelcolor": INK.light,
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
    """Return a figure and its panels, row by row, on the same axes.

    Parameters
    ----------
    num_panels
        One at least.
    per_row
        Panels in a row; by default as many as can be read.
    """
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
    """Make the vertical axis, or both, one of fractions: all of it, in percent.

    An axis that ends at the data's ends makes small differences look large, and cuts
    the marks there in half.
    """
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
    """Write labels right of the axes, each near its height, none over another.

    Parameters
    ----------
    labels
        Text, height in data units, and colour.
    size
        Height of a line as a part of that of the axes.
    """
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

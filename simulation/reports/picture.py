"""Building blocks of a report's charts: panels, axes, titles, and SVG for the page."""

import io
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar
from xml.etree import ElementTree

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, PercentFormatter

from knnper.simulation.reports.figure import (
    FAINT,
    INK,
    SERIES,
    SOFT,
    Color,
    ink,
    logging_missing_glyphs,
)
from knnper.simulation.reports.text import chart_text, one_line

T = TypeVar("T")
Colors = Mapping[str, Color]  # by the label of a setup
WIDTH = 8.6  # inches, the width of the page's text
PANEL_HEIGHT = 2.7  # inches
MOST_SHOWN = 8  # setups in one chart: more colours are hard to distinguish
MOST_COLUMNS = 4
_FEWEST_COLUMNS = 3
_TITLE_WIDTH = 26  # characters
_MARGIN = 0.06  # room beyond 0 and 1 on an axis of fractions, for marks at its ends
_TICKS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_FEW_TICKS = (0.0, 0.5, 1.0)

# Colours that follow the page's light or dark mode, by the name of a CSS variable.
THEMED: Mapping[str, Color] = {
    "ink": INK,
    "soft": SOFT,
    "faint": FAINT,
    **{f"series-{number}": color for number, color in enumerate(SERIES)},
}
_SVG = "{http://www.w3.org/2000/svg}"
_VARIABLES = {
    "#ffffff": "var(--paper)",
    **{color.light: f"var(--{name})" for name, color in THEMED.items()},
}
_THEMED_COLOR = re.compile("|".join(map(re.escape, _VARIABLES)), re.IGNORECASE)


@dataclass(frozen=True)
class DescribedChart:
    """A chart with a text for readers who cannot see it.

    Attributes
    ----------
    alternative
        The chart's numbers as a sentence.
    note
        What the chart leaves out; empty where it shows everything.
    """

    figure: Figure
    alternative: str
    note: str = ""


def report_style() -> AbstractContextManager[None]:
    """Apply the report's fonts, colours and lines inside the block."""
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


def first_with_data(labelled: Iterable[tuple[str, T | None]]) -> dict[str, T]:
    """Return by label the first `MOST_SHOWN` values that are not None."""
    known = ((label, value) for label, value in labelled if value is not None)
    return dict(itertools.islice(known, MOST_SHOWN))


def small_multiples(
    num_panels: int, per_row: int | None = None
) -> tuple[Figure, list[Axes]]:
    """Make a figure of panels with common axes; return it and its panels by row."""
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
    """Let the vertical axis, or both, reach from 0 to 100 %."""
    # An axis cut at the data's ends exaggerates differences and clips marks.
    axes.set_ylim(-_MARGIN, 1 + _MARGIN)
    if both:
        axes.set_xlim(-_MARGIN, 1 + _MARGIN)
    for axis in (axes.yaxis, axes.xaxis) if both else (axes.yaxis,):
        axis.set_major_locator(FixedLocator(_FEW_TICKS if both else _TICKS))
        axis.set_major_formatter(PercentFormatter(1.0, 0, " %"))


def whole_numbers(axis: Axis) -> None:
    """Place ticks at integers only."""
    axis.set_major_locator(MaxNLocator("auto", steps=(1, 2, 5, 10), integer=True))


def wrapped(label: str) -> str:
    """Break a label into lines that fit a panel, with formulas drawn literally."""
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
    """Draw the line of equal values over [0, 1]."""
    axes.plot([0, 1], [0, 1], color=SOFT.light, linewidth=0.9, linestyle=(0, (4, 3)))


@logging_missing_glyphs()
def as_svg(picture: DescribedChart, name: str) -> str:
    """Return a chart as an ``svg`` element to embed in an HTML page."""
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        picture.figure.savefig(text, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())
    for element in root.iter():
        for child in list(element):
            # Metadata is about the file, and a style would apply to the whole page.
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                element.remove(child)
        _localise(element, name)
    # The page sets the size.
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    # A title element instead would pop up over the chart.
    root.set("aria-label", one_line(picture.alternative))
    return ElementTree.tostring(root, encoding="unicode")


def _localise(element: ElementTree.Element, name: str) -> None:
    """Make an element of an SVG file one of the page.

    Namespaces go, ids and references to them get the chart's name as a prefix, and
    colours become CSS variables.
    """
    element.tag = element.tag.rpartition("}")[2]
    for key, value in list(element.attrib.items()):
        del element.attrib[key]
        plain_key = key.rpartition("}")[2]
        if key == "id":
            value = f"{name}-{value}"
        elif plain_key == "href" and value.startswith("#"):
            value = f"#{name}-{value[1:]}"
        value = value.replace("url(#", f"url(#{name}-")
        element.attrib[plain_key] = _THEMED_COLOR.sub(
            lambda match: _VARIABLES[match.group().lower()], value
        )

"""The plot of a sweep: curves of a figure over what is varied."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from knnper.simulation.batches.plan import VARIANT, SweepSettings, term_of
from knnper.simulation.batches.tables import Row, column_of, is_percent, label_of
from knnper.simulation.reports.figure import SERIES, accuracy_axis, colors_of, styled
from knnper.simulation.reports.runs import as_text
from knnper.simulation.reports.tables import chart_text

_SIZE_INCHES = (7.2, 4.2)

_ORDERS_FOR_LOG = 100
"""From this ratio of the largest to the smallest value on, the axis is logarithmic."""

_LEAST_GAP = 0.04
"""Of the axis, between two values that are both named."""

_MARGIN = 0.02

_MARKERS = "os^Dv"

_DASHES = ("-", "--", ":", "-.")

CurveKey = tuple[str, ...]
"""What tells a curve apart, as text."""

Style = Mapping[str, Any]
"""Arguments of matplotlib."""


def plot_of(rows: Sequence[Row], settings: SweepSettings) -> Figure | None:
    """Return the plot that a sweep asks for; None without ``x`` or any figure."""
    column = column_of(settings)
    rows = [row for row in rows if row.estimates[column].mean is not None]
    if settings.x is None or not rows:
        return None
    return _plot(rows, settings, settings.x)


@styled
def _plot(rows: Sequence[Row], settings: SweepSettings, key: str) -> Figure:
    column = column_of(settings)
    figure = Figure(_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    places = _places([_at(row, key) for row in rows], axes)
    curves = _curves(rows, settings.curve_keys())
    dots = {} if _is_joined(settings, rows) else {"linestyle": "none"}
    for curve, style in zip(curves.values(), _styles(list(curves)), strict=True):
        placed = [(places[as_text(_at(row, key))], row) for row in curve]
        _draw(axes, placed, column, {**style, **dots})
    axes.set_xlabel(chart_text(term_of(key)))
    if settings.series:
        _add_legend(figure, settings)
    _vertical(axes, settings)
    return figure


def _at(row: Row, key: str) -> Any:
    return row.title if key == VARIANT else row.values[key]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_joined(settings: SweepSettings, rows: Sequence[Row]) -> bool:
    values = [_at(row, settings.x or "") for row in rows]
    return settings.random is None and all(map(_is_number, values))


def _places(values: Sequence[Any], axes: Axes) -> dict[str, float]:
    """Return where on the horizontal axis each value is; set the axis up for it."""
    if all(map(_is_number, values)):
        if min(values) > 0 and max(values) >= _ORDERS_FOR_LOG * min(values):
            axes.set_xscale("log")
        _name_values(values, axes)
        return {as_text(value): float(value) for value in values}
    names = list(dict.fromkeys(map(as_text, values)))
    shown = list(map(chart_text, names))
    axes.set_xticks(range(len(names)), shown, rotation=30, ha="right")
    return {name: float(place) for place, name in enumerate(names)}


def _name_values(values: Sequence[float], axes: Axes) -> None:
    """Write each value on the horizontal axis, where they are far enough apart."""
    named = np.unique(values)
    gaps = np.diff(np.log(named) if axes.get_xscale() == "log" else named)
    if len(gaps) and gaps.min() >= _LEAST_GAP * gaps.sum():
        axes.set_xticks(named, [f"{value:g}" for value in named])
        axes.minorticks_off()


def _curves(rows: Sequence[Row], keys: Sequence[str]) -> Mapping[CurveKey, list[Row]]:
    """Return the rows of each curve by what ``keys`` are on it."""
    curves: dict[CurveKey, list[Row]] = {}
    for row in rows:
        curves.setdefault(tuple(as_text(_at(row, key)) for key in keys), []).append(row)
    return curves


def _styles(curves: Sequence[CurveKey]) -> Iterator[Style]:
    """Yield how each curve is drawn."""
    names = list(dict.fromkeys(values[:1] for values in curves))
    others = list(dict.fromkeys(values[1:] for values in curves))
    colors = colors_of(", ".join(name) for name in names)
    for values in curves:
        number = names.index(values[:1])
        yield {
            "label": chart_text(", ".join(values)),
            "color": colors[number].light,
            "marker": _MARKERS[number // len(SERIES) % len(_MARKERS)],
            "linestyle": _DASHES[others.index(values[1:]) % len(_DASHES)],
        }


def _draw(
    axes: Axes, curve: Sequence[tuple[float, Row]], column: str, style: Style
) -> None:
    curve = sorted(curve, key=lambda one: one[0])
    found = [row.estimates[column] for _, row in curve]
    axes.errorbar(
        [place for place, _ in curve],
        [one.mean or 0.0 for one in found],
        yerr=[one.half_width or 0.0 for one in found],
        markersize=4,
        capsize=3,
        **style,
    )


def _add_legend(figure: Figure, settings: SweepSettings) -> None:
    """Put the legend beside the curves, which may be many."""
    title = ",\n".join(chart_text(term_of(key)) for key in settings.curve_keys())
    figure.legend(title=title, loc="outside right upper", fontsize="small")


def _vertical(axes: Axes, settings: SweepSettings) -> None:
    label = f"{label_of(settings.y)}, {settings.group} clients"
    if is_percent(settings.y):
        accuracy_axis(axes, label)
        # Intervals of few seeds may reach beyond; the dots at the ends are shown whole.
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -_MARGIN), min(high, 1 + _MARGIN))
    else:
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)

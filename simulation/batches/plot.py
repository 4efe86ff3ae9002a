"""The plot of a sweep: a figure against a setting, with bars for the intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from knnper.simulation.batches.figure_names import is_percent, label_of
from knnper.simulation.batches.sweep import VARIANT, SweepSettings
from knnper.simulation.batches.tables import PointRow, column_of
from knnper.simulation.reports.figure import SERIES, accuracy_axis, colors_of, styled
from knnper.simulation.reports.text import as_text, chart_text, term_of

_SIZE_INCHES = (7.2, 4.2)
_ORDERS_FOR_LOG = 100  # ratio of largest to smallest value for a logarithmic axis
_LEAST_GAP = 0.04  # of the axis, between two values with labels
_MARGIN = 0.02
_MARKERS = "os^Dv"
_DASHES = ("-", "--", ":", "-.")


def plot_of(rows: Sequence[PointRow], settings: SweepSettings) -> Figure | None:
    """Return the plot of a sweep; None without ``x``, or if no point has the figure."""
    column = column_of(settings)
    rows = [row for row in rows if row.estimates[column].mean is not None]
    if settings.x is None or not rows:
        return None
    return _draw(rows, settings, settings.x)


@styled
def _draw(rows: Sequence[PointRow], settings: SweepSettings, x: str) -> Figure:
    figure = Figure(_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    values = [_value_of(row, x) for row in rows]
    is_joined = settings.random is None and all(map(_is_number, values))
    places = _set_up_axis(values, axes)
    curves: dict[tuple[str, ...], list[tuple[float, PointRow]]] = {}
    for row, value in zip(rows, values, strict=True):
        curve = tuple(as_text(_value_of(row, key)) for key in settings.curve_keys())
        curves.setdefault(curve, []).append((places[as_text(value)], row))
    # The first key gives the colour and the marker, the others the dashes.
    names = list(dict.fromkeys(curve[:1] for curve in curves))
    others = list(dict.fromkeys(curve[1:] for curve in curves))
    colors = colors_of(", ".join(name) for name in names)
    for curve, points in curves.items():
        number = names.index(curve[:1])
        dashes = _DASHES[others.index(curve[1:]) % len(_DASHES)]
        points.sort(key=lambda point: point[0])
        estimates = [row.estimates[column_of(settings)] for _, row in points]
        axes.errorbar(
            [place for place, _ in points],
            [estimate.mean or 0.0 for estimate in estimates],
            yerr=[estimate.half_width or 0.0 for estimate in estimates],
            markersize=4,
            capsize=3,
            label=chart_text(", ".join(curve)),
            color=colors[number].light,
            marker=_MARKERS[number // len(SERIES) % len(_MARKERS)],
            linestyle=dashes if is_joined else "none",
        )
    axes.set_xlabel(chart_text(term_of(x)))
    if settings.series:
        # Outside of the axes, since there may be many curves.
        title = ",\n".join(chart_text(term_of(key)) for key in settings.curve_keys())
        figure.legend(title=title, loc="outside right upper", fontsize="small")
    label = f"{label_of(settings.y)}, {settings.group} clients"
    if is_percent(settings.y):
        accuracy_axis(axes, label)
        # Intervals of few seeds reach beyond 0 and 100 %; dots at the ends fit.
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -_MARGIN), min(high, 1 + _MARGIN))
    else:
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    return figure


def _value_of(row: PointRow, key: str) -> Any:
    return row.title if key == VARIANT else row.values[key]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _set_up_axis(values: Sequence[Any], axes: Axes) -> dict[str, float]:
    """Set up the horizontal axis; return the place of each value by its text."""
    if not all(map(_is_number, values)):
        names = list(dict.fromkeys(map(as_text, values)))
        labels = list(map(chart_text, names))
        axes.set_xticks(range(len(names)), labels, rotation=30, ha="right")
        return {name: float(place) for place, name in enumerate(names)}
    is_log = min(values) > 0 and max(values) >= _ORDERS_FOR_LOG * min(values)
    if is_log:
        axes.set_xscale("log")
    # Label the values themselves if they are far enough apart.
    ticks = np.unique(values)
    gaps = np.diff(np.log(ticks) if is_log else ticks)
    if len(gaps) and gaps.min() >= _LEAST_GAP * gaps.sum():
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
        axes.minorticks_off()
    return {as_text(value): float(value) for value in values}

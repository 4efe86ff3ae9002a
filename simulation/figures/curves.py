"""Curves over several deals of the data: means, with what they vary by."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes

_MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class Curve:
    """One line of a figure.

    Attributes
    ----------
    label
        What it is of.
    x
        Places on the horizontal axis.
    mean
        At each of them, over the deals.
    std
        Standard deviation of a sample, over the deals; None of fewer than two.
    details
        More figures for the table, by name, each with a value at each place.
    """

    label: str
    x: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float | None, ...]
    details: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def as_record(self) -> Mapping[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)


def curve_over(
    label: str,
    x: Sequence[float],
    deals: Sequence[Sequence[float]],
    details: Mapping[str, Sequence[float]] | None = None,
) -> Curve:
    """Return the curve of values (deals, x)."""
    at_each = list(zip(*deals, strict=True))
    return Curve(
        label,
        tuple(x),
        tuple(statistics.fmean(values) for values in at_each),
        tuple(
            statistics.stdev(values) if len(values) > 1 else None for values in at_each
        ),
        details or {},
    )


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None where one of the two does not vary."""
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return statistics.correlation(x, y)


def curve_rows(curves: Sequence[Curve]) -> Iterator[tuple[object, ...]]:
    """Yield label, place, mean, standard deviation and details of each point."""
    for curve in curves:
        for at, place in enumerate(curve.x):
            more = (values[at] for values in curve.details.values())
            yield curve.label, place, curve.mean[at], curve.std[at], *more


def plot_curves(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw each curve with bars of one standard deviation to both sides."""
    for number, curve in enumerate(curves):
        axes.errorbar(
            curve.x,
            curve.mean,
            yerr=[std or 0.0 for std in curve.std],
            fmt=f"{_MARKERS[number % len(_MARKERS)]}-",
            markersize=4,
            capsize=2,
            linewidth=1.2,
            label=curve.label,
        )

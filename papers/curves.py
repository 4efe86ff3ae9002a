"""Curves of figures: means and deviations over partitions."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes

_MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class FigureCurve:
    """One line of a figure: means and standard deviations over partitions."""

    label: str
    x: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float | None, ...]
    details: Mapping[str, Sequence[float]] = field(default_factory=dict)


def curve_of(
    label: str,
    x: Sequence[float],
    at_each: Iterable[Sequence[float]],
    details: Mapping[str, Sequence[float]] | None = None,
) -> FigureCurve:
    """Build a curve from the values at each place."""
    samples = list(at_each)
    return FigureCurve(
        label,
        tuple(x),
        tuple(map(statistics.fmean, samples)),
        tuple(
            statistics.stdev(values) if len(values) > 1 else None for values in samples
        ),
        details or {},
    )


def curve_over(
    label: str,
    x: Sequence[float],
    runs: Sequence[Sequence[float]],
    details: Mapping[str, Sequence[float]] | None = None,
) -> FigureCurve:
    """Build a curve from values of shape (runs, x)."""
    return curve_of(label, x, zip(*runs, strict=True), details)


def curve_rows(curves: Sequence[FigureCurve]) -> Iterator[tuple[object, ...]]:
    """Yield label, place, mean, standard deviation and details of each point."""
    for curve in curves:
        details = curve.details.values()
        yield from zip(
            [curve.label] * len(curve.x),
            curve.x,
            curve.mean,
            curve.std,
            *details,
            strict=True,
        )


def plot_curves(axes: Axes, curves: Sequence[FigureCurve]) -> None:
    """Draw each curve with error bars of one standard deviation."""
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


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Compute Pearson's correlation; None if one of the two is constant."""
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return statistics.correlation(x, y)

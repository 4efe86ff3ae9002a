"""The chart of calibration: accuracy against confidence, in bins."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from knnper.server.results import PooledBins
from knnper.simulation.reports.figure import SOFT, Color
from knnper.simulation.reports.finished_run import GROUPS
from knnper.simulation.reports.picture import (
    MOST_COLUMNS,
    Colors,
    DescribedChart,
    draw_diagonal,
    first_with_data,
    name_sides,
    small_multiples,
    whole_fractions,
    write_title,
)
from knnper.simulation.reports.setups import Setup

_BIN_AREA = 90.0  # square points, of a bin with all examples


@dataclass(frozen=True)
class Reliability:
    """Test examples in bins of confidence; empty bins are left out.

    Attributes
    ----------
    confidence, accuracy
        The mean of each bin.
    counts
        Examples in each bin.
    """

    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, pooled: PooledBins) -> "Reliability":
        """Divide the sums of bins by their counts."""
        confidence, correct, counts = pooled.confidence, pooled.correct, pooled.counts
        occupied = [place for place, count in enumerate(counts) if count > 0]
        return cls(
            tuple(confidence[place] / counts[place] for place in occupied),
            tuple(correct[place] / counts[place] for place in occupied),
            tuple(counts[place] for place in occupied),
        )

    @property
    def calibration_error(self) -> float:
        """Mean gap between accuracy and confidence, weighted by examples."""
        bins = zip(self.counts, self.accuracy, self.confidence, strict=True)
        gaps = (count * abs(right - sure) for count, right, sure in bins)
        return math.fsum(gaps) / sum(self.counts)


@dataclass(frozen=True)
class ReliabilityPanel:
    """The bins of one group of clients of a setup."""

    label: str
    group: str
    personal: Reliability
    reference: Reliability | None  # of the global model

    @property
    def errors(self) -> str:
        """Both calibration errors as text."""
        personal = f"error {100 * self.personal.calibration_error:.1f} %"
        if self.reference is None or self.personal == self.reference:
            return personal
        return f"{personal}, global {100 * self.reference.calibration_error:.1f} %"


def panels_of(setups: Sequence[Setup]) -> list[ReliabilityPanel]:
    """Return a panel for each group and setup with reported bins."""
    by_label = first_with_data(
        (setup.label, _pool_bins(setup) or None) for setup in setups
    )
    panels = [panel for panels in by_label.values() for panel in panels]
    return sorted(panels, key=lambda panel: GROUPS.index(panel.group))


def _pool_bins(setup: Setup) -> list[ReliabilityPanel]:
    """Pool the bins of all seeds, for each group with tested clients."""
    pooled = {group: (PooledBins(), PooledBins()) for group in GROUPS}
    for run in setup.runs:
        for result in run.client_results():
            if result.personal.num_examples > 0:
                personal, reference = pooled["seen" if result.seen else "unseen"]
                personal.add(result.personal)
                reference.add(result.reference)
    return [
        ReliabilityPanel(
            setup.label,
            group,
            Reliability.of(personal),
            Reliability.of(reference) if setup.has_reference else None,
        )
        for group, (personal, reference) in pooled.items()
        if any(personal.counts)
    ]


def draw_reliability(setups: Sequence[Setup], colors: Colors) -> DescribedChart | None:
    """Draw the panels; None where no client reported its bins."""
    panels = panels_of(setups)
    if not panels:
        return None
    # One row a group, where a row has room for all setups.
    num_setups = len({panel.label for panel in panels})
    per_row = num_setups if 1 < num_setups <= MOST_COLUMNS else None
    figure, all_axes = small_multiples(len(panels), per_row)
    for axes, panel in zip(all_axes, panels, strict=True):
        draw_diagonal(axes)
        if panel.reference is not None:
            _draw_bins(axes, panel.reference, SOFT, "s")
        if panel.personal != panel.reference:
            _draw_bins(axes, panel.personal, colors[panel.label], "o")
        write_title(axes, panel.label, f"{panel.group}, {panel.errors}")
        axes.set_aspect("equal")
        whole_fractions(axes, both=True)
    name_sides(all_axes, "confidence", "accuracy")
    errors = "; ".join(
        f"{panel.label} ({panel.group}): {panel.errors}" for panel in panels
    )
    return DescribedChart(figure, f"Calibration error of all seeds pooled. {errors}.")


def _draw_bins(axes: Axes, bins: Reliability, color: Color, marker: str) -> None:
    areas = [_BIN_AREA * count / sum(bins.counts) + 4.0 for count in bins.counts]
    axes.plot(bins.confidence, bins.accuracy, color=color.light, linewidth=1.1)
    axes.scatter(
        bins.confidence,
        bins.accuracy,
        s=areas,
        marker=marker,
        color=color.light,
        linewidths=0,
    )

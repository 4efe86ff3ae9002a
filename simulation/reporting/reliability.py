"""How often a model is right, by how sure it is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from simulation.figures.palette import SOFT, Color
from simulation.reporting.drawing import (
    MOST_COLUMNS,
    Picture,
    draw_diagonal,
    first_found,
    name_sides,
    small_multiples,
    whole_fractions,
    write_title,
)
from simulation.reporting.runs import GROUPS, Run
from simulation.reporting.setups import Setup
from strategies.core.evaluation import ClientResult, Evaluation

_LARGEST_AREA = 90.0  # square points, of all examples in one bin


@dataclass(frozen=True)
class Reliability:
    """The bins of confidence of many test examples, those that hold any.

    Attributes
    ----------
    confidence
        Mean of the largest probability in each bin.
    accuracy
        Share of the bin that is right.
    counts
        Examples in the bin.
    """

    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation]) -> "Reliability":
        """Return the bins of all evaluations pooled."""
        counts = _pooled([one.bin_counts for one in evaluations])
        correct = _pooled([one.bin_correct for one in evaluations])
        confidence = _pooled([one.bin_confidence for one in evaluations])
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
    """One group of clients of a setup.

    Attributes
    ----------
    label, group
        Whose.
    own, reference
        Of the personalised models, and of the unpersonalised one; None where that
        means nothing.
    """

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
            _draw(axes, panel.reference, SOFT, "s")
        if panel.own != panel.reference:
            _draw(axes, panel.own, colors[panel.label], "o")
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
    handed = run.folder.hand_overs.reported(model).values()
    return [result for result in handed if result is not None]


def _pooled(bins: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(values) for values in zip(*bins, strict=True)]


def _draw(axes: Axes, bins: Reliability, color: Color, marker: str) -> None:
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

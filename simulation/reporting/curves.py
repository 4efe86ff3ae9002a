"""Learning curves: loss and accuracy by round."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulation.figures.palette import Color
from simulation.reporting.drawing import (
    WIDTH,
    Picture,
    first_found,
    whole_fractions,
    whole_numbers,
    wrapped,
    write_at_ends,
)
from simulation.reporting.setups import Setup

FIGURES: Mapping[str, str] = {
    "train_loss": "training loss (nats)",
    "validation_accuracy": "validation accuracy, unpersonalised",
}
"""What is drawn of ``rounds.jsonl``, with the name of its axis."""

_PANEL_HEIGHT = 2.8  # inches
_LINE = 0.062  # of the height of a panel
_HEADROOM = 1.08
"""A height above the largest loss, which a line at the very top would not have."""


@dataclass(frozen=True)
class Curve:
    """A figure by round.

    Attributes
    ----------
    labels
        Of the setups that share it: they trained the same.
    rounds
        Those of which every seed with any rounds has the figure.
    by_seed
        Its values, one sequence a seed.
    """

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
    """Draw all learning curves, a panel a figure; None where there are none.

    Each seed is a thin line, their mean a thick one. Curves that setups share have the
    colour of the first.
    """
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
        (
            "\n".join(map(wrapped, curve.labels)),
            curve.mean[-1],
            colors[curve.labels[0]],
        )
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

"""The chart of learning curves, from ``rounds.jsonl``."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from knnper.simulation.reports.picture import (
    WIDTH,
    Colors,
    DescribedChart,
    first_with_data,
    whole_fractions,
    whole_numbers,
    wrapped,
)
from knnper.simulation.reports.setups import Setup

# Figures of ``rounds.jsonl`` that are drawn, with the title of their panel.
FIGURES: Mapping[str, str] = {
    "train_loss": "training loss (nats)",
    "validation_accuracy": "validation accuracy, unpersonalised",
}
_PERSONAL = "validation_accuracy_personal"
_BOTH_TITLE = "validation accuracy, personalised; dashed: unpersonalised"
_PANEL_HEIGHT = 2.8  # inches
_LINE_HEIGHT = 0.062  # of a line of text, as a fraction of a panel's height
_HEADROOM = 1.08  # the loss axis ends above the largest loss by this factor


@dataclass(frozen=True)
class Curve:
    """A figure by round.

    Attributes
    ----------
    labels
        The setups that share the curve.
    by_seed
        A value for each of ``rounds``, for each seed.
    setup
        The label of the setup that gives the colour.
    """

    labels: tuple[str, ...]
    rounds: tuple[int, ...]
    by_seed: tuple[tuple[float, ...], ...]
    setup: str = ""
    is_dashed: bool = False

    @property
    def mean(self) -> list[float]:
        """The mean over the seeds, for each round."""
        return [statistics.fmean(values) for values in zip(*self.by_seed, strict=True)]


def learning_curves(setups: Sequence[Setup], figure: str) -> list[Curve]:
    """Return the curves of a figure of ``rounds.jsonl``; none where no run has it."""
    values = _values_by_setup(setups, figure)
    return _merge_equal((label, label, curve) for label, curve in values.items())


def validation_curves(setups: Sequence[Setup]) -> list[Curve]:
    """Return the curves of personalised models, and of global models that differ."""
    personal = _values_by_setup(setups, _PERSONAL)
    if not personal:
        return learning_curves(setups, "validation_accuracy")
    of_global = [
        (label, f"{label}, unpersonalised", values)
        for label, values in _values_by_setup(setups, "validation_accuracy").items()
        if personal.get(label) != values
    ]
    return [
        *_merge_equal((label, label, values) for label, values in personal.items()),
        *(replace(curve, is_dashed=True) for curve in _merge_equal(of_global)),
    ]


def _values_by_setup(
    setups: Sequence[Setup], figure: str
) -> dict[str, tuple[Any, ...]]:
    return first_with_data(
        (setup.label, _read_values(setup, figure)) for setup in setups
    )


def _read_values(setup: Setup, figure: str) -> tuple[Any, ...] | None:
    """Return the rounds that all seeds have, and the values of each seed."""
    # Runs without rounds are left out; `missing_files` reports them.
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
    by_seed = tuple(tuple(seed[number] for number in rounds) for seed in seeds)
    return (tuple(rounds), by_seed) if rounds else None


def _merge_equal(curves: Iterable[tuple[str, str, tuple[Any, ...]]]) -> list[Curve]:
    """Merge curves of equal values; each is (setup, name, values)."""
    merged: dict[tuple[Any, ...], Curve] = {}
    for setup, name, values in curves:
        curve = merged.setdefault(values, Curve((), values[0], values[1], setup))
        merged[values] = replace(curve, labels=(*curve.labels, name))
    return list(merged.values())


def draw_curves(setups: Sequence[Setup], colors: Colors) -> DescribedChart | None:
    """Draw all learning curves, one panel a figure; None where there are none."""
    curves = {
        "train_loss": learning_curves(setups, "train_loss"),
        "validation_accuracy": validation_curves(setups),
    }
    curves = {name: of_figure for name, of_figure in curves.items() if of_figure}
    if not curves:
        return None
    titles = dict(FIGURES)
    if _values_by_setup(setups, _PERSONAL):
        titles["validation_accuracy"] = _BOTH_TITLE
    figure = Figure(figsize=(WIDTH, _PANEL_HEIGHT * len(curves)), layout="constrained")
    panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    sentences = list[str]()
    for axes, (name, of_figure) in zip(panels, curves.items(), strict=True):
        for curve in of_figure:
            _draw_curve(axes, curve, colors)
            sentences.append(
                f"{titles[name]} of {', '.join(curve.labels)} goes from "
                f"{curve.mean[0]:.3f} in round {curve.rounds[0]} to "
                f"{curve.mean[-1]:.3f} in round {curve.rounds[-1]}"
            )
        axes.set_title(titles[name])
        if name == "validation_accuracy":
            whole_fractions(axes)
        else:
            axes.set_ylim(0, _HEADROOM * axes.dataLim.ymax or 1.0)
        _label_ends(axes, of_figure, colors)
    whole_numbers(panels[-1].xaxis)
    panels[-1].set_xlabel("round")
    return DescribedChart(figure, f"By round: {'; '.join(sentences)}.")


def _draw_curve(axes: Axes, curve: Curve, colors: Colors) -> None:
    """Draw a thin line for each of several seeds, and their mean."""
    color = colors[curve.setup].light
    if len(curve.by_seed) > 1:
        for values in curve.by_seed:
            axes.plot(curve.rounds, values, color=color, linewidth=0.6, alpha=0.45)
    marker = "o" if len(curve.rounds) == 1 else ""
    style = "--" if curve.is_dashed else "-"
    axes.plot(curve.rounds, curve.mean, style, color=color, marker=marker)


def _label_ends(axes: Axes, curves: Sequence[Curve], colors: Colors) -> None:
    """Write each curve's labels right of its end; the axes' limits must be set."""
    low, high = axes.get_ylim()
    ordered = sorted(curves, key=lambda curve: curve.mean[-1])
    texts = ["\n".join(map(wrapped, curve.labels)) for curve in ordered]
    size = _LINE_HEIGHT * max(text.count("\n") + 1 for text in texts)
    ends = [(curve.mean[-1] - low) / (high - low) for curve in ordered]
    heights = _spread_out(ends, size)
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


def _spread_out(heights: Sequence[float], distance: float) -> list[float]:
    """Move ascending heights as little as keeps them ``distance`` apart."""
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

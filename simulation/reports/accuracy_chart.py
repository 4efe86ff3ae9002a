"""The chart of average accuracies, from the table of a report."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from knnper.simulation.reports.accuracy_table import ModelRow
from knnper.simulation.reports.figure import SOFT, Color
from knnper.simulation.reports.finished_run import GROUPS
from knnper.simulation.reports.picture import WIDTH, Colors, DescribedChart
from knnper.simulation.reports.text import chart_text

_ROW_HEIGHT = 0.26  # inches
_FRAME_HEIGHT = 0.9  # inches


def draw_averages(
    rows: Sequence[ModelRow], colors: Colors, split: str
) -> DescribedChart | None:
    """Draw the average of every row, one panel a group; None without rows."""
    if not rows:
        return None
    groups = [name for name in GROUPS if any(row.group == name for row in rows)]
    models = list(dict.fromkeys((row.label, row.is_reference) for row in rows))
    size = (WIDTH, _FRAME_HEIGHT + _ROW_HEIGHT * len(models))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True, sharex=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        for row in rows:
            if row.group != group:
                continue
            color = SOFT if row.is_reference else colors[row.label]
            _draw_average(axes, models.index((row.label, row.is_reference)), row, color)
        axes.set_title(f"{group} clients")
        axes.set_xlabel(f"average {split} accuracy (%)")
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.16)
    # The margin beyond 0 and 100 % is for the numbers beside the dots, without ticks.
    low, high = panels[0].get_xlim()
    panels[0].set_xticks([tick for tick in panels[0].get_xticks() if 0 <= tick <= 100])
    panels[0].set_xlim(low, high)
    names = [chart_text(label) for label, _ in models]
    panels[0].set_yticks(range(len(models)), names)
    panels[0].set_ylim(len(models) - 0.5, -0.5)
    averages = [
        f"{row.label} {row.group} {row.figures['average'].percent()}" for row in rows
    ]
    return DescribedChart(figure, f"Average {split} accuracy: {'; '.join(averages)}.")


def _draw_average(axes: Axes, height: int, row: ModelRow, color: Color) -> None:
    """Draw a dot at the mean and a line for the interval, cut at 0 and 100 %."""
    figure = row.figures["average"]
    if figure.mean is None:
        return
    half_width = figure.half_width or 0.0
    low, high = max(figure.mean - half_width, 0.0), min(figure.mean + half_width, 1.0)
    marker = "D" if row.is_reference else "o"
    style = ":" if figure.mark else "-"
    axes.plot([100 * low, 100 * high], [height, height], style, color=color.light)
    axes.plot(100 * figure.mean, height, marker, color=color.light)
    axes.annotate(
        f"{100 * figure.mean:.1f}",
        (100 * high, height),
        xytext=(7, 0),
        textcoords="offset points",
        verticalalignment="center",
        fontsize=8,
    )

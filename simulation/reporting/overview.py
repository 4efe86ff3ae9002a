"""The averages at a glance: a dot and an interval a row of the table."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulation.figures.palette import SOFT, Color
from simulation.outside_text import chart_text
from simulation.reporting.drawing import WIDTH, Picture
from simulation.reporting.runs import GROUPS
from simulation.reporting.table import Row, percent

_ROW_HEIGHT = 0.26  # inches
_FRAME_HEIGHT = 0.9


def draw_averages(
    rows: Sequence[Row], colors: Mapping[str, Color], split: str
) -> Picture | None:
    """Draw the average of every row, a panel a group; None without rows.

    Parameters
    ----------
    rows
        Of the table.
    colors
        By label, of all but the unpersonalised models.
    split
        What the clients were tested on, see `split_of`.
    """
    if not rows:
        return None
    groups = [name for name in GROUPS if any(row.group == name for row in rows)]
    models = list(dict.fromkeys(_model(row) for row in rows))
    height = _FRAME_HEIGHT + _ROW_HEIGHT * len(models)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True, sharex=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        own = [row for row in rows if row.group == group]
        for row in own:
            color = SOFT if row.is_reference else colors[row.label]
            _draw(axes, models.index(_model(row)), row, color)
        axes.set_title(f"{group} clients")
        axes.set_xlabel(f"average {split} accuracy (%)")
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.16)
    # Room for the numbers beside the dots is no place for ticks.
    low, high = panels[0].get_xlim()
    panels[0].set_xticks([one for one in panels[0].get_xticks() if 0 <= one <= 100])
    panels[0].set_xlim(low, high)
    names = [chart_text(label) for label, _ in models]
    panels[0].set_yticks(range(len(models)), names)
    panels[0].set_ylim(len(models) - 0.5, -0.5)
    return Picture(figure, _alternative(rows, split))


def _model(row: Row) -> tuple[str, bool]:
    return row.label, row.is_reference


def _draw(axes: Axes, height: int, row: Row, color: Color) -> None:
    figure = row.figures["average"]
    if figure.mean is None:
        return
    half_width = figure.half_width or 0.0
    low, high = max(figure.mean - half_width, 0.0), min(figure.mean + half_width, 1.0)
    marker = "D" if row.is_reference else "o"
    axes.plot([100 * low, 100 * high], [height, height], color=color.light)
    axes.plot(100 * figure.mean, height, marker, color=color.light)
    axes.annotate(
        f"{100 * figure.mean:.1f}",
        (100 * high, height),
        xytext=(7, 0),
        textcoords="offset points",
        verticalalignment="center",
        fontsize=8,
    )


def _alternative(rows: Sequence[Row], split: str) -> str:
    told = (
        f"{row.label} {row.group} {percent(row.figures['average'])}" for row in rows
    )
    return f"Average {split} accuracy: {'; '.join(told)}."

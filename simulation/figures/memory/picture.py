"""One figure of the memory, drawn."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from simulation.figures.curves import Curve, plot_curves
from simulation.figures.memory.panel import Panel
from simulation.figures.palette import SOFT
from simulation.figures.style import accuracy_axis, styled

_LONG_LABEL = 20
"""Characters, from which labels have a line each."""


@styled
def picture(panel: Panel, curves: Sequence[Curve], global_accuracy: float) -> Figure:
    """Return the curves of a figure, with the global model's accuracy beside them."""
    figure = Figure(figsize=(6.4, 5.0), layout="constrained")
    axes = figure.add_subplot()
    plot_curves(axes, curves)
    axes.set_xlabel(panel.x_label)
    axes.set_title(panel.title)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(curves[0].x, [f"{place:g}" for place in curves[0].x])
    if panel.y_name == "accuracy":
        accuracy_axis(axes, panel.y_label)
        axes.axhline(
            global_accuracy, color=SOFT.light, linestyle=":", label="global model"
        )
    else:
        axes.set_ylabel(panel.y_label)
        axes.grid(alpha=0.3)
    _add_legend(figure, panel.legend)
    return figure


def _add_legend(figure: Figure, title: str) -> None:
    """Put the legend below the curves: inside it would hide the steepest."""
    (axes,) = figure.axes
    _, labels = axes.get_legend_handles_labels()
    long = any(len(label) > _LONG_LABEL for label in labels)
    figure.legend(
        title=title,
        loc="outside lower center",
        ncols=1 if long else 4,
        fontsize="small",
    )

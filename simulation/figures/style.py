"""What the figures have in common: colours, and axes of accuracies."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec

from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from simulation.figures.lettering import boxes_told, font_families
from simulation.figures.palette import FAINT, INK, SERIES, SOFT

P = ParamSpec("P")


@contextlib.contextmanager
def _figure_style() -> Iterator[None]:
    with rc_context(
        {
            "font.family": font_families(),
            "axes.prop_cycle": cycler(color=[color.light for color in SERIES]),
            "text.color": INK.light,
            "axes.labelcolor": INK.light,
            "axes.titlecolor": INK.light,
            "axes.edgecolor": SOFT.light,
            "xtick.color": SOFT.light,
            "ytick.color": SOFT.light,
            "xtick.labelcolor": INK.light,
            "ytick.labelcolor": INK.light,
            "legend.edgecolor": FAINT.light,
        }
    ):
        yield


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Return what draws the same in colours that a page can turn dark.

    The figure is laid out for good: it is the same wherever it is written.
    """

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _figure_style(), boxes_told():
            figure = draw(*args, **kwargs)
            # Ticks are made when they are needed, and take their colours then.
            figure.draw_without_rendering()
        figure.set_layout_engine("none")
        return figure

    return drawn


def accuracy_axis(axes: Axes, label: str = "test accuracy") -> None:
    """Make the vertical axis one of accuracies in percent, with a grid."""
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
    axes.grid(alpha=0.3)

"""What the figures' axes have in common."""

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter


def accuracy_axis(axes: Axes, label: str = "test accuracy") -> None:
    """Make the vertical axis one of accuracies in percent, with a grid."""
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
    axes.grid(alpha=0.3)

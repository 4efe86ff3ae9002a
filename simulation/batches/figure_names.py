"""The names of figures in files and tables, as in ``unseen.global.log_loss``."""

from collections.abc import Sequence

from knnper.metrics import ACCURACY, called
from knnper.server.results import OVER_CLIENTS
from knnper.simulation.batches.points import FIGURES, GLOBAL
from knnper.simulation.reports.accuracy_table import VS_GLOBAL, degraded_vs
from knnper.simulation.reports.finished_run import EVERYBODY, GROUPS

SECONDS = "seconds"  # of training and personalisation together
# Of a client in a round: the bytes of its payload and of its update.
BYTES = ("bytes_down", "bytes_up")
_VERSUS = "_vs_"
# Words for the names of `OVER_CLIENTS` and of figures of all clients together.
_WORDS = {
    "num_clients": "clients",
    "num_empty": "clients without test examples",
    "num_test_examples": "test examples",
    "weighted": "average",
    "mean": "mean over clients",
    "bottom_decile": "bottom decile",
    "worst": "worst client",
    "std": "spread over clients",
    "fraction_degraded": degraded_vs(VS_GLOBAL),
    "num_undefined": "clients where it is not defined",
    "ece": "calibration error",
    "log_loss": "log-loss",
}
_COUNTS = ("num_clients", "num_empty", "num_test_examples", "num_undefined")
_LOWER_IS_BETTER = ("std", "fraction_degraded", "num_undefined", "ece", "log_loss")


def all_columns(figures: Sequence[str] = FIGURES) -> tuple[str, ...]:
    """Return the columns of figures for all groups, personalised and not."""
    return tuple(
        f"{group}.{prefix}{figure}"
        for group in (*GROUPS, EVERYBODY)
        for prefix in ("", GLOBAL)
        for figure in figures
    )


def versus(figure: str, reference: str) -> str:
    """Return the name of a figure's difference to a reference with the same seed."""
    return f"{figure}{_VERSUS}{reference}"


def is_difference(figure: str) -> bool:
    """Return whether a figure is a difference to a reference."""
    return _VERSUS in figure


def label_of(figure: str) -> str:
    """Return a figure, such as ``global.accuracy_weighted``, in words."""
    metric, name = _split(figure)
    words = _WORDS[name]
    if metric != ACCURACY:
        words = f"{called(metric).title}, {words}"
    elif name == "weighted":
        words = ACCURACY
    return f"global model's {words}" if figure.startswith(GLOBAL) else words


def is_percent(figure: str) -> bool:
    """Return whether a figure is a fraction that tables show in percent."""
    metric, name = _split(figure.partition(_VERSUS)[0])
    if name in (*_COUNTS, "log_loss"):
        return False
    return called(metric).is_fraction or name == "fraction_degraded"


def lower_is_better(figure: str) -> bool:
    """Return whether the smallest value of a figure is the best."""
    metric, name = _split(figure)
    return name in _LOWER_IS_BETTER or called(metric).lower_is_better


def metric_of(figure: str) -> str:
    """Return the metric of a figure; the accuracy for figures without one."""
    return _split(figure)[0]


def _split(figure: str) -> tuple[str, str]:
    """Split a figure into its metric and a key of `_WORDS`."""
    figure = figure.removeprefix(GLOBAL)
    for name in OVER_CLIENTS:
        if figure.endswith(f"_{name}"):
            return figure.removesuffix(f"_{name}"), name
    return ACCURACY, figure

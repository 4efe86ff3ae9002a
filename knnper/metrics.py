"""How well probabilities fit labels: the metrics that an experiment can name."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from knnper.errors import OwnCodeError
from knnper.own import Kind, arguments, given_to
from knnper.settings import Choice, Settings

Labels: TypeAlias = NDArray[np.int64]  # (n,), n at least 1
Probabilities: TypeAlias = NDArray[
    np.float64
]  # (n, c); a row of zeros predicts nothing
Compute: TypeAlias = Callable[[Labels, Probabilities], float | None]
ACCURACY = "accuracy"
_CLASSES = "y_pred"  # the parameter of a user's metric that takes predicted classes

OWN_METRIC = Kind(
    "a function (labels, probabilities) -> float",
    supplied=("labels", "probabilities", "y_true", "y_score", "y_prob", _CLASSES),
)
"""A user's metric; higher is better, so a loss returns its negative."""


# scikit-learn and scipy.stats are imported in the functions that use them, since their
# import takes a second.


def balanced_accuracy(labels: Labels, probabilities: Probabilities) -> float:
    """Return the mean recall over the classes that are among the labels."""
    from sklearn.metrics import recall_score

    return float(_macro(recall_score, labels, probabilities))


def macro_f1(labels: Labels, probabilities: Probabilities) -> float:
    """Return the mean F1 over the classes that occur among the labels.

    scikit-learn's default also counts classes that occur only among the predictions.
    Two models of one client would then be averaged over different classes. A wrong
    prediction of an absent class still lowers the recall of the true class.
    """
    from sklearn.metrics import f1_score

    return float(_macro(f1_score, labels, probabilities))


def auroc(labels: Labels, probabilities: Probabilities) -> float | None:
    """Return the mean area under the ROC curve, each class against all others.

    The mean is over the classes that occur among the labels; None if there is only one,
    for which the area is undefined.
    """
    from scipy.stats import rankdata

    present = np.unique(labels)
    if len(present) < 2:
        return None
    # The Mann-Whitney statistic of each class. scikit-learn goes from class to class:
    # 170 ms for 100 of them and 500 examples, in place of 11.
    is_class = labels[:, None] == present
    ranks = rankdata(probabilities[:, present], axis=0)
    count = is_class.sum(axis=0)
    won = (ranks * is_class).sum(axis=0) - count * (count + 1) / 2
    return float(np.mean(won / (count * (len(labels) - count))))


def _macro(
    function: Callable[..., float], labels: Labels, probabilities: Probabilities
) -> float:
    predicted, present = _predicted(probabilities), np.unique(labels)
    return function(labels, predicted, labels=present, average="macro", zero_division=0)


def _predicted(probabilities: Probabilities) -> Labels:
    return np.where(probabilities.any(axis=1), probabilities.argmax(axis=1), -1)


@dataclass(frozen=True)
class Metric:
    """A metric of a client's test split."""

    title: str  # name in tables
    # Returns the metric, in [0, 1], or None where it is not defined. None if the metric
    # follows from the sums that every `Evaluation` has.
    compute: Compute | None = None
    lower_is_better: bool = False  # whether the largest is the worst
    is_fraction: bool = True  # whether tables show it in percent


METRICS: Mapping[str, Metric] = {
    ACCURACY: Metric("accuracy"),
    "balanced_accuracy": Metric("balanced accuracy", balanced_accuracy),
    "macro_f1": Metric("macro-F1", macro_f1),
    "auroc": Metric("AUROC", auroc),
    "log_loss": Metric("log-loss", lower_is_better=True, is_fraction=False),
    "ece": Metric("calibration error", lower_is_better=True),
}


def called(name: str) -> Metric:
    """Return the metric of a name; an unknown name is that of a user's metric."""
    return METRICS.get(name) or Metric(name, is_fraction=False)


def computations(chosen: Iterable[Choice[Settings]]) -> dict[str, Compute]:
    """Return the functions of the metrics that do not follow from an `Evaluation`."""
    by_name = {
        metric.metric_name: METRICS[metric.name].compute
        if metric.entry is None
        else functools.partial(_own, metric)
        for metric in chosen
    }
    return {name: compute for name, compute in by_name.items() if compute}


def _own(
    choice: Choice[Settings], labels: Labels, probabilities: Probabilities
) -> float | None:
    takes_classes = given_to(choice.entry, **{_CLASSES: None})
    argument = _predicted(probabilities) if takes_classes else probabilities
    value: Any = choice.entry(labels, argument, **arguments(choice.settings, Settings))
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise OwnCodeError(
            f"{choice.name} returned {value!r}, expected a number, or None where it "
            "is not defined"
        ) from error
    return number if math.isfinite(number) else None


def gain(metric: str, value: float, over: float) -> float:
    """Return by how much a value of a metric is better than another."""
    return over - value if called(metric).lower_is_better else value - over


def is_worse(metric: str, value: float, than: float) -> bool:
    """Return whether a value of a metric is worse than another."""
    return gain(metric, value, than) < 0


def worst_first(metric: str, values: Iterable[float]) -> list[float]:
    """Return values of a metric, the worst one first."""
    return sorted(values, reverse=called(metric).lower_is_better)

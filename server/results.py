"""Figures of a run's results: of groups of clients, and over the rounds."""

import math
import operator
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from knnper.metrics import ACCURACY, is_worse, worst_first
from knnper.strategies.core.evaluation import (
    NUM_CALIBRATION_BINS,
    ClientResult,
    Evaluation,
)

# Distribution of a metric over clients, see `metric_figures`.
OVER_CLIENTS = (
    *("weighted", "mean", "bottom_decile", "worst", "std"),
    *("fraction_degraded", "num_undefined"),
)
MOST_SUMMED = 100_000  # numbers that a `Total` holds

_TOTALS = ("seconds", "bytes_up", "bytes_down", "num_failed")
_LAST = ("virtual_seconds", "epsilon", "delta", "num_releases", "clip_norm")


@dataclass(frozen=True)
class Summary:
    """Figures of one kind of model on the test splits of a group of clients.

    A client without test examples counts in ``num_clients`` and ``num_empty`` only. The
    other figures are None if all clients are empty. A client's accuracy is
    `Evaluation.accuracy`: where labels count differently, every accuracy below is one
    of those, while ``ece`` and ``log_loss`` count all examples alike.

    Attributes
    ----------
    num_clients, num_empty
        Clients of the group, and those without test examples.
    num_test_examples
        Of all clients together.
    accuracy_weighted
        Mean over clients, weighted by local test size: the paper's figure
        (Marfoq et al. 2022, section 6, Table 2).
    accuracy_mean
        Mean over clients, each counted once.
    accuracy_bottom_decile
        The (M/10)-th worst accuracy of M clients: the element of rank
        max(1, floor(M/10)), from 1, of the ascending list (Marfoq et al. 2022, section
        6).
    accuracy_worst, accuracy_std
        Of the clients' accuracies; the standard deviation is the population's.
    fraction_degraded
        `fraction_degraded` against the global model of the same run.
    ece
        Expected calibration error of all test examples pooled, 15 bins: Guo et al.,
        "On Calibration of Modern Neural Networks", 2017, Eq. 3.
    log_loss
        Mean of -log p(y|x) over all test examples pooled.
    metrics
        See `metric_figures`: of every metric that the run names.
    """

    num_clients: int
    num_empty: int
    num_test_examples: int
    accuracy_weighted: float | None = None
    accuracy_mean: float | None = None
    accuracy_bottom_decile: float | None = None
    accuracy_worst: float | None = None
    accuracy_std: float | None = None
    fraction_degraded: float | None = None
    ece: float | None = None
    log_loss: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    def as_document(self) -> dict[str, Any]:
        """Return plain values, with those of metrics among the others."""
        document = asdict(self)
        document.update(document.pop("metrics"))
        return document


@dataclass(frozen=True)
class GroupSummary:
    """Figures of the personalised and unpersonalised models of a group of clients."""

    personal: Summary
    reference: Summary

    def as_document(self) -> dict[str, Any]:
        """Return plain values."""
        return {**self.personal.as_document(), "global": self.reference.as_document()}


def metric_of(evaluation: Evaluation, metric: str) -> float | None:
    """Return a metric of one client; None if it is undefined or unknown."""
    if metric == ACCURACY:
        return evaluation.accuracy
    if metric == "ece":
        return _calibration_error(
            evaluation.bin_confidence, evaluation.bin_correct, evaluation.num_examples
        )
    if metric == "log_loss":
        count = evaluation.num_examples
        return evaluation.log_loss_sum / count if count else None
    return evaluation.metrics.get(metric)


def figure_of(metric: str, name: str) -> str:
    """Return the key of one of `OVER_CLIENTS` for a metric in a document."""
    if metric == ACCURACY and name == "fraction_degraded":
        return name  # accuracy is the oldest metric, and its keys have no prefix
    return f"{metric}_{name}"


def metric_figures(
    model: "_Model", other: "_Model", metric: str
) -> dict[str, float | None]:
    """Summarise a metric of one kind of model over a group's clients.

    The figures are those of `Summary` for the accuracy, over the clients with a defined
    metric, and the number of clients with test examples and an undefined metric. Where
    lower is better, the worst is the largest. ``other`` are the models to compare with.
    """
    values, counts = model.known(metric), model.sizes_with(metric)
    spread: tuple[float | None, ...] = (None,) * 5
    if values:
        products = map(operator.mul, values, counts)
        spread = math.fsum(products) / sum(counts), *_spread(metric, values)
    degraded = fraction_degraded(model.pairs_with(other, metric), metric)
    num_undefined = sum(map(bool, model.sizes)) - len(values)
    names = (figure_of(metric, name) for name in OVER_CLIENTS)
    return dict(zip(names, (*spread, degraded, num_undefined), strict=True))


def _spread(metric: str, values: Sequence[float]) -> tuple[float, float, float, float]:
    """Return mean, bottom decile, worst and standard deviation over clients."""
    ordered = worst_first(metric, values)
    return (
        statistics.fmean(ordered),
        ordered[max(1, len(ordered) // 10) - 1],
        ordered[0],
        statistics.pstdev(ordered),
    )


def fraction_degraded(
    pairs: Iterable[tuple[float | None, float | None]], metric: str = ACCURACY
) -> float | None:
    """Return the fraction of clients degraded: their model's metric is worse."""
    worse = [
        is_worse(metric, model, other)
        for model, other in pairs
        if model is not None and other is not None
    ]
    return sum(worse) / len(worse) if worse else None


def summarise(
    results: Iterable[ClientResult], metrics: Sequence[str] = ()
) -> GroupSummary:
    """Compute the figures of a group of clients, in any order."""
    group = _Group(metrics)
    for result in results:
        group.add(result)
    return group.summary()


def summarise_groups(
    results: Iterable[ClientResult], metrics: Sequence[str] = ()
) -> dict[str, Any]:
    """Compute the figures of the seen and of the unseen clients, as plain values."""
    groups = {True: _Group(metrics), False: _Group(metrics)}
    for result in results:
        groups[result.seen].add(result)
    return {
        "seen": groups[True].summary().as_document(),
        "unseen": groups[False].summary().as_document(),
    }


def training_summary(
    rounds: Sequence[Mapping[str, float | int]], results: Iterable[ClientResult]
) -> dict[str, Any]:
    """Summarise costs and validation accuracies of the rounds, as plain values."""
    total = correct = 0
    for result in results:
        if result.seen:
            total += result.validation.num_examples
            correct += result.validation.num_correct
    return {
        "num_rounds": len(rounds),
        "train_loss": rounds[-1]["train_loss"] if rounds else None,
        **{name: sum(record.get(name, 0) for record in rounds) for name in _TOTALS},
        "validation": {"accuracy_weighted": correct / total if total else None},
        **{name: rounds[-1][name] for name in _LAST if rounds and name in rounds[-1]},
    }


class Total:
    """A running `math.fsum`, in blocks of 100,000 numbers."""

    def __init__(self) -> None:
        self._numbers = array("d")

    def add(self, number: float) -> None:
        """Add a number."""
        if len(self._numbers) >= MOST_SUMMED:
            self._numbers = array("d", [self.value])
        self._numbers.append(number)

    @property
    def value(self) -> float:
        """The sum so far."""
        return math.fsum(self._numbers)


class PooledBins:
    """Running sums of the calibration bins of evaluations."""

    def __init__(self) -> None:
        self._confidence = [Total() for _ in range(NUM_CALIBRATION_BINS)]
        self.correct = [0] * NUM_CALIBRATION_BINS
        self.counts = [0] * NUM_CALIBRATION_BINS

    def add(self, evaluation: Evaluation) -> None:
        """Add an evaluation, which must have examples."""
        for total, number in zip(
            self._confidence, evaluation.bin_confidence, strict=True
        ):
            total.add(number)
        self.correct = list(map(operator.add, self.correct, evaluation.bin_correct))
        self.counts = list(map(operator.add, self.counts, evaluation.bin_counts))

    @property
    def confidence(self) -> list[float]:
        """Sum of the confidences in each bin."""
        return [total.value for total in self._confidence]


class _Model:
    """Running figures of one kind of model over clients.

    Figures of single clients are stored in arrays: there may be a million clients.
    """

    def __init__(self, metrics: Sequence[str]) -> None:
        self.sizes = array("q")  # test examples
        self._values = {name: array("d") for name in (ACCURACY, *metrics)}
        # Clients with an accuracy.
        self.num_examples = 0
        self.num_right, self.log_loss_sum = Total(), Total()
        self.bins = PooledBins()

    def add(self, evaluation: Evaluation) -> None:
        """Add the evaluation of a client's model."""
        self.sizes.append(evaluation.num_examples)
        for name, values in self._values.items():
            value = metric_of(evaluation, name)
            values.append(math.nan if value is None else value)
        if evaluation.accuracy is not None:
            self.num_examples += evaluation.num_examples
            self.num_right.add(_num_right(evaluation))
            self.log_loss_sum.add(evaluation.log_loss_sum)
            self.bins.add(evaluation)

    def known(self, metric: str) -> list[float]:
        """Return a metric of the clients with a defined value."""
        return [value for value in self._values[metric] if not math.isnan(value)]

    def sizes_with(self, metric: str) -> list[int]:
        """Return the numbers of test examples of the clients with a defined metric."""
        both = zip(self.sizes, self._values[metric], strict=True)
        return [size for size, value in both if not math.isnan(value)]

    def pairs_with(
        self, other: "_Model", metric: str
    ) -> Iterator[tuple[float, float | None]]:
        """Yield, client by client, the defined values of a metric with another model's.

        The other value is None if it is undefined.
        """
        for value, other_value in zip(
            self._values[metric], other._values[metric], strict=True
        ):
            if not math.isnan(value):
                yield value, None if math.isnan(other_value) else other_value


class _Group:
    """Running figures of both models over clients."""

    def __init__(self, metrics: Sequence[str]) -> None:
        self._metrics = metrics
        self._personal, self._reference = _Model(metrics), _Model(metrics)

    def add(self, result: ClientResult) -> None:
        """Add a client's result."""
        self._personal.add(result.personal)
        self._reference.add(result.reference)

    def summary(self) -> GroupSummary:
        """Return the figures of the clients added so far."""
        return GroupSummary(
            _summary(self._personal, self._reference, self._metrics),
            _summary(self._reference, self._reference, self._metrics),
        )


def _summary(model: _Model, reference: _Model, metrics: Sequence[str]) -> Summary:
    """Summarise personalised models; ``reference`` is the global model."""
    accuracies, num_clients = model.known(ACCURACY), len(model.sizes)
    num_empty = num_clients - len(accuracies)
    of_metrics = {
        name: value
        for metric in metrics
        if metric != ACCURACY
        for name, value in metric_figures(model, reference, metric).items()
    }
    if not accuracies:
        return Summary(num_clients, num_empty, 0, metrics=of_metrics)
    mean, bottom_decile, worst, std = _spread(ACCURACY, accuracies)
    return Summary(
        num_clients=num_clients,
        num_empty=num_empty,
        num_test_examples=model.num_examples,
        accuracy_weighted=model.num_right.value / model.num_examples,
        accuracy_mean=mean,
        accuracy_bottom_decile=bottom_decile,
        accuracy_worst=worst,
        accuracy_std=std,
        fraction_degraded=fraction_degraded(model.pairs_with(reference, ACCURACY)),
        ece=_calibration_error(
            model.bins.confidence, model.bins.correct, model.num_examples
        ),
        log_loss=model.log_loss_sum.value / model.num_examples,
        metrics=of_metrics,
    )


def _num_right(evaluation: Evaluation) -> float:
    """Return the number of correct examples, weighted as the accuracy is."""
    if evaluation.weight_sum is None:
        return evaluation.num_correct
    return evaluation.num_examples * (evaluation.accuracy or 0.0)


def _calibration_error(
    confidence: Iterable[float], correct: Iterable[int], num_examples: int
) -> float | None:
    """Return Σ_b (n_b / n) |accuracy_b - confidence_b| over the bins."""
    if num_examples == 0:
        return None
    both = zip(confidence, correct, strict=True)
    return math.fsum(abs(sure - right) for sure, right in both) / num_examples

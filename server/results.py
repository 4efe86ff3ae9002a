"""Results of clients: plausibility, figures of groups, and result files."""

import codecs
import csv
import itertools
import math
import operator
import statistics
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from knnper.files import written_atomically
from knnper.metrics import ACCURACY, METRICS, is_worse, worst_first
from knnper.settings import LARGEST_COUNT
from knnper.strategies.core.task import (
    NUM_CALIBRATION_BINS,
    ClientResult,
    Evaluation,
    Validation,
)

MOST_CHOSEN = 64  # settings that a method may choose for a client
_LONGEST_NAME = 64

# -log(p) of the p >= 1e-12 at which `Evaluation.log_loss_sum` is clipped.
_LARGEST_LOG_LOSS = -math.log(1e-12)

# Sums of float32 probabilities may end a little above the truth.
_TOLERANCE = 1e-3

# Images of one group of clients: their task takes a fraction of a second, so that many
# workers are busy until the end, and the overhead of a task is small.
IMAGES_AT_ONCE = 1024

# Former names of keys in result files, which are still read.
EARLIER_NAMES = {
    "fraction_hurt": "fraction_degraded",
    "hand_over": "model_distribution",
    "away": "offline",
}

# Distribution of a metric over clients, see `metric_figures`.
OVER_CLIENTS = (
    *("weighted", "mean", "bottom_decile", "worst", "std"),
    *("fraction_degraded", "num_undefined"),
)
_TOTALS = ("seconds", "bytes_up", "bytes_down", "num_failed")
_LAST = ("virtual_seconds",)
_COLUMNS = ("client", "seen", "num_train", "num_validation", "num_test")
MOST_SUMMED = 100_000


def evaluation_problem(
    evaluation: object,
    most_examples: int = LARGEST_COUNT,
    metrics: Collection[str] | None = (),
) -> str | None:
    """Describe why an evaluation is implausible; None if it is plausible.

    ``metrics`` are the requested metrics; None to allow any.
    """
    if not isinstance(evaluation, Evaluation):
        return f"expected an Evaluation, found a {type(evaluation).__name__}"
    correct, total = evaluation.num_correct, evaluation.num_examples
    if not _are_counts((correct, total)) or not correct <= total <= most_examples:
        return (
            f"{correct!r} of {total!r} examples cannot be right where there are at "
            f"most {most_examples}"
        )
    if not _is_between(evaluation.log_loss_sum, _LARGEST_LOG_LOSS * total):
        return f"{evaluation.log_loss_sum!r} cannot be the log-loss of {total} examples"
    if not _weights_fit(evaluation):
        return "the weights of the labels do not fit"
    if not _bins_fit(evaluation):
        return "the calibration bins do not fit"
    return next(_metric_problems(evaluation.metrics, metrics), None)


def _metric_problems(
    values: Mapping[str, float | None], expected: Collection[str] | None
) -> Iterator[str]:
    for name, value in values.items():
        if expected is not None and name not in expected:
            yield f"found a metric {name[:_LONGEST_NAME]!r} that was not requested"
        # All metrics of this project that clients send are fractions.
        elif value is not None and not (
            _is_between(value, 1.0) if name in METRICS else _is_finite(value)
        ):
            yield f"{value!r} cannot be the {name} of a model"


def validation_problem(validation: object, most_examples: int) -> str | None:
    """Describe why a validation is implausible; None if it is plausible."""
    if not isinstance(validation, Validation):
        return f"expected a Validation, found a {type(validation).__name__}"
    correct, total = validation.num_personal_correct, validation.num_personal
    if not _are_counts((correct, total)) or not correct <= total <= most_examples:
        return (
            f"personalised models cannot be right on {correct!r} of {total!r} examples "
            f"where there are at most {most_examples}"
        )
    return evaluation_problem(validation.reference, most_examples)


def result_problem(
    result: ClientResult, metrics: Collection[str] | None = ()
) -> str | None:
    """Describe why a client's result is implausible; None if it is plausible."""
    if not _are_counts((result.num_train, result.num_validation)):
        return (
            f"expected numbers of examples, found {result.num_train!r} and "
            f"{result.num_validation!r}"
        )
    for evaluation in (result.personal, result.reference, result.validation):
        problem = evaluation_problem(evaluation, metrics=metrics)
        if problem is not None:
            return problem
    if len(result.chosen) > MOST_CHOSEN:
        return f"expected at most {MOST_CHOSEN} settings, found {len(result.chosen)}"
    for name, value in result.chosen.items():
        if not name.isprintable() or len(name) > _LONGEST_NAME:
            return f"expected a setting's name, found {name[:_LONGEST_NAME]!r}"
        if not _is_finite(value):
            return f"expected a finite number as {name}, found {value!r}"
    return None


def _weights_fit(evaluation: Evaluation) -> bool:
    """Return whether the sums of weights are plausible: both given, or neither."""
    total, correct = evaluation.weight_sum, evaluation.weight_correct
    if total is None or correct is None:
        return total is correct
    return (
        _is_between(total, evaluation.num_examples)
        and _is_between(correct, total)
        and correct
        >= 0  # 0 <= correct <= total may fail by rounding where total is about 0
    )


def _bins_fit(evaluation: Evaluation) -> bool:
    counts, correct = evaluation.bin_counts, evaluation.bin_correct
    confidence = evaluation.bin_confidence
    lengths = {len(counts), len(correct), len(confidence)}
    if lengths == {0} and evaluation.num_examples == 0:
        return True
    return (
        lengths == {NUM_CALIBRATION_BINS}
        and _are_counts((*counts, *correct))
        and sum(counts) == evaluation.num_examples
        and sum(correct) == evaluation.num_correct
        and all(right <= count for right, count in zip(correct, counts, strict=True))
        and all(map(_is_between, confidence, counts))
    )


def _are_counts(values: Iterable[object]) -> bool:
    return all(type(value) is int and 0 <= value <= LARGEST_COUNT for value in values)


def _is_between(value: float, most: float) -> bool:
    """Return whether a number lies in [0, most], except for rounding."""
    least, largest = -_TOLERANCE, most * (1 + _TOLERANCE)
    return _is_finite(value) and least <= value <= largest


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -math.inf < value < math.inf


def in_groups(
    sizes: Mapping[str, int], at_once: int = IMAGES_AT_ONCE
) -> Iterator[tuple[str, ...]]:
    """Yield groups of clients, in the order of ``sizes``, of about the same size."""
    num_groups = max(1, math.ceil(sum(sizes.values()) / at_once))
    share = max(1, sum(sizes.values())) / num_groups
    ends = itertools.accumulate(sizes.values())
    # A client belongs to the group that contains its middle image.
    middles = (end - size / 2 for end, size in zip(ends, sizes.values(), strict=True))
    numbered = zip(sizes, (int(middle / share) for middle in middles), strict=True)
    for _, group in itertools.groupby(numbered, key=lambda member: member[1]):
        yield tuple(name for name, _ in group)


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
    follows = _FROM_SUMS.get(metric)
    return follows(evaluation) if follows else evaluation.metrics.get(metric)


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


def with_present_names(results: dict[str, Any]) -> dict[str, Any]:
    """Replace former names in the content of a ``results.json``."""
    groups = [results.get(name, {}) for name in ("seen", "unseen")]
    figures = [group.get("global", {}) for group in groups]
    for part in (*groups, *figures, results.get("hand_over", {}), results):
        for name in EARLIER_NAMES.keys() & part.keys():
            part[EARLIER_NAMES[name]] = part.pop(name)
    return results


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


def write_clients_csv(
    path: Path,
    results: Iterable[ClientResult],
    metrics: Sequence[str] = (),
    columns_of_clients: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> None:
    """Write one row a client; equal results give equal bytes.

    Parameters
    ----------
    results
        Sorted by name; iterated twice.
    columns_of_clients
        Further columns, by client.
    """
    measured = list(dict.fromkeys([ACCURACY, "log_loss", *metrics]))
    columns = [
        *_COLUMNS,
        *(column for result in measured for column in columns_of(result)),
    ]
    chosen = {
        key
        for result in results
        for key in itertools.chain(
            result.chosen, columns_of_clients.get(result.client, ())
        )
    }
    header = [*columns, *sorted(chosen.difference(columns))]
    with written_atomically(path) as file:
        text = codecs.getwriter("utf-8")(file)
        writer = csv.DictWriter(text, header, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {**_row(result, measured), **columns_of_clients.get(result.client, {})}
            for result in results
        )


def columns_of(metric: str) -> tuple[str, str]:
    """Return the columns of a metric: of the client's own and the global model."""
    return metric, f"{metric}_global"


def _row(result: ClientResult, metrics: Sequence[str]) -> dict[str, str]:
    models = result.personal, result.reference
    figures = {
        column: metric_of(model, metric)
        for metric in metrics
        for column, model in zip(columns_of(metric), models, strict=True)
    }
    return {
        **{name: repr(float(value)) for name, value in result.chosen.items()},
        "client": result.client,
        "seen": str(result.seen).lower(),
        "num_train": str(result.num_train),
        "num_validation": str(result.num_validation),
        "num_test": str(result.personal.num_examples),
        **{
            name: "" if value is None else repr(value)
            for name, value in figures.items()
        },
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


def _own_calibration_error(evaluation: Evaluation) -> float | None:
    return _calibration_error(
        evaluation.bin_confidence, evaluation.bin_correct, evaluation.num_examples
    )


def _own_log_loss(evaluation: Evaluation) -> float | None:
    return (
        evaluation.log_loss_sum / evaluation.num_examples
        if evaluation.num_examples
        else None
    )


_FROM_SUMS: Mapping[str, Callable[[Evaluation], float | None]] = {
    ACCURACY: lambda evaluation: evaluation.accuracy,
    "log_loss": _own_log_loss,
    "ece": _own_calibration_error,
}

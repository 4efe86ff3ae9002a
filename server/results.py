"""Results of clients: plausibility, figures of groups of them, and their files."""

import csv
import io
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from knnper.experiment import LARGEST_COUNT
from knnper.files import write_atomically
from knnper.strategies.core.task import NUM_CALIBRATION_BINS, ClientResult, Evaluation

MOST_CHOSEN = 64

"""Settings that a method may choose for a client."""

_LONGEST_NAME = 64

# -log(p) of the p >= 1e-12 at which `Evaluation.log_loss_sum` is clipped.
_LARGEST_LOG_LOSS = -math.log(1e-12)

# Sums of float32 probabilities may end a little above the truth.
_TOLERANCE = 1e-3


def evaluation_problem(
    evaluation: object, most_examples: int = LARGEST_COUNT
) -> str | None:
    """Return why an evaluation cannot be true; None if it can."""
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
    return None if _bins_fit(evaluation) else "the calibration bins do not fit"


def result_problem(result: ClientResult) -> str | None:
    """Return why a client's report cannot be true; None if it can."""
    if not _are_counts((result.num_train, result.num_validation)):
        return (
            f"expected numbers of examples, found {result.num_train!r} and "
            f"{result.num_validation!r}"
        )
    for evaluation in (result.personal, result.reference, result.validation):
        problem = evaluation_problem(evaluation)
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
    """Return whether both sums of weights are there or neither, and can be true."""
    total, correct = evaluation.weight_sum, evaluation.weight_correct
    if total is None or correct is None:
        return total is correct
    return (
        _is_between(total, evaluation.num_examples)
        and _is_between(correct, total)
        and correct >= 0  # of a sum that is a little below 0 any part is possible
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
    return all(type(one) is int and 0 <= one <= LARGEST_COUNT for one in values)


def _is_between(value: float, most: float) -> bool:
    """Return whether a number lies in [0, most], but for rounding."""
    least, largest = -_TOLERANCE, most * (1 + _TOLERANCE)
    return _is_finite(value) and least <= value <= largest


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -math.inf < value < math.inf


IMAGES_AT_ONCE = 1024

"""Images of the clients of one group. A task of so many takes a fraction of a second,
so that many workers have something to do until the end; its overhead is small."""


def in_groups(
    sizes: Mapping[str, int], at_once: int = IMAGES_AT_ONCE
) -> Iterator[tuple[str, ...]]:
    """Yield groups of clients, in the order of ``sizes``, of about the same size."""
    num_groups = max(1, math.ceil(sum(sizes.values()) / at_once))
    share = max(1, sum(sizes.values())) / num_groups
    ends = itertools.accumulate(sizes.values())
    # A client belongs to the group in whose share its middle lies.
    middles = (end - size / 2 for end, size in zip(ends, sizes.values(), strict=True))
    numbered = zip(sizes, (int(middle / share) for middle in middles), strict=True)
    for _, group in itertools.groupby(numbered, key=lambda member: member[1]):
        yield tuple(name for name, _ in group)


Pairs = Sequence[tuple[Evaluation, Evaluation]]
EARLIER_NAMES = {
    "fraction_hurt": "fraction_degraded",
    "hand_over": "model_distribution",
    "away": "offline",
}

"""What keys were called in files of earlier versions, which are still read."""


@dataclass(frozen=True)
class Summary:
    """How one kind of model did on the test splits of a group of clients.

    A client without test examples is counted, and left out of all other figures.
    These are None when no client is left. A client's accuracy is `Evaluation.accuracy`:
    where labels count differently, every accuracy below is one of those, while ``ece``
    and ``log_loss`` count all examples alike.

    Attributes
    ----------
    num_clients, num_empty
        Clients of the group; those of them without test examples.
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


@dataclass(frozen=True)
class GroupSummary:
    """The personalised and the unpersonalised models of one group of clients."""

    personal: Summary
    reference: Summary

    def as_document(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self.personal), "global": asdict(self.reference)}


def fraction_degraded(
    accuracies: Iterable[tuple[float | None, float | None]],
) -> float | None:
    """Return the fraction of clients degraded: their model is right less often."""
    worse = [
        own < other
        for own, other in accuracies
        if own is not None and other is not None
    ]
    return sum(worse) / len(worse) if worse else None


def with_present_names(results: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a ``results.json`` in which earlier names are replaced."""
    groups = [results.get(name, {}) for name in ("seen", "unseen")]
    figures = [group.get("global", {}) for group in groups]
    for part in (*groups, *figures, results.get("hand_over", {}), results):
        for name in EARLIER_NAMES.keys() & part.keys():
            part[EARLIER_NAMES[name]] = part.pop(name)
    return results


def summarise(results: Sequence[ClientResult]) -> GroupSummary:
    """Return the figures of a group of clients, in any order."""
    personal = [(result.personal, result.reference) for result in results]
    reference = [(result.reference, result.reference) for result in results]
    return GroupSummary(_summary(personal), _summary(reference))


def summarise_groups(results: Sequence[ClientResult]) -> dict[str, Any]:
    """Return the figures of the seen and of the unseen clients, as plain values."""
    seen = [result for result in results if result.seen]
    unseen = [result for result in results if not result.seen]
    return {
        "seen": summarise(seen).as_document(),
        "unseen": summarise(unseen).as_document(),
    }


def training_summary(
    rounds: Sequence[Mapping[str, float | int]], results: Iterable[ClientResult]
) -> dict[str, Any]:
    """Return what the rounds took and led to, as plain values."""
    validations = [result.validation for result in results if result.seen]
    total = sum(one.num_examples for one in validations)
    correct = sum(one.num_correct for one in validations)
    return {
        "num_rounds": len(rounds),
        "train_loss": rounds[-1]["train_loss"] if rounds else None,
        **{name: sum(one.get(name, 0) for one in rounds) for name in _TOTALS},
        "validation": {"accuracy_weighted": correct / total if total else None},
    }


_TOTALS = ("seconds", "bytes_up", "bytes_down", "num_failed")


def write_clients_csv(path: Path, results: Iterable[ClientResult]) -> None:
    """Write one row a client, sorted by name; equal results give equal bytes."""
    rows = [_row(result) for result in sorted(results, key=lambda one: one.client)]
    chosen = sorted({key for row in rows for key in row} - set(_COLUMNS))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*_COLUMNS, *chosen], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


_COLUMNS = (
    "client",
    "seen",
    "num_train",
    "num_validation",
    "num_test",
    "accuracy",
    "accuracy_global",
    "log_loss",
    "log_loss_global",
)


def _row(result: ClientResult) -> dict[str, str]:
    figures = {
        "accuracy": result.personal.accuracy,
        "accuracy_global": result.reference.accuracy,
        "log_loss": _log_loss([result.personal]),
        "log_loss_global": _log_loss([result.reference]),
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


def _summary(pairs: Pairs) -> Summary:
    """Return the figures of the first of each pair; the second is the global model."""
    tested = [pair for pair in pairs if pair[0].accuracy is not None]
    num_empty = len(pairs) - len(tested)
    if not tested:
        return Summary(len(pairs), num_empty, 0)
    evaluations = [evaluation for evaluation, _ in tested]
    num_test_examples = sum(one.num_examples for one in evaluations)
    accuracies = sorted(one.accuracy or 0.0 for one in evaluations)
    return Summary(
        num_clients=len(pairs),
        num_empty=num_empty,
        num_test_examples=num_test_examples,
        accuracy_weighted=math.fsum(map(_num_right, evaluations)) / num_test_examples,
        accuracy_mean=statistics.fmean(accuracies),
        accuracy_bottom_decile=accuracies[max(1, len(accuracies) // 10) - 1],
        accuracy_worst=accuracies[0],
        accuracy_std=statistics.pstdev(accuracies),
        fraction_degraded=fraction_degraded(
            (one.accuracy, other.accuracy) for one, other in tested
        ),
        ece=_calibration_error(evaluations),
        log_loss=_log_loss(evaluations),
    )


def _num_right(evaluation: Evaluation) -> float:
    """Return the examples that are right, or as many as the accuracy stands for."""
    if evaluation.weight_sum is None:
        return evaluation.num_correct
    return evaluation.num_examples * (evaluation.accuracy or 0.0)


def _calibration_error(evaluations: Sequence[Evaluation]) -> float:
    """Return Σ_b (n_b / n) |accuracy_b - confidence_b| over the pooled bins."""
    correct = zip(*(one.bin_correct for one in evaluations), strict=True)
    confidence = zip(*(one.bin_confidence for one in evaluations), strict=True)
    gaps = (
        abs(math.fsum(in_bin) - sum(right))
        for in_bin, right in zip(confidence, correct, strict=True)
    )
    return math.fsum(gaps) / sum(one.num_examples for one in evaluations)


def _log_loss(evaluations: Sequence[Evaluation]) -> float | None:
    num_examples = sum(one.num_examples for one in evaluations)
    if num_examples == 0:
        return None
    return math.fsum(one.log_loss_sum for one in evaluations) / num_examples

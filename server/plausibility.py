"""Checks of the results that clients report: of real clients, any may be wrong."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from knnper.metrics import METRICS
from knnper.settings import LARGEST_COUNT
from knnper.strategies.core.evaluation import (
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

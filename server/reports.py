"""What clients report of themselves, and what of it can be true."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from knnper.experiment import LARGEST_COUNT
from knnper.strategies.core.predictors import (
    NUM_CALIBRATION_BINS,
    ClientResult,
    Evaluation,
)

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
    return _chosen_problem(result)


def _chosen_problem(result: ClientResult) -> str | None:
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

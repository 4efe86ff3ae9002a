"""Figures of an attack, each with an interval at 95 % confidence.

Rates have exact intervals (Clopper and Pearson 1934), and so have medians (order
statistics). The area under the ROC curve has the score interval of Newcombe (2006,
"Confidence intervals for an effect size measure based on the Mann-Whitney statistic.
Part 2", method 5), which also has a width where the attack makes no error at all,
unlike a bootstrap.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtri
from scipy.stats import binom, binomtest, rankdata

CONFIDENCE = 0.95
FALSE_POSITIVE_RATES = {"tpr_at_fpr_0.1%": 0.001, "tpr_at_fpr_1%": 0.01}
Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A measured value with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class EpsilonBound:
    """A lower bound on ε at 95 % confidence, beside the claim.

    ``claimed`` is the accounted ε at the same ``delta``.
    """

    lower: float
    claimed: float
    delta: float

    @property
    def is_violated(self) -> bool:
        """Whether the bound contradicts the claim."""
        return self.lower > self.claimed


@dataclass(frozen=True)
class AttackResult:
    """The outcome of one attack.

    Attributes
    ----------
    surface
        The attacked part: a model, a memory, an update or a mechanism.
    samples
        Sizes of the sample by name, such as ``members``.
    figures
        Measured values by name.
    epsilon
        Of an attack that bounds ε.
    left_out
        Why the attack was not possible; empty if it was.
    """

    attack: str
    surface: str
    samples: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[str, Interval] = field(default_factory=dict)
    epsilon: EpsilonBound | None = None
    left_out: str = ""


def proportion(successes: int, trials: int) -> Interval:
    """Return a rate with its Clopper-Pearson interval; at least one trial."""
    exact = binomtest(successes, trials).proportion_ci(CONFIDENCE, "exact")
    return Interval(successes / trials, float(exact.low), float(exact.high))


def median(values: Scores) -> Interval:
    """Return the median with its interval from order statistics; at least one value.

    Fewer than six values lack the confidence, and have their extremes as the interval.
    """
    ordered = np.sort(values)
    place = max(1, int(binom.ppf((1 - CONFIDENCE) / 2, len(values), 0.5)))
    low, high = ordered[place - 1], ordered[-place]
    return Interval(float(np.median(ordered)), float(low), float(high))


def area_under_curve(members: Scores, others: Scores) -> Interval:
    """Return the probability that a member scores higher than another example.

    A tie counts half. Both arguments have at least one score.
    """
    m, n = len(members), len(others)
    ranks = rankdata(np.concatenate([members, others]))
    area = float((ranks[:m].sum() - m * (m + 1) / 2) / (m * n))
    # The interval of 1 - area is the mirror image, so one solver gives both ends.
    return Interval(area, _lower_end(area, m, n), 1 - _lower_end(1 - area, m, n))


def _lower_end(area: float, m: int, n: int) -> float:
    """Return the lower end of Newcombe's interval for an area of m against n."""
    if area <= 0:
        return 0.0
    quantile = float(ndtri((1 + CONFIDENCE) / 2))
    mean_size = (m + n) / 2 - 1

    def excess(theta: float) -> float:
        """Return the squared error minus its bound if the true area were theta."""
        spread = 1 + mean_size * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        variance = theta * (1 - theta) * spread / (m * n)
        return float((area - theta) ** 2 - quantile**2 * variance)

    return float(brentq(excess, 0.0, area * (1 - 1e-9)))


def true_positive_rate(members: Scores, others: Scores, rate: float) -> Interval:
    """Return the rate of members found at a rate of false positives.

    The threshold is the smallest score above which at most this share of the others
    lies. With fewer others than 1 / ``rate``, no false positive is allowed.
    """
    threshold = np.sort(others)[::-1][math.floor(rate * len(others))]
    return proportion(int((members > threshold).sum()), len(members))


def membership_result(
    attack: str, surface: str, scores: Scores, is_member: NDArray[np.bool_]
) -> AttackResult:
    """Return the figures of a membership attack; higher scores suggest a member."""
    members, others = scores[is_member], scores[~is_member]
    figures = {"auc": area_under_curve(members, others)} | {
        name: true_positive_rate(members, others, rate)
        for name, rate in FALSE_POSITIVE_RATES.items()
    }
    samples = {"members": len(members), "others": len(others)}
    return AttackResult(attack, surface, samples, figures)

"""What a few runs say about a mean: Student's t-interval."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean of a figure over some runs, and how sure it is.

    Attributes
    ----------
    mean
        Of the runs that have the figure; None if none has.
    std
        Standard deviation of the sample; None of fewer than two.
    half_width
        Half of the 95 % t-interval of the mean; None of fewer than two.
    count
        Runs that have the figure.
    """

    mean: float | None
    std: float | None
    half_width: float | None
    count: int


def estimate(values: Iterable[float | None]) -> Estimate:
    """Return mean and interval of the values that are there.

    The half width is t · s / √n, where t is the 97.5 % quantile of Student's
    distribution with n - 1 degrees of freedom and s the sample's standard deviation.
    """
    found = [value for value in values if value is not None]
    mean = statistics.fmean(found) if found else None
    if len(found) < 2:
        return Estimate(mean, None, None, len(found))
    # A server of real clients reports one run, and has no scipy.
    from scipy.special import stdtrit

    std = statistics.stdev(found)
    quantile = float(stdtrit(len(found) - 1, (1 + CONFIDENCE) / 2))
    return Estimate(mean, std, quantile * std / math.sqrt(len(found)), len(found))

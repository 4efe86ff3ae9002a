"""Means over runs with 95 % intervals (Student's t)."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from scipy.special import stdtrit

CONFIDENCE = 0.95
WEAK = "*"  # behind an interval of two runs, see `WEAK_NOTE`
WEAK_NOTE = (
    f"Intervals marked {WEAK} are of two seeds: half of one is 12.7 standard errors of "
    "the mean (of three seeds 4.3, of five 2.8). Add seeds before you compare."
)


@dataclass(frozen=True)
class Estimate:
    """The mean of a figure over some runs, and how sure it is."""

    mean: float | None
    std: float | None
    half_width: float | None
    count: int

    @property
    def mark(self) -> str:
        """`WEAK` where the interval is of two runs, else nothing."""
        return WEAK if self.count == 2 and self.half_width is not None else ""

    def flat(
        self, name: str, deviation: str = "_std", half: str = "_half_width"
    ) -> dict[str, float | None]:
        """Return mean, deviation and half width by their names in a file."""
        names = (name, f"{name}{deviation}", f"{name}{half}")
        return dict(zip(names, (self.mean, self.std, self.half_width), strict=True))

    def text(self, scale: float = 100.0, digits: int = 1) -> str:
        """Return it with its interval, of a fraction in percent: ``79.9 ± 1.2``."""
        if self.mean is None:
            return "-"
        ends = [self.mean, *([] if self.half_width is None else [self.half_width])]
        return " ± ".join(f"{scale * one:.{digits}f}" for one in ends) + self.mark

    def percent(self) -> str:
        """Return a fraction with the sign, as in ``79.9 ± 1.2 %``."""
        text = self.text().removesuffix(WEAK)
        return "-" if self.mean is None else f"{text} %{self.mark}"


def estimate(values: Iterable[float | None]) -> Estimate:
    """Return mean and interval of the values that are there."""
    # Half of it is t · s / √n: t the 97.5 % quantile of Student's distribution with
    # n - 1 degrees of freedom, s the sample's standard deviation.
    found = [value for value in values if value is not None]
    mean = statistics.fmean(found) if found else None
    if len(found) < 2:
        return Estimate(mean, None, None, len(found))
    std = statistics.stdev(found)
    quantile = float(stdtrit(len(found) - 1, (1 + CONFIDENCE) / 2))
    return Estimate(mean, std, quantile * std / math.sqrt(len(found)), len(found))

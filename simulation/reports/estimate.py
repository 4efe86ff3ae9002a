"""Means over runs with 95 % intervals (Student's t)."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from scipy.special import stdtrit

CONFIDENCE = 0.95
WEAK = "*"  # marks the interval of two runs, see `WEAK_NOTE`
WEAK_NOTE = (
    f"Intervals marked {WEAK} are of two seeds: half of one is 12.7 standard errors of "
    "the mean (of three seeds 4.3, of five 2.8). Add seeds before you compare."
)


@dataclass(frozen=True)
class Estimate:
    """The mean of a figure over runs, with its 95 % interval.

    Attributes
    ----------
    std
        The sample's standard deviation; None for fewer than two runs.
    half_width
        Half of the interval; None for fewer than two runs.
    count
        Runs that have the figure.
    """

    mean: float | None
    std: float | None
    half_width: float | None
    count: int

    @property
    def mark(self) -> str:
        """`WEAK` if the interval is of two runs, else empty."""
        return WEAK if self.count == 2 and self.half_width is not None else ""

    def flat(
        self, name: str, deviation: str = "_std", half: str = "_half_width"
    ) -> dict[str, float | None]:
        """Return mean, deviation and half width by their column names in a file."""
        return {
            name: self.mean,
            f"{name}{deviation}": self.std,
            f"{name}{half}": self.half_width,
        }

    def text(self, scale: float = 100.0, digits: int = 1) -> str:
        """Format mean and half width, of a fraction in percent: ``79.9 ± 1.2``."""
        if self.mean is None:
            return "-"
        text = f"{scale * self.mean:.{digits}f}"
        if self.half_width is not None:
            text += f" ± {scale * self.half_width:.{digits}f}"
        return text + self.mark

    def percent(self) -> str:
        """Format a fraction with its unit, as in ``79.9 ± 1.2 %``."""
        if self.mean is None:
            return "-"
        return f"{self.text().removesuffix(WEAK)} %{self.mark}"


def estimate(values: Iterable[float | None]) -> Estimate:
    """Return mean and interval of the values that are not None.

    Half of the interval is t · s / √n, with t the 97.5 % quantile of Student's
    distribution with n - 1 degrees of freedom and s the sample's standard deviation.
    """
    known = [value for value in values if value is not None]
    mean = statistics.fmean(known) if known else None
    if len(known) < 2:
        return Estimate(mean, None, None, len(known))
    # Exact sums, where pandas' depend on the order of the values.
    std = statistics.stdev(known)
    quantile = float(stdtrit(len(known) - 1, (1 + CONFIDENCE) / 2))
    return Estimate(mean, std, quantile * std / math.sqrt(len(known)), len(known))

"""Conformal p-values of scores that arrive one by one."""

from array import array
from bisect import bisect_left, bisect_right, insort

import numpy as np

from datastore.drift.scores import Scores

SMALLEST = 2.0**-53
"""p-values keep this far from 0 and 1, where a bet could pay infinitely much."""


class RankedScores:
    """All scores so far, in order.

    Parameters
    ----------
    scores
        Ascending, shape (n,).
    """

    def __init__(self, scores: Scores) -> None:
        self._scores = array("d", scores.tobytes())

    def add(self, score: float, tie_break: float) -> float:
        """Add a score and return its smoothed p-value.

        p = (#{scores > score} + θ #{scores = score}) / (n + 1), both counts with the
        score itself: Vovk, Nouretdinov, Gammerman, "Testing Exchangeability On-Line",
        ICML 2003. As each score joins the ones that the next is compared with,
        the p-values of exchangeable scores are independent and uniform in [0, 1].

        Parameters
        ----------
        score
            Not NaN.
        tie_break
            θ, uniform in (0, 1).
        """
        num_below = bisect_left(self._scores, score)
        num_up_to = bisect_right(self._scores, score)
        insort(self._scores, score)
        num_scores = len(self._scores)
        num_greater = num_scores - 1 - num_up_to
        num_equal = num_up_to - num_below + 1
        p_value = (num_greater + tie_break * num_equal) / num_scores
        return min(max(p_value, SMALLEST), 1 - SMALLEST)

    def ascending(self) -> Scores:
        """Return a copy of all scores, ascending."""
        return np.array(self._scores, np.float64)

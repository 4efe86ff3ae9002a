"""An alarm that goes off when arriving examples stop resembling the reference.

Inductive conformal martingales: Vovk, Nouretdinov, Gammerman, "Testing Exchangeability
On-Line", ICML 2003, and Volkhonskiy, Burnaev, Nouretdinov, Gammerman, Vovk, "Inductive
Conformal Martingales for Change-Point Detection", COPA 2017; in the form of Shiryaev
and Roberts (Vovk, Petej, Nouretdinov, Ahlberg, Carlsson, Gammerman, "Retrain or not
retrain: conformal test martingales for change-point detection", COPA 2021).
"""

import math
from array import array
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper import RandomKey
from knnper.datastore.store import Store

# ε of the bets; a smaller ε gains more from extreme p-values.
EXPONENTS = (0.2, 0.4, 0.6, 0.8)

NUM_BETS = 2 * len(EXPONENTS)
Scores = NDArray[np.float64]

# Distance of p-values from 0 and 1, where a bet's factor could be infinite.
SMALLEST = 2.0**-53
TIE_BREAK_BITS = 52


def log_bets(p_values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the log of the factor of each bet.

    The power bets ε p^(ε-1) of Vovk, Nouretdinov, Gammerman, ICML 2003, gain if p is
    small: the example is farther from the memory than usual. The same bets on 1 - p
    gain if it is nearer than usual, for example if a client's data narrow down to few
    labels. Each integrates to 1, so uniform p-values bring no gain on average. Maps
    p-values in (0, 1), shape (m,), to float64 of shape (m, `NUM_BETS`).
    """
    exponents = np.array(EXPONENTS)
    logs = np.stack([np.log(p_values), np.log1p(-p_values)], axis=1)
    bets: NDArray[np.float64] = np.log(exponents) + (exponents - 1) * logs[:, :, None]
    return bets.reshape(len(p_values), NUM_BETS)


def neighbor_scores(memory: Store, embeddings: Tensor, num_neighbors: int) -> Scores:
    """Compute the mean distance of each example to its nearest stored examples.

    The memory must be the same for the reference and for all arriving examples, since
    distances shrink when the memory grows. If the store changes, score against a copy
    from the time of the reference. Maps float32 of shape (m, p) to float64 of shape
    (m,).
    """
    if len(memory) == 0:
        raise ValueError("expected a memory of at least 1 example, found 0; add some")
    neighbors = memory.search(embeddings, num_neighbors)
    distances = neighbors.squared_distances.sqrt()
    return np.asarray(distances.mean(dim=1), np.float64)


def label_scores(
    memory: Store, embeddings: Tensor, labels: Tensor, num_neighbors: int
) -> Scores:
    """Compute the mean distance of each example to the nearest with the same label.

    Recommended if labels arrive, too: unlike `neighbor_scores`, it also rises if the
    representations of labels overlap, and if the same inputs come with other labels.
    All stored examples of the labels are compared; infinite if the label is not stored.
    """
    contents = memory.contents()
    scores = torch.full((len(labels),), torch.inf, dtype=torch.float64)
    for label in np.unique(labels.numpy()).tolist():
        stored = memory.vectors(contents.ids[contents.labels == label])
        if len(stored) == 0:
            continue
        arriving = labels == label
        distances = torch.cdist(embeddings[arriving].double(), stored.double())
        nearest = distances.topk(min(num_neighbors, len(stored)), largest=False)
        scores[arriving] = nearest.values.mean(dim=1)
    return np.asarray(scores, np.float64)


class RankedScores:
    """All scores so far, ascending."""

    def __init__(self, scores: Scores) -> None:
        self._scores = array("d", scores.tobytes())

    def add(self, score: float, tie_break: float) -> float:
        """Add a score (not NaN) and return its smoothed p-value.

        p = (#{scores > score} + θ #{scores = score}) / (n + 1), where the counts
        include the score itself and θ is uniform in (0, 1): Vovk, Nouretdinov,
        Gammerman, ICML 2003. The p-values of exchangeable scores are independent and
        uniform in [0, 1].
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


@dataclass(frozen=True)
class AlarmState:
    """State of an alarm."""

    scores: Scores  # of the reference and of all later examples, ascending
    num_scored: int  # examples since the reference
    log_statistics: NDArray[np.float64]  # log R of each bet, shape (`NUM_BETS`,)
    # Number of the example, from 1, at which the alarm went off, or None. An alarm
    # stays on; a new reference starts a new one.
    alarmed_at: int | None


@dataclass(frozen=True)
class DriftAlarm:
    """Rule of an alarm (Shiryaev and Roberts).

    Each example's score becomes a p-value among all scores so far, and a bet g turns
    the p-value into a factor. The statistic is R_n = (1 + R_{n-1}) g(p_n), the sum over
    all starts i ≤ n of the test martingale g(p_i) ... g(p_n) that bets on a change at
    i, averaged over the bets. The alarm goes off as soon as R_n ≥ h.

    While the scores are exchangeable, R_n - n is a martingale. So for any distribution
    of the scores,

    - on average at least h examples come before a false alarm (optional stopping), and
    - a false alarm comes among the first N examples with probability at most N / h
      (Doob's inequality for the submartingale R_n; it takes the place of Ville's).

    Both hold over the draw of the reference, too. An example costs O(log n)
    comparisons.

    Attributes
    ----------
    run_length
        h, the mean number of examples between false alarms, more than 1; usually 10,000
        to 100,000. The delay grows only with log h.
    key
        Root of the tie-breaks; that of example t, from 1, derives from ``child(t)``.
    """

    run_length: float
    key: RandomKey

    def __post_init__(self) -> None:
        if not 1 < self.run_length < math.inf:
            raise ValueError(
                "expected a run_length of more than 1 example between false alarms, "
                f"found {self.run_length}; 10000 is usual"
            )

    def start(self, reference: Scores) -> AlarmState:
        """Return the state before the first example.

        ``reference`` are scores of held-out examples without drift. The guarantee
        requires that they and the arriving examples are exchangeable given the store. A
        larger reference allows smaller p-values; with 100, a strong shift is detected
        within a few examples.
        """
        if len(reference) == 0:
            raise ValueError(
                "expected reference scores to compare with, found none; score held-out "
                "examples"
            )
        _require_numbers(reference)
        nothing_won = np.full(NUM_BETS, -np.inf)
        return AlarmState(np.sort(reference), 0, nothing_won, None)

    def update(self, state: AlarmState, scores: Scores) -> AlarmState:
        """Return the state after examples with these scores, in order of arrival.

        A batch has the same result as its examples one by one. Scores must be computed
        like the reference, and may be infinite.
        """
        _require_numbers(scores)
        ranked = RankedScores(state.scores)
        first = state.num_scored + 1
        threshold = math.log(self.run_length)
        p_values = [
            ranked.add(score, self._tie_break(number))
            for number, score in enumerate(scores.tolist(), first)
        ]
        log_statistics, alarmed_at = state.log_statistics, state.alarmed_at
        for number, log_factors in enumerate(log_bets(np.array(p_values)), first):
            log_statistics = np.logaddexp(0.0, log_statistics) + log_factors
            if alarmed_at is None and log_mean(log_statistics) >= threshold:
                alarmed_at = number
        num_scored = state.num_scored + len(scores)
        return AlarmState(ranked.ascending(), num_scored, log_statistics, alarmed_at)

    def _tie_break(self, number: int) -> float:
        drawn = self.key.child(number).entropy(8) >> (64 - TIE_BREAK_BITS)
        return float((drawn + 0.5) / 2**TIE_BREAK_BITS)


def log_mean(log_statistics: NDArray[np.float64]) -> float:
    """Return log R, to be compared with log h."""
    return float(np.logaddexp.reduce(log_statistics) - math.log(len(log_statistics)))


def _require_numbers(scores: Scores) -> None:
    if np.isnan(scores).any():
        raise ValueError(
            f"expected scores that are numbers, found NaN at position "
            f"{int(np.isnan(scores).argmax())}; check the embeddings"
        )

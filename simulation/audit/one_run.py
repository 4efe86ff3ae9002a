"""A lower bound on ε from one run of a mechanism with random canaries.

Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", 2023. Each of
m canaries is in the data with probability 1/2. The attacker ranks the canaries by a
score, guesses that the highest are in and the lowest are out, and abstains from the
others. Under (ε, δ)-differential privacy, where neighbours differ by one canary, the
number of right guesses has the tail of Theorem 5.2.

Departure from the paper: the number of guesses is the best of a fixed list, and each
has its share of the error probability (Bonferroni), so that the bound holds at 95 %.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom

from knnper.seeding import RandomKey
from knnper.simulation.audit.figures import (
    CONFIDENCE,
    AttackResult,
    EpsilonBound,
    Scores,
    proportion,
)

ONE_RUN = "one_run"
GUESSED_SHARES = (0.05, 0.1, 0.25, 0.5, 1.0)  # of the canaries
LARGEST_EPSILON = 50.0


@dataclass(frozen=True)
class CanaryGame:
    """A mechanism with canaries.

    Attributes
    ----------
    num_canaries
        m; useful from 100 to 10,000.
    play
        ``(included, rng) -> scores``: runs the mechanism once with the canaries that
        are included, bool (m,), and scores each by the output, float64 (m,).
    epsilon, delta
        Claimed for one canary more or less.
    """

    surface: str
    num_canaries: int
    play: Callable[[NDArray[np.bool_], RandomKey], Scores]
    epsilon: float
    delta: float


def audit_in_one_run(game: CanaryGame, rng: RandomKey) -> AttackResult:
    """Play once; return the right guesses and the lower bound on ε."""
    count = game.num_canaries
    included = rng.child("included").numpy().random(count) < 0.5
    scores = game.play(included, rng.child("mechanism"))
    # Ties are broken by lot, never by the order of the canaries.
    order = np.lexsort((rng.child("ties").numpy().random(count), scores))
    ranked = included[order]
    outcomes = []
    for share in GUESSED_SHARES:
        per_side = max(1, int(share * count / 2))
        right = int((~ranked[:per_side]).sum() + ranked[-per_side:].sum())
        error = (1 - CONFIDENCE) / len(GUESSED_SHARES)
        guesses = 2 * per_side
        bound = epsilon_lower_bound(count, guesses, right, game.delta, error)
        outcomes.append((bound, right, guesses))
    bound, right, guesses = max(outcomes)
    return AttackResult(
        ONE_RUN,
        game.surface,
        {"canaries": count, "guesses": guesses},
        {"right_guesses": proportion(right, guesses)},
        EpsilonBound(bound, game.epsilon, game.delta),
    )


def epsilon_lower_bound(
    num_canaries: int,
    num_guesses: int,
    num_right: int,
    delta: float,
    error: float = 1 - CONFIDENCE,
) -> float:
    """Return the ε below which ``num_right`` guesses have a probability of ``error``.

    0 if the guesses are no evidence, at most `LARGEST_EPSILON`.
    """

    def excess(epsilon: float) -> float:
        tail = tail_bound(num_canaries, num_guesses, num_right, epsilon, delta)
        return tail - error

    if excess(0.0) >= 0:
        return 0.0
    if excess(LARGEST_EPSILON) < 0:
        return LARGEST_EPSILON
    return float(brentq(excess, 0.0, LARGEST_EPSILON))


def tail_bound(
    num_canaries: int, num_guesses: int, num_right: int, epsilon: float, delta: float
) -> float:
    """Bound the probability of at least ``num_right`` right guesses (Theorem 5.2).

    P[B >= v] + 2 m δ max_i P[v > B >= v - i] / i over i = 1 to v, for v right guesses
    of r and B ~ Binomial(r, e^ε / (e^ε + 1)).
    """
    rate = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(num_right - 1, num_guesses, rate))
    below = binom.pmf(np.arange(num_right)[::-1], num_guesses, rate)
    slack = (np.cumsum(below) / np.arange(1, num_right + 1)).max(initial=0.0)
    return min(1.0, tail + 2 * num_canaries * delta * float(slack))

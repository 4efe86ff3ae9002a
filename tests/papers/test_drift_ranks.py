"""p-values by hand, and their uniformity; bets and their expectation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papers.drift_alarm import (
    EXPONENTS,
    NUM_BETS,
    RankedScores,
    log_bets,
)

THRESHOLDS = np.linspace(0.0, 1.0, 41)


def test_p_values_by_hand() -> None:
    ranked = RankedScores(np.array([1.0, 2.0, 2.0, 3.0]))

    assert ranked.add(2.0, 0.5) == (1 + 0.5 * 3) / 5
    assert ranked.add(0.0, 0.25) == (5 + 0.25) / 6
    assert ranked.add(np.inf, 0.25) == 0.25 / 7
    assert ranked.add(np.inf, 0.25) == 0.5 / 8
    assert ranked.ascending().tolist() == [0, 1, 2, 2, 2, 3, np.inf, np.inf]


def test_p_values_keep_away_from_the_ends() -> None:
    below_one = np.nextafter(1.0, 0.0)

    assert RankedScores(np.ones(3)).add(2.0, 1e-300) > 0
    assert RankedScores(np.ones(3)).add(0.0, below_one) < 1
    assert np.isfinite(log_bets(np.array([2.0**-53, 1 - 2.0**-53]))).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_the_last_of_exchangeable_scores_has_a_uniform_p_value(
    scores: list[int],
) -> None:
    """Given all scores, any is as likely to be the last; θ spreads it evenly."""
    probability = np.zeros(len(THRESHOLDS))
    for last, score in enumerate(scores):
        others = np.sort(np.array(scores[:last] + scores[last + 1 :], np.float64))
        low = RankedScores(others).add(score, 0.0)
        high = RankedScores(others).add(score, 1.0)
        probability += np.clip((THRESHOLDS - low) / (high - low), 0, 1) / len(scores)

    assert probability == pytest.approx(THRESHOLDS, abs=1e-9)


def test_bets_by_hand() -> None:
    bets = np.exp(log_bets(np.array([0.25, 0.75])))

    assert bets.shape == (2, NUM_BETS)
    strongest = EXPONENTS.index(0.2)
    assert bets[0, strongest] == pytest.approx(0.2 * 0.25**-0.8)
    assert bets[1, strongest] == pytest.approx(0.2 * 0.75**-0.8)
    assert bets[0, NUM_BETS // 2 :] == pytest.approx(bets[1, : NUM_BETS // 2])


def test_uniform_p_values_win_nothing_on_average() -> None:
    """The integral of g over p = exp(-s); those of 1 - p are the same by symmetry."""
    step = 0.001
    s = np.arange(step / 2, 36, step)
    bets = np.exp(log_bets(np.exp(-s))[:, : NUM_BETS // 2] - s[:, None])

    missing = np.exp(-36 * np.array(EXPONENTS))
    assert bets.sum(axis=0) * step + missing == pytest.approx(1, abs=1e-4)

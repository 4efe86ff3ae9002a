import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from knnper.privacy import Release, epsilon_of
from knnper.seeding import RandomKey
from knnper.simulation.audit.figures import Scores
from knnper.simulation.audit.one_run import (
    CanaryGame,
    audit_in_one_run,
    epsilon_lower_bound,
    tail_bound,
)

DELTA = 1e-5


def gaussian_sum_game(
    num_canaries: int, noise_multiplier: float, epsilon: float
) -> CanaryGame:
    """Return the game of a sum with noise; canaries are orthogonal unit vectors."""

    def play(included: NDArray[np.bool_], rng: RandomKey) -> Scores:
        noise = rng.numpy().normal(0, noise_multiplier, num_canaries)
        return np.asarray(included + noise)

    return CanaryGame("sum", num_canaries, play, epsilon, DELTA)


def test_bound_without_delta_is_the_binomial_tail() -> None:
    # 20 right guesses of 20 have the probability q^20, which is 5 % at this ε.
    rate = 0.05 ** (1 / 20)
    bound = epsilon_lower_bound(
        num_canaries=100, num_guesses=20, num_right=20, delta=0.0
    )
    assert bound == pytest.approx(math.log(rate / (1 - rate)), abs=1e-6)


def test_bound_is_zero_for_guesses_like_those_of_a_coin() -> None:
    assert (
        epsilon_lower_bound(num_canaries=100, num_guesses=100, num_right=52, delta=0.0)
        == 0
    )


def test_probability_adds_delta_as_in_the_theorem() -> None:
    m, r, v, epsilon = 30, 12, 10, 0.7
    q = 1 / (1 + math.exp(-epsilon))
    tail = sum(binom.pmf(count, r, q) for count in range(v, r + 1))
    slack = max(
        sum(binom.pmf(count, r, q) for count in range(v - i, v)) / i
        for i in range(1, v + 1)
    )
    expected = tail + 2 * m * 0.001 * slack
    probability = tail_bound(
        num_canaries=m, num_guesses=r, num_right=v, epsilon=epsilon, delta=0.001
    )
    assert probability == pytest.approx(expected)


@pytest.mark.parametrize("noise_multiplier", [1.0, 4.0])
def test_bound_of_a_correct_mechanism_stays_below_its_epsilon(
    noise_multiplier: float,
) -> None:
    epsilon = epsilon_of([Release(noise_multiplier)], DELTA)
    game = gaussian_sum_game(1000, noise_multiplier, epsilon)
    bounds = [audit_in_one_run(game, RandomKey(seed)).epsilon for seed in range(20)]
    assert all(bound is not None and not bound.is_violated for bound in bounds)
    if noise_multiplier == 1:  # and the audit has some power
        assert np.mean([bound.lower for bound in bounds if bound]) > 0.2 * epsilon


def test_mechanism_without_its_noise_is_found_out() -> None:
    bound = audit_in_one_run(gaussian_sum_game(200, 0.0, 1.0), RandomKey(0))
    assert bound.epsilon is not None
    assert bound.epsilon.is_violated
    assert bound.epsilon.lower > 3
    assert bound.figures["right_guesses"].value == 1


def test_scores_that_are_all_equal_bound_nothing() -> None:
    def play(included: NDArray[np.bool_], _: RandomKey) -> Scores:
        return np.zeros(len(included))

    game = CanaryGame("nothing", 500, play, 0.5, DELTA)
    for seed in range(20):
        bound = audit_in_one_run(game, RandomKey(seed)).epsilon
        assert bound is not None
        assert bound.lower < 0.5

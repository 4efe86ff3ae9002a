"""The mechanism of private answers: charges, filter, noise, and the mixture."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest, norm

from knnper.datastore.private_answers import (
    MIN_VOTERS,
    NoisyVotes,
    PrivateAnswerSettings,
    mixed_probabilities,
    noisy_votes,
    normalised,
)
from knnper.privacy import Release, epsilon_of
from knnper.seeding import RandomKey


class NoNoise:
    """A generator of zeros in place of noise."""

    def normal(self, _mean: float, _deviation: float, size: int = 1) -> object:
        return np.zeros(size) if size > 1 else 0.0


def settings_with(count_noise: float = 20.0, **values: object) -> PrivateAnswerSettings:
    """Return settings for as many queries that σ₁ is about ``count_noise``."""
    document: dict[str, object] = {"epsilon": 2.0, "threshold": 0.5}
    settings = PrivateAnswerSettings(**{**document, **values})  # type: ignore[arg-type]
    num_queries = math.ceil(6 * settings.budget * count_noise**2)
    return replace(settings, num_queries=num_queries)


def votes_without_noise(
    cosines: list[list[float]],
    labels: list[int],
    spent: list[float],
    settings: PrivateAnswerSettings,
) -> NoisyVotes:
    return noisy_votes(
        np.array(cosines, np.float32),
        np.array(labels),
        np.array(spent),
        3,
        settings,
        NoNoise(),  # type: ignore[arg-type]
    )


def exact_delta(epsilon: float, noise_multiplier: float) -> float:
    """Return δ of the Gaussian mechanism (Balle and Wang 2018, Theorem 8)."""
    half, ratio = 1 / (2 * noise_multiplier), epsilon * noise_multiplier
    return float(norm.cdf(half - ratio) - math.exp(epsilon) * norm.cdf(-half - ratio))


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 8.0])
def test_budget_is_that_of_one_gaussian_mechanism(epsilon: float) -> None:
    budget = settings_with(epsilon=epsilon, delta=1e-5).budget
    noise_multiplier = 1 / math.sqrt(2 * budget)
    assert exact_delta(epsilon, noise_multiplier) <= 1e-5
    # The search is exact to a thousandth.
    assert exact_delta(epsilon, 0.998 * noise_multiplier) > 1e-5
    assert epsilon_of([Release(noise_multiplier)], 1e-5) <= epsilon


def test_charges_of_three_examples_equal_those_by_hand() -> None:
    settings = settings_with(vote_noise=0.5)
    # The noise is made for at least 30 voters: deviation² = 0.25 * 30 = 7.5.
    votes = votes_without_noise(
        [[1.0, 0.5, 0.25]], [0, 2, 1], [0.0, 0.01, 0.0], settings
    )
    assert MIN_VOTERS == 30
    np.testing.assert_allclose(votes.scores, [[1.0, 0.0, 0.5]])
    np.testing.assert_allclose(votes.deviations, [math.sqrt(7.5)])
    count_charge = settings.count_charge
    np.testing.assert_allclose(
        votes.spent,
        [count_charge + 1 / 15, 0.01 + count_charge + 0.25 / 15, 0.0],
    )


def test_noise_grows_with_the_root_of_the_number_of_voters() -> None:
    settings = settings_with(epsilon=10.0, vote_noise=0.5)
    votes = votes_without_noise([[0.6] * 100], [1] * 100, [0.0] * 100, settings)
    np.testing.assert_allclose(votes.deviations, [0.5 * 10])
    np.testing.assert_allclose(votes.scores, [[0.0, 60.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(
        votes.spent, settings.count_charge + 0.36 / 50, rtol=1e-6
    )


def test_contribution_is_cut_to_the_rest_of_the_budget() -> None:
    settings = settings_with(vote_noise=0.5)
    budget, count_charge = settings.budget, settings.count_charge
    # The rest pays for a contribution of 0.3: 0.09 / 15.
    spent = [budget - count_charge - 0.09 / 15, budget - 0.99 * count_charge]
    votes = votes_without_noise([[1.0, 1.0], [1.0, 1.0]], [0, 1], spent, settings)
    np.testing.assert_allclose(
        votes.scores, [[0.3, 0.0, 0.0], [0.0, 0.0, 0.0]], atol=1e-9
    )
    np.testing.assert_allclose(votes.spent, [budget, spent[1]])


def test_count_noise_is_that_of_the_paper() -> None:
    settings = replace(settings_with(), num_queries=600)
    assert settings.count_deviation == pytest.approx(math.sqrt(100 / settings.budget))
    assert settings.count_charge == pytest.approx(settings.budget / 200)


@given(
    seed=st.integers(0, 2**32),
    epsilon=st.sampled_from([0.5, 2.0, 8.0]),
    vote_noise=st.floats(0.01, 2),
    count_noise=st.floats(0.5, 100),
)
def test_no_example_is_charged_beyond_its_budget(
    seed: int, epsilon: float, vote_noise: float, count_noise: float
) -> None:
    rng = RandomKey(seed).numpy()
    settings = settings_with(
        epsilon=epsilon, vote_noise=vote_noise, count_noise=count_noise, threshold=0.2
    )
    labels = rng.integers(0, 3, 20)
    spent = settings.budget * rng.uniform(0, 1, 20)
    # 100 examples of the property, with 100 queries each: 10,000 queries.
    for _ in range(10):
        cosines = rng.uniform(0, 1, (10, 20)).astype(np.float32)
        before = spent
        spent = noisy_votes(cosines, labels, before, 3, settings, rng).spent
        assert (spent >= before).all()
        assert (spent <= settings.budget * (1 + 1e-12)).all()


def test_noise_is_gaussian_with_the_stated_deviations() -> None:
    num_queries = 4000
    settings = settings_with(epsilon=1e4, vote_noise=0.7, count_noise=5.0)
    cosines = np.ones((num_queries, 100), np.float32)
    rng = RandomKey(5).numpy()
    votes = noisy_votes(
        cosines, np.zeros(100, np.int64), np.full(100, -1e9), 2, settings, rng
    )
    counts = (votes.deviations / 0.7) ** 2
    noise = (votes.scores - [100, 0]) / votes.deviations[:, None]
    assert kstest(counts, norm(100, settings.count_deviation).cdf).pvalue > 1e-3
    assert kstest(noise.ravel(), norm.cdf).pvalue > 1e-3
    correlation = float((noise[:, 0] * noise[:, 1]).mean())
    assert abs(correlation) < 4 / math.sqrt(num_queries)


def test_privacy_loss_of_a_spent_budget_is_that_of_one_gaussian_mechanism() -> None:
    """Compare the loss log p(answers | with i) / p(answers | without i) of 2,000 runs.

    Its distribution is the claim of the module: N(ρ, 2ρ) once the budget ρ is spent.
    """
    settings = settings_with(epsilon=1.0, count_noise=90.0, vote_noise=1.0)
    num_others, num_queries = 400, 35
    others = np.full(num_others, -1e9)  # their budgets never end
    labels = np.zeros(num_others + 1, np.int64)
    cosines = np.full((num_queries, num_others + 1), 0.5, np.float32)
    cosines[:, -1] = 1.0
    rng = RandomKey(3).numpy()
    losses = []
    for _ in range(2000):
        spent = np.append(others, 0.0)
        votes = noisy_votes(cosines, labels, spent, 2, settings, rng)
        assert votes.spent[-1] == pytest.approx(settings.budget, rel=2e-3)
        remaining, loss = settings.budget, 0.0
        for score, deviation in zip(votes.scores[:, 0], votes.deviations, strict=True):
            if remaining < settings.count_charge:
                break
            # The noise, and its value if the store lacked the last example.
            count = (deviation / settings.vote_noise) ** 2
            noise = count - num_others - 1
            loss += ((noise + 1) ** 2 - noise**2) / (2 * settings.count_deviation**2)
            remaining -= settings.count_charge
            shift = min(1.0, deviation * math.sqrt(2 * remaining))
            noise = score - num_others / 2 - shift
            loss += ((noise + shift) ** 2 - noise**2) / (2 * deviation**2)
            remaining -= shift**2 / (2 * deviation**2)
        losses.append(loss)
    budget = settings.budget
    assert kstest(losses, norm(budget, math.sqrt(2 * budget)).cdf).pvalue > 1e-3


def test_exhausted_memory_answers_as_the_global_model() -> None:
    settings = settings_with()
    spent = np.full(50, settings.budget)
    cosines = np.ones((200, 50), np.float32)
    rng = RandomKey(1).numpy()
    votes = noisy_votes(cosines, np.zeros(50, np.int64), spent, 3, settings, rng)
    p_global = rng.dirichlet([1, 1, 1], 200).astype(np.float32)
    np.testing.assert_array_equal(votes.spent, spent)
    np.testing.assert_array_equal(mixed_probabilities(votes, p_global, 0.7), p_global)


def test_mixture_uses_significant_votes_only() -> None:
    votes = NoisyVotes(
        scores=np.array([[30.0, 10.0, -3.0], [3.9, 3.8, 0.0]]),
        deviations=np.array([1.0, 1.0]),
        spent=np.empty(0),
    )
    p_global = np.array([[0.2, 0.2, 0.6], [0.2, 0.2, 0.6]], np.float32)
    mixed = mixed_probabilities(votes, p_global, 0.5)
    np.testing.assert_allclose(mixed, [[0.475, 0.225, 0.3], [0.2, 0.2, 0.6]], rtol=1e-6)


def test_embeddings_are_scaled_to_norm_one() -> None:
    embeddings = np.array([[3.0, 4.0], [0.0, 0.0], [-5.0, 0.0]], np.float32)
    expected = [[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]]
    np.testing.assert_allclose(normalised(embeddings), expected, rtol=1e-6)

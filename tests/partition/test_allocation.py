import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from knnper.seeding import RandomKey
from knnper.simulation.partition.allocation import (
    Integers,
    allocate,
    allocate_test_like_train,
    apportion,
    count_labels,
)
from knnper.simulation.partition.dirichlet import draw_log_dirichlet, normalise

GENERATOR_KEY = RandomKey(0, ("test",))


def apportion_one(weights: list[float], total: int) -> list[int]:
    generator = GENERATOR_KEY.numpy()
    counts = apportion(np.array([weights]), np.array([total]), generator)
    return [int(count) for count in counts[0]]


def test_largest_remainders_are_rounded_up() -> None:
    # Shares 4.55, 3.15, 2.3: floors 4, 3, 2 leave one, for the remainder 0.55.
    assert apportion_one([0.455, 0.315, 0.23], 10) == [5, 3, 2]
    # Shares 1.6, 1.6, 0.8: floors 1, 1, 0 leave two; 0.8 first, then one of two 0.6.
    assert sorted(apportion_one([2, 2, 1], 4)) == [1, 1, 2]
    assert apportion_one([2, 2, 1], 4)[2] == 1


def test_no_weight_gets_nothing_unless_all_are_without() -> None:
    assert apportion_one([0, 1e-9, 0], 7) == [0, 7, 0]
    assert sorted(apportion_one([0, 0, 0], 7)) == [2, 2, 3]


def test_equal_remainders_do_not_favour_anyone() -> None:
    generator = GENERATOR_KEY.numpy()
    counts = apportion(np.ones((4000, 4)), np.full(4000, 2), generator)
    np.testing.assert_allclose(counts.mean(axis=0), 0.5, atol=0.05)


def apportion_by_sorting(
    weights: NDArray[np.float64], totals: Integers, generator: np.random.Generator
) -> Integers:
    """Return what `apportion` does, as it is said and all rows at once."""
    weights = np.where(weights.any(axis=1, keepdims=True), weights, 1.0)
    shares = weights / weights.sum(axis=1, keepdims=True) * totals[:, None]
    counts: Integers = np.floor(shares).astype(np.int64)
    remainders = np.round(shares - counts, 9)
    remainders[weights == 0] = -1.0
    order = np.lexsort((generator.random(shares.shape), -remainders), axis=1)
    ranks = np.argsort(order, axis=1)
    missing = totals - counts.sum(axis=1)
    counts[ranks < missing[:, None]] += 1
    return counts


@pytest.mark.parametrize("num_clients", [1, 2, 7, 1000])
@pytest.mark.parametrize("kind", ["ties", "floats", "sparse", "skewed"])
def test_the_same_bits_as_by_sorting_all(num_clients: int, kind: str) -> None:
    for seed in range(5):
        generator = np.random.default_rng(seed)
        weights = generator.random((12, num_clients))
        if kind == "ties":
            weights = generator.integers(0, 3, weights.shape).astype(np.float64)
        elif kind == "sparse":
            weights *= generator.random(weights.shape) < 0.1
        elif kind == "skewed":
            weights **= 200
        totals = generator.integers(0, 3000, len(weights))
        found, expected = (
            split(weights, totals, RandomKey(seed).numpy())
            for split in (apportion, apportion_by_sorting)
        )
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=20),
    total=st.integers(0, 10**6),
)
def test_shares_are_within_one_of_the_exact_ones(
    weights: list[float], total: int
) -> None:
    counts = np.array(apportion_one(weights, total))
    assert counts.sum() == total
    if sum(weights):
        exact = np.array(weights) / np.sum(weights) * total
        assert np.abs(counts - exact).max() < 1 + 1e-6
        assert not counts[np.array(weights) == 0].any()


def test_deal_gives_the_counts_asked_for() -> None:
    labels = np.array([1, 0, 1, 1, 0, 1])
    counts = np.array([[2, 0, 0], [1, 0, 3]])
    owner = allocate(labels, counts, RandomKey(3))
    found = list(count_labels(labels, owner, (2, 3)))
    np.testing.assert_array_equal(found, counts)


def test_test_samples_move_to_the_holders_of_their_label() -> None:
    train_counts = np.array([[4, 0, 2], [0, 0, 0]])
    test_labels = np.repeat([0, 1], [6, 9])
    owner = allocate_test_like_train(train_counts, test_labels, RandomKey(1))
    counts = count_labels(test_labels, owner, (2, 3))
    assert [of_label.tolist() for of_label in counts] == [[4, 0, 2], [3, 3, 3]]


def test_test_samples_follow_the_given_weights_among_the_holders() -> None:
    train_counts = np.array([[5, 0, 5]])
    weights = np.array([[0.1, 0.8, 0.3]])
    test_labels = np.zeros(100, dtype=np.int64)
    owner = allocate_test_like_train(train_counts, test_labels, RandomKey(1), weights)
    assert np.bincount(owner).tolist() == [25, 0, 75]


def test_holders_whose_weights_vanish_share_equally() -> None:
    owner = allocate_test_like_train(
        np.array([[1, 0, 1]]),
        np.zeros(6, dtype=np.int64),
        RandomKey(1),
        np.array([[0.0, 1.0, 0.0]]),
    )
    assert np.bincount(owner).tolist() == [3, 0, 3]


@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
def test_dirichlet_moments(alpha: float) -> None:
    num_entries = 5
    draws = normalise(
        draw_log_dirichlet(alpha, (40_000, num_entries), GENERATOR_KEY.numpy())
    )
    np.testing.assert_allclose(draws.sum(axis=1), 1)
    np.testing.assert_allclose(draws.mean(axis=0), 0.2, atol=0.01)
    # Var = (1/K)(1 - 1/K) / (Kα + 1) for a symmetric Dirichlet vector of K entries.
    variance = 0.2 * 0.8 / (num_entries * alpha + 1)
    np.testing.assert_allclose(draws.var(axis=0), variance, rtol=0.06)


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-3])
def test_tiny_concentrations_put_all_weight_on_one_entry(alpha: float) -> None:
    logs = draw_log_dirichlet(alpha, (2000, 4), GENERATOR_KEY.numpy())
    assert np.isfinite(logs).all()
    weights = normalise(logs)
    assert np.median(weights.max(axis=1)) == 1
    np.testing.assert_allclose(
        np.bincount(weights.argmax(axis=1)) / 2000, 0.25, atol=0.05
    )


def test_samples_of_a_label_without_counts_are_not_given_at_random() -> None:
    labels = np.array([0, 1, 2])
    with pytest.raises(ValueError, match="a row of counts for each label"):
        allocate(labels, [np.array([1]), np.array([1])], RandomKey(3))

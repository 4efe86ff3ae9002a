import time

import numpy as np
import pytest

from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.simulation.partition.assignment import Assignment
from knnper.simulation.partition.schemes import PachinkoSettings, pachinko

COARSE_OF = tuple(label // 5 for label in range(100))
TRAIN = np.arange(50_000) % 100
TEST = np.arange(10_000) % 100


def split(num_clients: int, alpha: float, beta: float) -> Assignment:
    settings = PachinkoSettings(num_clients=num_clients, alpha=alpha, beta=beta)
    return pachinko(TRAIN, TEST, COARSE_OF, settings, RandomKey(0))


def test_clients_get_equal_shares_within_seconds() -> None:
    start = time.process_time()
    assignment = split(199, 0.3, 10.0)
    assert time.process_time() - start < 3
    assert {len(part) for part in assignment.train} == {251, 252}
    tests = [len(part) for part in assignment.test]
    assert min(tests) > 35
    assert max(tests) < 70


def test_alpha_governs_coarse_labels_and_beta_fine_ones() -> None:
    even_inside = split(200, 0.01, 1000.0).train[0]
    one_inside = split(200, 0.01, 0.001).train[0]
    coarse, counts = np.unique(TRAIN[even_inside] // 5, return_counts=True)
    largest = coarse[counts.argmax()]
    assert counts.max() > 200
    within = np.bincount(TRAIN[even_inside] - 5 * largest + 100)[100:105]
    assert within.min() > 0.1 * counts.max()
    assert np.bincount(TRAIN[one_inside]).max() > 200


def test_draws_follow_the_dirichlet_vectors() -> None:
    # The first clients draw from a full stock: the share of one coarse label over
    # them has the mean 1/20 and the variance of Dir_20(α) and of 5 draws.
    assignment = split(10_000, 0.3, 10.0)
    shares = np.stack(
        [
            np.bincount(TRAIN[part] // 5, minlength=20) / len(part)
            for part in assignment.train[:2000]
        ]
    )
    np.testing.assert_allclose(shares.mean(axis=0), 0.05, atol=0.02)
    spread = 0.05 * 0.95
    expected = spread / 7 + (spread - spread / 7) / 5
    np.testing.assert_allclose(shares.var(axis=0).mean(), expected, rtol=0.1)


def test_no_coarse_labels() -> None:
    settings = PachinkoSettings(num_clients=2)
    with pytest.raises(DataError, match="pachinko needs a data set with coarse labels"):
        pachinko(TRAIN, TEST, None, settings, RandomKey(0))


def test_too_few_coarse_labels() -> None:
    settings = PachinkoSettings(num_clients=2)
    with pytest.raises(DataError, match="of 3 labels, but has 100"):
        pachinko(TRAIN, TEST, (0, 0, 1), settings, RandomKey(0))

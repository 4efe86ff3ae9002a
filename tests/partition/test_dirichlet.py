import time

import numpy as np

from knnper.seeding import RandomKey
from knnper.simulation.partition.schemes import DirichletSettings, dirichlet

LABELS = np.arange(50_000) % 10


def proportions(labels: np.ndarray, parts: tuple[np.ndarray, ...]) -> np.ndarray:
    counts = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
    return np.asarray(counts / counts.sum(axis=0))


def test_training_and_test_samples_have_the_same_proportions() -> None:
    settings = DirichletSettings(num_clients=20, alpha=0.3)
    assignment = dirichlet(LABELS, LABELS[:20_000], settings, RandomKey(0))
    train = proportions(LABELS, assignment.train)
    test = proportions(LABELS[:20_000], assignment.test)
    np.testing.assert_allclose(train, test, atol=1 / 2000)


def test_alpha_says_how_uneven_the_clients_are() -> None:
    spreads = []
    for alpha in (0.1, 1.0, 100.0):
        settings = DirichletSettings(num_clients=50, alpha=alpha)
        assignment = dirichlet(LABELS, LABELS, settings, RandomKey(0))
        # Var of one entry of Dir_M(α) is (1/M)(1 - 1/M) / (Mα + 1).
        expected = np.sqrt(0.02 * 0.98 / (50 * alpha + 1))
        spread = proportions(LABELS, assignment.train).std()
        assert abs(spread / expected - 1) < 0.25
        spreads.append(spread)
    assert spreads == sorted(spreads, reverse=True)


def test_a_thousand_clients_take_less_than_a_second() -> None:
    settings = DirichletSettings(num_clients=1000, alpha=0.01)
    start = time.process_time()
    assignment = dirichlet(LABELS, LABELS[:10_000], settings, RandomKey(0))
    assert time.process_time() - start < 1
    assert sum(len(part) for part in assignment.train) == 50_000

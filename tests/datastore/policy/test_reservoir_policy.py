"""Algorithm R against a direct transcription, and against what it promises."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from knnper.datastore.policy import ReservoirPolicy, draw_below
from knnper.seeding import RandomKey
from tests.datastore.policy.policy_stream import PolicyStream

NUM_RUNS = 3000


def chi_square(observed: Sequence[float], expected: float) -> float:
    return sum((count - expected) ** 2 / expected for count in observed)


def limit(degrees: int) -> float:
    """Return a bound that chi-square exceeds with probability of about 1e-4."""
    return degrees + 3.7 * math.sqrt(2 * degrees) + 10


def test_against_the_algorithm_as_it_is_written() -> None:
    """Vitter 1985: draw M in [0, t); if M < s, replace the M-th record."""
    key, capacity = RandomKey(4), 7
    reservoir = list(range(1, capacity + 1))
    for number in range(capacity + 1, 301):
        drawn = draw_below(number, key.child(number))
        if drawn < capacity:
            del reservoir[drawn]
            reservoir.append(number)
    stream = PolicyStream(ReservoirPolicy(), capacity, seed=4)

    stream.offer([0] * 300)

    assert stream.ids == reservoir


def test_draws_are_uniform() -> None:
    draws = [draw_below(6, RandomKey(0).child(number)) for number in range(6000)]
    counts = np.bincount(draws, minlength=6).tolist()

    assert len(counts) == 6
    assert chi_square(counts, 1000) < limit(5)
    assert draw_below(1, RandomKey(5)) == 0


def test_every_example_is_equally_likely_to_be_stored() -> None:
    times_stored = np.zeros(20)
    for seed in range(NUM_RUNS):
        stream = PolicyStream(ReservoirPolicy(), capacity=4, seed=seed)
        stream.offer([0] * 20)
        times_stored[stream.stored.ids - 1] += 1

    assert chi_square(times_stored.tolist(), NUM_RUNS * 4 / 20) < limit(19)


def test_every_pair_is_equally_likely_to_be_stored() -> None:
    pairs: dict[tuple[int, ...], int] = {}
    for seed in range(NUM_RUNS):
        stream = PolicyStream(ReservoirPolicy(), capacity=2, seed=seed)
        stream.offer([0] * 6)
        pairs[tuple(stream.ids)] = pairs.get(tuple(stream.ids), 0) + 1

    assert len(pairs) == 15
    assert chi_square(list(pairs.values()), NUM_RUNS / 15) < limit(14)


def test_what_is_left_after_a_deletion_is_uniform() -> None:
    """Of 10 seen, 4 stored; whatever stood at place 1 is deleted, 10 more arrive."""
    stored = np.zeros(20)
    for seed in range(NUM_RUNS):
        stream = PolicyStream(ReservoirPolicy(), capacity=4, seed=seed)
        stream.offer([0] * 10)
        stream.delete(stream.ids[seed % 4])
        stream.offer([0] * 10)
        stored[stream.stored.ids - 1] += 1

    share = stored / NUM_RUNS
    assert share[:10] == pytest.approx(4 / 10 * 3 / 4 * 10 / 19, abs=0.03)
    assert share[10] == pytest.approx(10 / 19, abs=0.03)
    assert share[11:] == pytest.approx(4 / 19, abs=0.03)
    assert chi_square(stored[:10].tolist(), stored[:10].mean()) < limit(9)

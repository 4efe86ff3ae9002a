"""How images are dealt for the drift figure."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.simulation.partition.assignment import Integers
from papers.drift import (
    DriftSettings,
    DriftStream,
    drift_streams,
    require_enough_images,
)

NUM_TRAIN, NUM_TEST = 600, 120
TRAIN = np.arange(NUM_TRAIN) % 5
TEST = np.arange(NUM_TEST) % 5


def streams(seed: int = 0, alpha: float = 0.3) -> tuple[DriftStream, ...]:
    wanted = DriftSettings(clients=7, alpha=alpha, steps=9, shift_at=4)
    return drift_streams(TRAIN, TEST, wanted, RandomKey(seed))


def before(stream: DriftStream) -> list[int]:
    return _joined([stream.initial, *stream.batches[:4]])


def after(stream: DriftStream) -> list[int]:
    return _joined(stream.batches[4:])


def _joined(parts: Sequence[Integers]) -> list[int]:
    return [int(index) for index in np.concatenate(parts)]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.05, 0.3, 10.0]))
def test_every_image_is_dealt_twice_and_no_client_grows(
    seed: int, alpha: float
) -> None:
    dealt = streams(seed, alpha=alpha)
    assert all(len(before(one)) >= len(after(one)) for one in dealt)
    twice = sorted(index for one in dealt for index in (*before(one), *after(one)))
    assert twice == sorted([*range(NUM_TRAIN), *range(NUM_TRAIN)])
    tests = np.concatenate([part for one in dealt for part in one.tests])
    assert sorted(tests.tolist()) == sorted([*range(NUM_TEST), *range(NUM_TEST)])


def test_half_is_stored_at_first_and_batches_are_of_equal_size() -> None:
    for one in streams():
        assert len(one.initial) == (len(before(one)) + 1) // 2
        assert len(one.batches) == 9
        for part in (one.batches[:4], one.batches[4:]):
            sizes = [len(batch) for batch in part]
            assert max(sizes) - min(sizes) <= 1


def test_tests_have_the_labels_of_their_side() -> None:
    for one in streams(alpha=0.1):
        for indices, tests in zip((before(one), after(one)), one.tests, strict=True):
            assert set(TEST[tests]) <= set(TRAIN[indices])


def test_the_two_sides_are_different_draws() -> None:
    sizes = [(len(before(one)), len(after(one))) for one in streams()]
    assert sizes != [(first, first) for first, _ in sizes]


def test_the_seed_fixes_it() -> None:
    one, again, other = streams(1), streams(1), streams(2)
    assert [before(s) for s in one] == [before(s) for s in again]
    assert [before(s) for s in one] != [before(s) for s in other]


def test_arrivals_are_shuffled() -> None:
    largest = max(streams(), key=lambda one: len(one.initial))
    assert largest.initial.tolist() != sorted(largest.initial.tolist())


def test_too_few_images_for_the_clients_are_refused() -> None:
    require_enough_images(1000, 100)
    with pytest.raises(RunError, match="found 101 clients, expected at most 100"):
        require_enough_images(1000, 101)

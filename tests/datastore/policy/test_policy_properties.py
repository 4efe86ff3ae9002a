"""What holds for every policy, however a stream is cut into batches."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.datastore.policy import POLICIES, PolicyName
from tests.datastore.policy.policy_stream import PolicyStream

NUM_CLASSES = 4
EXAMPLE = st.tuples(
    st.integers(0, NUM_CLASSES - 1), st.sampled_from([1.0, 2.0, 3.0, 4.0])
)
BATCHES = st.lists(st.lists(EXAMPLE, max_size=8), min_size=1, max_size=6)
NAMES: list[PolicyName] = ["fixed", "fifo", "reservoir", "class_balanced"]

Batch = Sequence[tuple[int, float]]


def offer(stream: PolicyStream, batch: Batch) -> None:
    stream.offer([label for label, _ in batch], [arrival for _, arrival in batch])


def same(first: PolicyStream, second: PolicyStream) -> bool:
    return (
        first.ids == second.ids
        and first.state.num_offered == second.state.num_offered
        and np.array_equal(first.state.num_seen, second.state.num_seen)
        and np.array_equal(first.state.was_largest, second.state.was_largest)
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(
    batches=BATCHES,
    capacity=st.integers(1, 12),
    deleted=st.sets(st.integers(1, 40), max_size=6),
    seed=st.integers(0, 100),
)
def test_a_batch_is_its_examples_one_by_one(
    name: PolicyName, batches: list[Batch], capacity: int, deleted: set[int], seed: int
) -> None:
    whole = PolicyStream(POLICIES[name], capacity, seed=seed)
    single = PolicyStream(POLICIES[name], capacity, seed=seed)
    for batch in batches:
        offer(whole, batch)
        for example in batch:
            offer(single, [example])
            assert len(single.stored) <= capacity
        assert same(whole, single)
        whole.delete(*deleted)
        single.delete(*deleted)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(batches=BATCHES, capacity=st.integers(1, 12))
def test_a_place_is_never_left_empty(
    name: PolicyName, batches: list[Batch], capacity: int
) -> None:
    stream = PolicyStream(POLICIES[name], capacity)
    for batch in batches:
        offer(stream, batch)
        assert len(stream.stored) == min(capacity, stream.state.num_offered)
        assert stream.ids == sorted(set(stream.ids))


@pytest.mark.parametrize("name", NAMES)
def test_a_freed_place_goes_to_the_next_arrival(name: PolicyName) -> None:
    stream = PolicyStream(POLICIES[name], capacity=5)
    stream.offer([0, 1, 2, 3] * 10)
    stream.delete(stream.ids[2])

    stream.offer([1])

    assert stream.ids[-1] == 41
    assert len(stream.stored) == 5


@pytest.mark.parametrize("name", ["reservoir", "class_balanced"])
def test_the_seed_decides(name: PolicyName) -> None:
    kept = []
    for seed in (1, 1, 2):
        stream = PolicyStream(POLICIES[name], capacity=20, seed=seed)
        stream.offer([0, 1, 1, 2] * 50)
        kept.append(stream.ids)

    assert kept[0] == kept[1]
    assert kept[0] != kept[2]

"""Fixed, FIFO and concatenate, by hand."""

import numpy as np
import pytest

from knnper.datastore.examples import StoreFullError
from knnper.datastore.policy import POLICIES, ConcatenatePolicy, FifoPolicy, FixedPolicy
from tests.datastore.policy.policy_stream import PolicyStream


def test_fixed_keeps_the_first() -> None:
    stream = PolicyStream(FixedPolicy(), capacity=3)

    stream.offer([0, 1])
    stream.offer([2, 3, 0])
    stream.offer([1])

    assert stream.ids == [1, 2, 3]
    assert stream.state.num_offered == 6
    assert stream.state.num_seen.tolist() == [2, 2, 1, 1]


def test_fixed_gives_a_freed_place_to_the_next() -> None:
    stream = PolicyStream(FixedPolicy(), capacity=3)
    stream.offer([0, 0, 0, 0])

    stream.delete(2)
    stream.offer([1, 1])

    assert stream.ids == [1, 3, 5]


def test_fixed_evicts_nothing_where_the_capacity_was_lowered() -> None:
    stream = PolicyStream(FixedPolicy(), capacity=3)
    stream.offer([0, 0, 0])

    stream.capacity = 2
    stream.offer([1])

    assert stream.ids == [1, 2, 3]


def test_fifo_replaces_the_oldest() -> None:
    stream = PolicyStream(FifoPolicy(), capacity=3)

    stream.offer([0, 1])
    stream.offer([2, 3])
    assert stream.ids == [2, 3, 4]

    stream.offer([0, 1, 2, 3])
    assert stream.ids == [6, 7, 8]


def test_fifo_goes_by_time_and_then_by_id() -> None:
    stream = PolicyStream(FifoPolicy(), capacity=3)

    stream.offer([0, 0, 0], arrivals=[30.0, 10.0, 10.0])
    stream.offer([0], arrivals=[20.0])
    assert stream.ids == [1, 3, 4]

    stream.offer([0], arrivals=[20.0])
    assert stream.ids == [1, 4, 5]

    stream.offer([0], arrivals=[25.0])
    assert stream.ids == [1, 5, 6]


def test_fifo_does_not_keep_an_arrival_that_is_the_oldest() -> None:
    stream = PolicyStream(FifoPolicy(), capacity=2)
    stream.offer([0, 0], arrivals=[10.0, 20.0])

    stream.offer([0, 0], arrivals=[5.0, 15.0])

    assert stream.ids == [2, 4]


def test_fifo_follows_a_lowered_capacity_with_the_next_arrival() -> None:
    stream = PolicyStream(FifoPolicy(), capacity=3)
    stream.offer([0, 0, 0])

    stream.capacity = 2
    stream.offer([])
    assert stream.ids == [1, 2, 3]

    stream.offer([0])
    assert stream.ids == [3, 4]


def test_concatenate_keeps_all() -> None:
    stream = PolicyStream(ConcatenatePolicy(), capacity=None)

    stream.offer([0, 1])
    stream.offer([2] * 100)

    assert stream.ids == list(range(1, 103))


def test_concatenate_refuses_a_whole_batch_that_does_not_fit() -> None:
    stream = PolicyStream(ConcatenatePolicy(), capacity=4)
    stream.offer([0, 1, 2])

    with pytest.raises(
        StoreFullError,
        match=r"holds 3 examples of at most 4, and 2 arrive: none .* raise the cap",
    ):
        stream.offer([0, 1])
    assert stream.ids == [1, 2, 3]
    assert stream.state.num_offered == 3

    stream.offer([3])
    stream.offer([])
    assert stream.ids == [1, 2, 3, 4]


def test_concatenate_refuses_no_empty_batch_where_the_capacity_was_lowered() -> None:
    stream = PolicyStream(ConcatenatePolicy(), capacity=4)
    stream.offer([0, 1, 2])

    stream.capacity = 2
    stream.offer([])

    assert stream.ids == [1, 2, 3]


@pytest.mark.parametrize("capacity", [None, 0])
def test_what_needs_a_capacity_says_so(capacity: int | None) -> None:
    needing = {name for name, policy in POLICIES.items() if policy.needs_capacity}

    assert needing == {"fixed", "fifo", "reservoir", "class_balanced"}
    for name in sorted(needing):
        stream = PolicyStream(POLICIES[name], capacity)
        with pytest.raises(ValueError, match=f"needs a capacity .* found {capacity};"):
            stream.offer([0])


def test_ids_that_are_evicted_are_those_that_were_stored() -> None:
    stream = PolicyStream(FifoPolicy(), capacity=2)
    stream.offer([0, 0])
    before = stream.stored.ids.copy()

    stream.offer([1, 1, 1])

    assert not np.isin(before, stream.stored.ids).any()
    assert stream.ids == [4, 5]

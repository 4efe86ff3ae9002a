import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.datastore.examples import Contents, StoreFullError, StreamState, no_contents
from knnper.datastore.policy import (
    POLICIES,
    ClassBalancedPolicy,
    ConcatenatePolicy,
    FifoPolicy,
    FixedPolicy,
    Policy,
    PolicyName,
    ReservoirPolicy,
    draw_below,
    forget,
)
from knnper.seeding import RandomKey


@dataclass
class PolicyStream:
    """Offers examples to ``policy`` and deletes some as a user would."""

    policy: Policy
    capacity: int | None
    num_classes: int = 4
    seed: int = 0
    stored: Contents = field(default_factory=no_contents)

    def __post_init__(self) -> None:
        self.state = StreamState.start(self.num_classes)

    @property
    def ids(self) -> list[int]:
        """The ids of what is stored."""
        ids: list[int] = self.stored.ids.tolist()
        return ids

    def offer(
        self, labels: Sequence[int], arrivals: Sequence[float] | None = None
    ) -> None:
        first = self.state.num_offered + 1
        ids = np.arange(first, first + len(labels), dtype=np.int64)
        times = ids if arrivals is None else np.array(arrivals)
        batch = Contents(ids, np.array(labels, np.int64), times.astype(np.float64))
        decision = self.policy.decide(
            self.stored, batch, self.state, self.capacity, RandomKey(self.seed)
        )
        left = self.stored.without(decision.evicted)
        self.stored = left.followed_by(batch.take(decision.is_kept))
        self.state = decision.state

    def delete(self, *ids: int) -> None:
        chosen = np.isin(self.stored.ids, ids)
        self.state = forget(self.state, self.stored.labels[chosen])
        self.stored = self.stored.take(~chosen)

    def counts(self) -> list[int]:
        """How many of each label are stored."""
        counts = np.bincount(self.stored.labels, minlength=self.num_classes)
        return [int(count) for count in counts]


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
def test_a_freed_place_goes_to_the_next_arrival(name: PolicyName) -> None:
    stream = PolicyStream(POLICIES[name], capacity=5)
    stream.offer([0, 1, 2, 3] * 10)
    stream.delete(stream.ids[2])
    stream.offer([1])
    assert stream.ids[-1] == 41
    assert len(stream.stored) == 5


def test_fixed_keeps_the_first() -> None:
    stream = PolicyStream(FixedPolicy(), capacity=3)
    for batch in ([0, 1], [2, 3, 0], [1]):
        stream.offer(batch)
    assert stream.ids == [1, 2, 3]
    assert stream.state.num_offered == 6
    assert stream.state.num_seen.tolist() == [2, 2, 1, 1]
    stream.delete(2)
    stream.offer([1, 1])
    assert stream.ids == [1, 3, 7]
    # A capacity that was lowered evicts nothing.
    stream.capacity = 2
    stream.offer([1])
    assert stream.ids == [1, 3, 7]


def test_fifo_goes_by_time_and_then_by_id() -> None:
    stream = PolicyStream(FifoPolicy(), capacity=3)
    stream.offer([0, 0, 0], arrivals=[30.0, 10.0, 10.0])
    stream.offer([0], arrivals=[20.0])
    assert stream.ids == [1, 3, 4]
    stream.offer([0], arrivals=[20.0])
    assert stream.ids == [1, 4, 5]
    stream.offer([0], arrivals=[25.0])
    assert stream.ids == [1, 5, 6]
    # Of these two, one is the oldest itself.
    stream.offer([0, 0], arrivals=[5.0, 22.0])
    assert stream.ids == [1, 6, 8]


def test_fifo_follows_a_lowered_capacity_with_the_next_arrival() -> None:
    stream = PolicyStream(FifoPolicy(), capacity=3)
    stream.offer([0, 0, 0])
    stream.capacity = 2
    stream.offer([])
    assert stream.ids == [1, 2, 3]
    stream.offer([0])
    assert stream.ids == [3, 4]
    stream.offer([0, 1, 2, 3])
    assert stream.ids == [7, 8]


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
    stream.capacity = 2
    stream.offer([])
    assert stream.ids == [1, 2, 3, 4]
    stream.capacity = None
    stream.offer([2] * 100)
    assert stream.ids == list(range(1, 105))


def written(labels: list[int], capacity: int, key: RandomKey) -> list[int]:
    """Return the positions, from 1, that Algorithm 1 keeps of ``labels``."""
    stored: list[int] = []
    full: set[int] = set()
    for number, label in enumerate(labels, 1):
        members = {c: [i for i in stored if labels[i - 1] == c] for c in set(labels)}
        most = max(len(of_label) for of_label in members.values())
        largest = sorted(c for c in members if len(members[c]) == most)
        if len(stored) < capacity:
            stored.append(number)
            continue
        full |= set(largest)
        if label not in full:
            candidates = [i for c in largest for i in members[c]]
            drawn = draw_below(len(candidates), key.child(number))
        else:
            candidates = members[label]
            drawn = draw_below(labels[:number].count(label), key.child(number))
        if drawn < len(candidates):
            stored.remove(candidates[drawn])
            stored.append(number)
    return sorted(stored)


@pytest.mark.parametrize("seed", range(20))
def test_against_the_algorithm_as_it_is_written(seed: int) -> None:
    rng = RandomKey(seed).numpy()
    labels = rng.choice(4, size=200, p=[0.6, 0.25, 0.1, 0.05]).tolist()
    stream = PolicyStream(ClassBalancedPolicy(), capacity=15, seed=seed)
    stream.offer(labels)
    assert stream.ids == written(labels, 15, RandomKey(seed))


def test_a_rare_label_replaces_the_largest() -> None:
    stream = PolicyStream(ClassBalancedPolicy(), capacity=4)
    stream.offer([0, 0, 0, 1])
    assert stream.state.was_largest.tolist() == [True, False, False, False]
    stream.offer([2])
    assert stream.counts() == [2, 1, 1, 0]
    assert 5 in stream.ids
    stream.offer([1])
    assert stream.counts() == [1, 2, 1, 0]
    assert stream.state.was_largest.tolist() == [True, True, False, False]
    stream.offer([0] * 20)
    assert stream.counts() == [1, 2, 1, 0]


def test_a_deleted_label_grows_back() -> None:
    stream = PolicyStream(ClassBalancedPolicy(), capacity=8)
    stream.offer([0] * 6 + [1] * 6)
    assert stream.counts() == [4, 4, 0, 0]
    stream.delete(*stream.stored.ids[stream.stored.labels == 0].tolist())
    stream.offer([1] * 4)
    assert stream.counts() == [0, 8, 0, 0]
    stream.offer([0] * 6)
    assert stream.counts() == [4, 4, 0, 0]


STATE = StreamState(9, np.array([5, 3, 0]), np.array([True, True, False]))


@pytest.mark.parametrize(
    ("labels", "num_seen", "was_largest"),
    [
        ([0, 0, 1], [3, 2, 0], [False, False, False]),
        ([1], [5, 2, 0], [True, False, False]),
        ([], [5, 3, 0], [True, True, False]),
    ],
)
def test_deleted_examples_were_not_seen(
    labels: list[int], num_seen: list[int], was_largest: list[bool]
) -> None:
    after = forget(STATE, np.array(labels, np.int64))
    assert (after.num_offered, after.num_seen.tolist()) == (9, num_seen)
    assert after.was_largest.tolist() == was_largest
    assert STATE.num_seen.tolist() == [5, 3, 0]


def test_more_than_was_seen_cannot_be_forgotten() -> None:
    for labels in ([2], [1, 1, 1, 1], [3]):
        with pytest.raises(ValueError, match=r"at most \[5, 3, 0\] .* forget each del"):
            forget(STATE, np.array(labels))


NUM_RUNS = 3000


def chi_square(observed: Sequence[float], expected: float) -> float:
    return sum((count - expected) ** 2 / expected for count in observed)


def limit(degrees: int) -> float:
    """Return a bound that chi-square exceeds with probability of about 1e-4."""
    return degrees + 3.7 * math.sqrt(2 * degrees) + 10


def test_reservoir_against_the_algorithm_as_it_is_written() -> None:
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

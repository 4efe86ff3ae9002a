"""CBRS: which label makes room, and how even the store becomes."""

import numpy as np
import pytest

from knnper.datastore.policy import ClassBalancedPolicy, draw_below
from knnper.seeding import RandomKey
from tests.datastore.policy.policy_stream import PolicyStream

SEEDS = range(400)


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


def test_a_full_label_is_sampled_uniformly() -> None:
    times_stored = np.zeros(12)
    for seed in SEEDS:
        stream = PolicyStream(ClassBalancedPolicy(), capacity=4, seed=seed)
        stream.offer([0] * 12)
        times_stored[stream.stored.ids - 1] += 1

    assert times_stored / len(SEEDS) == pytest.approx(4 / 12, abs=0.08)


def test_the_largest_labels_make_room_alike() -> None:
    times_lost = np.zeros(6)
    for seed in SEEDS:
        stream = PolicyStream(ClassBalancedPolicy(), capacity=6, seed=seed)
        stream.offer([0, 0, 1, 1, 2, 3])
        stream.offer([2])
        times_lost += ~np.isin(np.arange(1, 7), stream.ids)

    assert times_lost[4:].tolist() == [0, 0]
    assert times_lost[:4] / len(SEEDS) == pytest.approx(1 / 4, abs=0.08)


def test_labels_become_as_even_as_the_stream_allows() -> None:
    rng = RandomKey(3).numpy()
    labels = rng.choice(4, size=3000, p=[0.9, 0.07, 0.027, 0.003])
    stream = PolicyStream(ClassBalancedPolicy(), capacity=100)

    for batch in np.array_split(labels, 30):
        stream.offer(batch.tolist())

    rarest = int((labels == 3).sum())
    assert rarest < 25
    counts = stream.counts()
    assert counts[3] == rarest
    assert max(counts[:3]) - min(counts[:3]) <= 1


def test_a_deleted_label_grows_back() -> None:
    stream = PolicyStream(ClassBalancedPolicy(), capacity=8)
    stream.offer([0] * 6 + [1] * 6)
    assert stream.counts() == [4, 4, 0, 0]

    stream.delete(*stream.stored.ids[stream.stored.labels == 0].tolist())
    stream.offer([1] * 4)
    assert stream.counts() == [0, 8, 0, 0]

    stream.offer([0] * 6)
    assert stream.counts() == [4, 4, 0, 0]

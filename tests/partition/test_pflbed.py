"""Clients of several domains, each tested on all of its domain."""

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.data.examples import Dataset, InputSpec, LabelledArrays
from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.settings import Choice, Settings
from knnper.simulation.partition.allocation import Assignment, Integers
from knnper.simulation.partition.clients import Partition
from knnper.simulation.partition.pflbed import PflbedSettings, pflbed
from knnper.simulation.partition.split import fingerprint, make_partition
from knnper.simulation.virtual_clients import VirtualClients
from tests.partition.toy_data import DATASET

KEY = RandomKey(5)
LABELS = 4
pairs = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, LABELS - 1)), max_size=60
).map(lambda found: np.array(found, dtype=np.int64).reshape(-1, 2))


def dataset(train: Integers, test: Integers) -> Dataset:
    """Return a data set of rows of (domain, label)."""

    def arrays(rows: Integers) -> LabelledArrays:
        images = np.zeros((len(rows), 1, 1, 1), dtype=np.uint8)
        return LabelledArrays(images, rows[:, 1], domain_ids=rows[:, 0])

    return Dataset(
        "toy",
        arrays(train),
        arrays(test),
        InputSpec((1, 1, 1), LABELS, (0.5,), (0.5,)),
        ("a", "b", "c", "d"),
        domain_names=("painting", "photo"),
    )


def partition(key: RandomKey = KEY, **chosen: Any) -> Partition:
    return make_partition(
        DATASET, Choice[Settings]("pflbed", PflbedSettings(**chosen)), key
    )


def domain_of(rows: Integers, samples: Integers) -> set[int]:
    return set(rows[samples, 0].tolist())


@settings(max_examples=60, deadline=None)
@given(
    train=pairs,
    test=pairs,
    seen=st.integers(1, 4),
    unseen=st.integers(0, 3),
    alpha=st.sampled_from([1e-300, 0.3, 1e6]),
    seed=st.integers(0, 1000),
)
def test_what_the_partition_promises(
    train: Integers, test: Integers, seen: int, unseen: int, alpha: float, seed: int
) -> None:
    chosen = PflbedSettings(
        seen_clients_per_domain=seen, unseen_clients_per_domain=unseen, alpha=alpha
    )
    found = pflbed(dataset(train, test), chosen, RandomKey(seed))
    assert found.seen == ((True,) * seen + (False,) * unseen) * 2
    dealt = np.sort(np.concatenate(found.train))
    assert np.array_equal(dealt, np.arange(len(train)))
    assert found.class_weights is not None
    for number, samples in enumerate(found.train):
        domain = number // (seen + unseen)
        assert domain_of(train, samples) <= {domain}
        assert np.all(np.diff(samples) > 0)
        share = np.bincount(train[samples, 1], minlength=LABELS) / max(len(samples), 1)
        np.testing.assert_allclose(found.class_weights[number], share)
        whole = np.flatnonzero(test[:, 0] == domain)
        known = share[test[whole, 1]].sum() > 0
        assert np.array_equal(found.test[number], whole if known else [])


def label_counts(found: Assignment, train: Integers, *, seen: bool) -> Counter[Any]:
    """Return how often each (domain, label) is with the seen or the unseen clients."""
    assert found.seen is not None
    return Counter(
        tuple(row)
        for samples, is_seen in zip(found.train, found.seen, strict=True)
        if is_seen is seen
        for row in train[samples].tolist()
    )


def test_each_label_is_shared_out_between_seen_and_unseen_clients() -> None:
    rows = np.repeat([[0, 0], [0, 1], [1, 2]], [40, 8, 20], axis=0)
    found = pflbed(dataset(rows, rows), PflbedSettings(), KEY)
    assert len(found.train) == 60
    assert label_counts(found, rows, seen=True) == {(0, 0): 30, (0, 1): 6, (1, 2): 15}
    assert label_counts(found, rows, seen=False) == {(0, 0): 10, (0, 1): 2, (1, 2): 5}


def test_a_larger_alpha_is_less_uneven() -> None:
    rows = np.stack([np.zeros(400, dtype=np.int64), np.arange(400) % 4], axis=1)

    def unevenness(alpha: float) -> float:
        chosen = PflbedSettings(alpha=alpha)
        weights = pflbed(dataset(rows, rows), chosen, KEY).class_weights
        assert weights is not None
        return float(np.mean([one.max() for one in weights[:30]]))

    assert unevenness(0.1) > unevenness(1.0) > unevenness(100.0)


def test_a_domain_does_not_depend_on_the_others() -> None:
    rows = np.repeat([[0, 0], [0, 1], [1, 2]], [40, 8, 20], axis=0)
    both = pflbed(dataset(rows, rows), PflbedSettings(), KEY)
    alone = pflbed(dataset(rows[:48], rows[:48]), PflbedSettings(), KEY)
    assert len(alone.train) >= 30
    for one, other in zip(both.train[:30], alone.train[:30], strict=True):
        assert np.array_equal(one, other)


def test_the_partition_follows_from_the_key() -> None:
    assert fingerprint(partition()) == fingerprint(partition())
    assert fingerprint(partition()) != fingerprint(partition(RandomKey(6)))


def test_what_unseen_clients_lack_does_not_change_what_labels_count() -> None:
    whole, part = partition().clients, partition(unseen_train_fraction=0.5).clients
    assert whole
    for before, after in zip(whole, part, strict=True):
        assert len(after.train) <= len(before.train)
        assert np.array_equal(after.test, before.test)
        assert before.class_weights is not None
        np.testing.assert_array_equal(after.class_weights, before.class_weights)


def test_on_its_own_validation_data_a_clients_labels_count_the_same() -> None:
    clients = partition(evaluate_on="validation").clients
    assert clients
    assert all(client.class_weights is None for client in clients)


def test_the_runtime_is_given_the_weights() -> None:
    made = partition()
    clients = VirtualClients.of(DATASET, made)
    assert made.clients
    for part in made.clients:
        assert part.class_weights is not None
        weights = clients.class_weights(part.name)
        np.testing.assert_array_equal(weights, part.class_weights)


def test_a_part_of_the_data_keeps_its_domains() -> None:
    clients = partition(used_fraction=0.5).clients
    assert len(clients) > 30
    for number, client in enumerate(clients):
        own = np.concatenate([client.train, client.validation])
        assert set(own // 4 % 2) <= {number // 30}
        assert set(client.test // 4 % 2) <= {number // 30}


def test_a_data_set_without_domains_is_refused() -> None:
    bare = dataclasses.replace(DATASET.test, domain_ids=None)
    with pytest.raises(DataError, match="toy names none; use domain_folder"):
        pflbed(dataclasses.replace(DATASET, test=bare), PflbedSettings(), KEY)

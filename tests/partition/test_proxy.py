"""What the server keeps is dealt to nobody."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.errors import DataError
from knnper.experiment import Choice, Settings
from knnper.seeding import RandomKey
from knnper.simulation.partition.schemes import PARTITIONS
from knnper.simulation.partition.split import (
    Partition,
    fingerprint,
    keep_back,
    make_partition,
)
from tests.partition.toy_data import DATASET

KEY = RandomKey(5)


def partition_of(name: str, key: RandomKey = KEY, **given: Any) -> Partition:
    if name not in ("natural", "pflbed"):
        given["num_clients"] = 3
    chosen = PARTITIONS[name].settings_type(**given)
    return make_partition(DATASET, Choice[Settings](name, chosen), key)


@pytest.mark.parametrize("evaluate_on", ["test", "validation"])
@pytest.mark.parametrize("name", PARTITIONS)
def test_every_sample_has_one_owner(name: str, evaluate_on: str) -> None:
    partition = partition_of(name, proxy_fraction=0.1, evaluate_on=evaluate_on)
    assert len(partition.proxy) == 20
    assert np.all(np.diff(partition.proxy) > 0)
    owned = [partition.proxy]
    for client in partition.clients:
        owned += [client.train, client.validation]
        owned += [client.test] if evaluate_on == "validation" else []
    assert sorted(np.concatenate(owned)) == list(range(200))


def test_clients_are_dealt_their_own_samples() -> None:
    partition = partition_of("natural", proxy_fraction=0.3)
    for number, client in enumerate(partition.clients):
        own = np.append(client.train, client.validation)
        assert set(own % 3) == {number}


def test_the_deal_keeps_its_form() -> None:
    partition = partition_of("pathological", proxy_fraction=0.25)
    for client in partition.clients:
        own = np.append(client.train, client.validation)
        assert len(set(own % 4)) == 2
        assert set(client.test % 4) <= set(own % 4)


@pytest.mark.parametrize("name", PARTITIONS)
def test_with_nothing_kept_the_partition_is_as_it_was(name: str) -> None:
    partition = partition_of(name, proxy_fraction=0.0)
    assert len(partition.proxy) == 0
    assert fingerprint(partition) == fingerprint(partition_of(name))


def test_what_is_kept_depends_on_the_key_alone() -> None:
    kept = [
        partition_of(name, key, proxy_fraction=0.2).proxy.tolist()
        for name, key in (("iid", KEY), ("dirichlet", KEY), ("iid", RandomKey(6)))
    ]
    assert kept[0] == kept[1] != kept[2]


def test_the_fingerprint_sees_what_is_kept() -> None:
    partition = partition_of("iid", proxy_fraction=0.2)
    without = Partition(partition.clients)
    assert fingerprint(partition) != fingerprint(without)


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(0, 60),
    fraction=st.floats(0, 0.9),
    seed=st.integers(0, 100),
)
def test_a_part_is_kept_and_the_rest_is_dealt(
    num_samples: int, fraction: float, seed: int
) -> None:
    count = int(fraction * num_samples + 0.5)
    if 0 < num_samples == count or fraction > 0 == count:
        return
    kept, dealt = keep_back(np.arange(num_samples), fraction, RandomKey(seed))
    assert abs(len(kept) - fraction * num_samples) <= 0.5
    assert sorted([*kept, *dealt]) == list(range(num_samples))
    assert np.all(np.diff(dealt) > 0)


@pytest.mark.parametrize("name", PARTITIONS)
def test_something_must_be_kept_where_it_is_asked_for(name: str) -> None:
    message = (
        r"proxy_fraction 0\.002 of 200 .* is none, expected .*; raise it to 0\.005"
    )
    with pytest.raises(DataError, match=message):
        partition_of(name, proxy_fraction=0.002)
    assert len(partition_of(name, proxy_fraction=0.005).proxy) == 1


@settings(max_examples=40, deadline=None)
@given(num_samples=st.integers(2, 10**5))
def test_the_fraction_that_is_advised_keeps_a_sample(num_samples: int) -> None:
    with pytest.raises(DataError) as caught:
        keep_back(np.arange(num_samples), 0.4 / num_samples, KEY)
    advised = str(caught.value).partition("raise it to ")[2].partition(",")[0]
    assert int(float(advised) * num_samples + 0.5) == 1


def test_something_must_be_left() -> None:
    with pytest.raises(DataError, match=r"proxy_fraction 0\.9 of 3 training samples"):
        keep_back(np.arange(3), 0.9, KEY)


class TestUsedPart:
    """A part of both splits is used, the rest is nobody's."""

    @pytest.mark.parametrize("name", [name for name in PARTITIONS if name != "pflbed"])
    def test_owners_share_the_part(self, name: str) -> None:
        partition = partition_of(name, used_fraction=0.5, proxy_fraction=0.1)
        assert len(partition.proxy) == 10
        train, test = [partition.proxy], []
        for client in partition.clients:
            train += [client.train, client.validation]
            test.append(client.test)
        for parts, number, of in ((train, 100, 200), (test, 20, 40)):
            owned = np.concatenate(parts)
            assert len(owned) == len(set(owned.tolist())) == number
            assert owned.min() >= 0
            assert number < owned.max() < of

    def test_labels_go_where_the_partition_puts_them(self) -> None:
        """Positions are those of the whole data set: the labels show it."""
        partition = partition_of("natural", used_fraction=0.5)
        for number, client in enumerate(partition.clients):
            for split, positions in (
                (DATASET.train, np.append(client.train, client.validation)),
                (DATASET.test, client.test),
            ):
                assert split.client_ids is not None
                assert set(split.client_ids[positions]) <= {number}

    def test_the_whole_is_as_ever(self) -> None:
        whole = fingerprint(partition_of("iid"))
        assert fingerprint(partition_of("iid", used_fraction=1.0)) == whole
        assert fingerprint(partition_of("iid", used_fraction=0.9)) != whole

    def test_one_sample_is_used_at_least(self) -> None:
        partition = partition_of("iid", used_fraction=1e-9)
        sizes = [len(client.train) for client in partition.clients]
        assert sorted(sizes) == [0, 0, 1]

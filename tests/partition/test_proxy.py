"""What the server keeps is dealt to nobody."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.config.errors import DataError
from knnper.config.sections import Choice, Settings
from knnper.config.seeding import RandomKey
from knnper.data.dataset import Dataset, LabelledArrays
from knnper.data.examples import InputSpec
from simulation.partition.catalogue import PARTITIONS
from simulation.partition.proxy import keep_back
from simulation.partition.split import Partition, fingerprint, make_partition

KEY = RandomKey(5)


def arrays_of(count: int) -> LabelledArrays:
    return LabelledArrays(
        images=np.zeros((count, 2, 2, 1), dtype=np.uint8),
        labels=np.arange(count) % 4,
        client_ids=np.arange(count) % 3,
    )


DATASET = Dataset(
    name="toy",
    train=arrays_of(200),
    test=arrays_of(40),
    spec=InputSpec((2, 2, 1), 4, (0.5,), (0.5,)),
    class_names=("a", "b", "c", "d"),
    coarse_of=(0, 0, 1, 1),
)


def partition_of(name: str, key: RandomKey = KEY, **given: Any) -> Partition:
    if name != "natural":
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
    if 0 < num_samples == int(fraction * num_samples + 0.5):
        return
    kept, dealt = keep_back(num_samples, fraction, RandomKey(seed))
    assert abs(len(kept) - fraction * num_samples) <= 0.5
    assert sorted([*kept, *dealt]) == list(range(num_samples))
    assert np.all(np.diff(dealt) > 0)


def test_something_must_be_left() -> None:
    with pytest.raises(DataError, match=r"proxy_fraction 0\.9 of 3 training samples"):
        keep_back(3, 0.9, KEY)

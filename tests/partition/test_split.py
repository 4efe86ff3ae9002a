"""What the server keeps goes to no client."""

import dataclasses
import hashlib
import itertools
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.settings import Choice, Settings
from knnper.simulation.partition.allocation import Assignment
from knnper.simulation.partition.clients import (
    ClientPart,
    Clients,
    Partition,
    PartsByName,
)
from knnper.simulation.partition.schemes import PARTITIONS
from knnper.simulation.partition.settings import CountedSettings, PartitionSettings
from knnper.simulation.partition.split import (
    client_names,
    fingerprint,
    hold_out_last,
    hold_out_random,
    keep_back,
    make_partition,
    partition_of,
)
from tests.partition.toy_data import DATASET

KEY = RandomKey(5)


def assignment_of_sizes(*sizes: int) -> Assignment:
    ends = np.cumsum(sizes)
    parts = tuple(np.split(np.arange(ends[-1]), ends[:-1]))
    return Assignment(parts, parts)


def iid_partition(key: RandomKey = KEY, **given: Any) -> Partition:
    chosen = CountedSettings(num_clients=10, **given)
    return make_partition(DATASET, Choice[Settings]("iid", chosen), key)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    fraction=st.floats(0, 0.999),
    seed=st.integers(0, 1000),
)
def test_validation_is_a_part_of_the_training_data(
    sizes: list[int], fraction: float, seed: int
) -> None:
    assignment = assignment_of_sizes(*sizes)
    chosen = PartitionSettings(validation_fraction=fraction)
    partition = partition_of(assignment, chosen, RandomKey(seed))
    for client, samples in zip(partition.clients, assignment.train, strict=True):
        assert not set(client.train) & set(client.validation)
        together = np.sort(np.concatenate([client.train, client.validation]))
        np.testing.assert_array_equal(together, samples)
        assert np.all(np.diff(client.train) > 0)
        assert np.all(np.diff(client.validation) > 0)
        assert len(client.train) > 0 or len(samples) == 0


@pytest.mark.parametrize(
    ("sizes", "fraction", "expected"),
    [
        ((0, 1, 2, 3, 12, 100), 0.2, [0, 0, 0, 1, 2, 20]),
        ((1, 2), 0.9, [0, 1]),  # a single sample is never held out
    ],
)
def test_validation_sizes_are_rounded(
    sizes: tuple[int, ...], fraction: float, expected: list[int]
) -> None:
    chosen = PartitionSettings(validation_fraction=fraction)
    found = partition_of(assignment_of_sizes(*sizes), chosen, KEY)
    assert [len(client.validation) for client in found.clients] == expected


@pytest.mark.parametrize("evaluate_on", ["test", "validation"])
@pytest.mark.parametrize("part", [1.0, 0.3])
def test_columns_say_what_clients_have(evaluate_on: Any, part: float) -> None:
    chosen = PartitionSettings(
        validation_fraction=0.3,
        unseen_fraction=0.5,
        evaluate_on=evaluate_on,
        unseen_train_fraction=part,
    )
    sizes = (0, 1, 2, 3, 12, 100, 7, 31)
    clients = partition_of(assignment_of_sizes(*sizes), chosen, KEY).clients
    for number, client in enumerate(clients):
        drawn = client.train, client.validation, client.test
        assert clients.sizes[:, number].tolist() == [len(one) for one in drawn]
        assert (clients.names[number], clients.seen[number]) == (
            client.name,
            client.seen,
        )
        # It is found anew each time, and is the same.
        np.testing.assert_array_equal(clients[number].train, client.train)
    assert fingerprint(Partition(Clients.of(list(clients)))) == fingerprint(
        Partition(clients)
    )


def test_clients_are_found_by_name() -> None:
    made_of = assignment_of_sizes(3, 4, 5)
    parts = PartsByName(partition_of(made_of, PartitionSettings(), KEY).clients)
    assert (list(parts), len(parts)) == (["0000", "0001", "0002"], 3)
    assert parts["0001"].name == "0001"
    for unknown in ("", "00005", "0003", "x"):
        assert unknown not in parts


def test_the_fingerprint_of_many_clients_draws_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("knnper.simulation.partition.split.MOST_DRAWN", 2)
    sizes = assignment_of_sizes(3, 4, 5)

    def refuse(number: int) -> ClientPart:
        raise AssertionError(number)

    def found(key: RandomKey = KEY, **chosen: Any) -> str:
        partition = partition_of(sizes, PartitionSettings(**chosen), key)
        clients = dataclasses.replace(partition.clients, part=refuse)
        return fingerprint(Partition(clients))

    assert found() == found()
    others = [
        found(RandomKey(6)),
        found(validation_fraction=0.5),
        found(unseen_fraction=0.4),
        found(evaluate_on="validation"),
    ]
    assert len({found(), *others}) == 5


def test_the_number_of_unseen_clients_is_rounded() -> None:
    for fraction, expected in ((0.0, 0), (0.04, 0), (0.05, 1), (0.2, 2), (0.94, 9)):
        partition = iid_partition(unseen_fraction=fraction)
        assert sum(not client.seen for client in partition.clients) == expected
    with pytest.raises(DataError, match=r"unseen_fraction 0\.96 of 10 clients leaves"):
        iid_partition(unseen_fraction=0.96)
    # Who is unseen depends on the key.
    one, other = (
        [client.seen for client in iid_partition(key, unseen_fraction=0.5).clients]
        for key in (RandomKey(0), RandomKey(1))
    )
    assert one != other


def test_names_sort_like_numbers() -> None:
    assert client_names(2) == ("0000", "0001")
    assert client_names(10_000)[-1] == "9999"
    many = client_names(10_001)
    assert (many[0], many[-1]) == ("00000", "10000")
    assert list(many) == sorted(many)


def test_the_fingerprint_is_stable_and_sees_every_field() -> None:
    empty = np.array([], dtype=np.int64)
    part = ClientPart("0000", True, np.array([1, 2]), np.array([3]), empty)
    content = b"0000\n1\n" + struct.pack("<6q", 2, 1, 2, 1, 3, 0)
    expected = hashlib.sha256(content).hexdigest()
    assert fingerprint(Partition(Clients.of([part]))) == expected
    changed = [
        dataclasses.replace(part, name="0001"),
        dataclasses.replace(part, seen=False),
        dataclasses.replace(part, train=np.array([1, 5])),
        dataclasses.replace(part, validation=np.array([5])),
        dataclasses.replace(part, test=np.array([5])),
        # The same numbers, otherwise divided.
        dataclasses.replace(part, train=np.array([1]), validation=np.array([2, 3])),
    ]
    found = {
        fingerprint(Partition(Clients.of([client]))) for client in [part, *changed]
    }
    assert len(found) == 7
    # So it does with what the server keeps, and the partition is a function of the key.
    kept = made("iid", proxy_fraction=0.2)
    assert fingerprint(kept) != fingerprint(Partition(kept.clients))
    assert fingerprint(iid_partition()) == fingerprint(iid_partition())
    assert fingerprint(iid_partition()) != fingerprint(iid_partition(RandomKey(6)))


def test_what_is_held_out_does_not_change_who_gets_what() -> None:
    few = iid_partition(validation_fraction=0.1, unseen_fraction=0.5)
    many = iid_partition(validation_fraction=0.5)
    assert few.clients
    for one, other in zip(few.clients, many.clients, strict=True):
        np.testing.assert_array_equal(one.test, other.test)
        np.testing.assert_array_equal(
            np.sort(np.append(one.train, one.validation)),
            np.sort(np.append(other.train, other.validation)),
        )


def test_what_a_partition_needs() -> None:
    bare = dataclasses.replace(DATASET.train, client_ids=None)
    dataset = dataclasses.replace(DATASET, train=bare)
    choice = Choice[Settings]("natural", PartitionSettings())
    with pytest.raises(DataError, match=r"set data\.client of .*client_separator"):
        make_partition(dataset, choice, KEY)
    with pytest.raises(TypeError, match="expected PartitionSettings, found Settings"):
        make_partition(DATASET, Choice("iid", Settings()), KEY)


# Unseen clients have a part of what they learn from, and that is all.


def with_less(fraction: float, key: RandomKey = KEY, **given: Any) -> Partition:
    given |= {"unseen_fraction": 0.5, "unseen_train_fraction": fraction}
    return iid_partition(key, **given)


def test_less_is_rounded_and_nobody_loses_all() -> None:
    # 20 samples each, of which 4 are held out.
    for fraction, sizes in ((0.5, (8, 2)), (0.2, (3, 1)), (1e-6, (1, 1))):
        clients = with_less(fraction).clients
        assert {client.seen for client in clients} == {True, False}
        for client in clients:
            found = (len(client.train), len(client.validation))
            assert found == ((16, 4) if client.seen else sizes)


@pytest.mark.parametrize("evaluate_on", ["test", "validation"])
def test_nothing_else_changes_with_less(evaluate_on: str) -> None:
    whole, part = (with_less(one, evaluate_on=evaluate_on) for one in (1.0, 0.3))
    assert whole.clients
    for before, after in zip(whole.clients, part.clients, strict=True):
        assert (after.name, after.seen) == (before.name, before.seen)
        assert np.array_equal(after.test, before.test)
        if after.seen:
            assert np.array_equal(after.train, before.train)
            assert np.array_equal(after.validation, before.validation)


@settings(max_examples=25, deadline=None)
@given(
    fractions=st.lists(st.floats(0.001, 1), min_size=2, max_size=4).map(sorted),
    seed=st.integers(0, 1000),
)
def test_smaller_parts_lie_in_larger_ones(fractions: list[float], seed: int) -> None:
    parts = [with_less(one, RandomKey(seed)) for one in fractions]
    assert parts[0].clients
    for smaller, larger in itertools.pairwise(parts):
        for few, many in zip(smaller.clients, larger.clients, strict=True):
            assert set(few.train) <= set(many.train)
            assert set(few.validation) <= set(many.validation)
            assert np.all(np.diff(few.train) > 0)


# What clients hold out for their own choices takes the place of the test split.


def test_validation_data_are_split_once_more() -> None:
    plain, tuned = (
        iid_partition(unseen_fraction=0.3, validation_fraction=0.2, evaluate_on=split)
        for split in ("test", "validation")
    )
    assert plain.clients
    for before, after in zip(plain.clients, tuned.clients, strict=True):
        assert (after.name, after.seen) == (before.name, before.seen)
        assert np.array_equal(after.test, before.validation)
        # 20 samples, 4 held out; of the other 16 a fifth, 3.2, is held out again.
        both = np.sort(np.concatenate([after.train, after.validation]))
        assert np.array_equal(both, before.train)
        assert (len(after.train), len(after.validation)) == (13, 3)
    # Without validation data nobody is tested.
    plain, tuned = (
        iid_partition(validation_fraction=0.0, evaluate_on=split)
        for split in ("test", "validation")
    )
    assert plain.clients
    for before, after in zip(plain.clients, tuned.clients, strict=True):
        assert len(after.test) == 0
        assert np.array_equal(after.train, before.train)


@pytest.mark.parametrize("evaluate_on", ["test", "validation"])
def test_of_text_the_last_windows_are_held_out(evaluate_on: str) -> None:
    spec = dataclasses.replace(DATASET.spec, dtype="token")
    text = dataclasses.replace(DATASET, spec=spec)
    given: dict[str, Any] = {"validation_fraction": 0.3, "evaluate_on": evaluate_on}
    chosen = CountedSettings(num_clients=10, **given)
    found = make_partition(text, Choice[Settings]("iid", chosen), KEY)
    assert len(found.clients) == 10
    for client in found.clients:
        assert client.train.max() < client.validation.min()
        if evaluate_on == "validation":
            assert client.validation.max() < client.test.min()


@settings(max_examples=50, deadline=None)
@given(size=st.integers(0, 20), fraction=st.floats(0, 0.999))
def test_as_many_are_held_out_in_time_as_at_random(size: int, fraction: float) -> None:
    samples = np.arange(size)
    train, validation = hold_out_last(samples, fraction, KEY)
    drawn, held_out = hold_out_random(samples, fraction, KEY)
    assert (len(train), len(validation)) == (len(drawn), len(held_out))
    np.testing.assert_array_equal(np.concatenate([train, validation]), samples)


def made(name: str, key: RandomKey = KEY, **given: Any) -> Partition:
    if name not in ("natural", "pflbed"):
        given["num_clients"] = 3
    chosen = PARTITIONS[name].settings_type(**given)
    return make_partition(DATASET, Choice[Settings](name, chosen), key)


@pytest.mark.parametrize("evaluate_on", ["test", "validation"])
@pytest.mark.parametrize("name", PARTITIONS)
def test_every_sample_has_one_owner(name: str, evaluate_on: str) -> None:
    partition = made(name, proxy_fraction=0.1, evaluate_on=evaluate_on)
    assert len(partition.proxy) == 20
    assert np.all(np.diff(partition.proxy) > 0)
    owned = [partition.proxy]
    for client in partition.clients:
        owned += [client.train, client.validation]
        owned += [client.test] if evaluate_on == "validation" else []
    assert sorted(np.concatenate(owned)) == list(range(200))


def test_clients_are_dealt_their_own_samples() -> None:
    partition = made("natural", proxy_fraction=0.3)
    assert len(partition.clients) == 3
    for number, client in enumerate(partition.clients):
        own = np.append(client.train, client.validation)
        assert set(own % 3) == {number}


def test_what_is_kept_depends_on_the_key_alone() -> None:
    kept = [
        made(name, key, proxy_fraction=0.2).proxy.tolist()
        for name, key in (("iid", KEY), ("dirichlet", KEY), ("iid", RandomKey(6)))
    ]
    assert kept[0] == kept[1] != kept[2]


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(0, 60), fraction=st.floats(0, 0.9), seed=st.integers(0, 100)
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
        made(name, proxy_fraction=0.002)
    assert len(made(name, proxy_fraction=0.005).proxy) == 1


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


# A part of both splits is used, the rest is nobody's.


@pytest.mark.parametrize("name", [name for name in PARTITIONS if name != "pflbed"])
def test_owners_share_the_part(name: str) -> None:
    partition = made(name, used_fraction=0.5, proxy_fraction=0.1)
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


def test_labels_go_where_the_partition_puts_them() -> None:
    """Positions are those of the whole data set: the labels show it."""
    for number, client in enumerate(made("natural", used_fraction=0.5).clients):
        own = np.append(client.train, client.validation)
        for split, positions in ((DATASET.train, own), (DATASET.test, client.test)):
            assert split.client_ids is not None
            assert set(split.client_ids[positions]) <= {number}
    # One sample is used at least.
    sizes = [len(one.train) for one in made("iid", used_fraction=1e-9).clients]
    assert sorted(sizes) == [0, 0, 1]

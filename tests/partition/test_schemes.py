"""What every partition promises, on arbitrary labels."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.seeding import RandomKey
from knnper.simulation.partition.assignment import Assignment, Integers
from knnper.simulation.partition.schemes import (
    DirichletSettings,
    IidSettings,
    PachinkoSettings,
    PathologicalSettings,
    dirichlet,
    iid,
    natural,
    pachinko,
    pathological,
)

Scheme: TypeAlias = Callable[[Integers, Integers, int, RandomKey], Assignment]


def run_iid(
    train: Integers, test: Integers, clients: int, key: RandomKey
) -> Assignment:
    return iid(train, test, IidSettings(num_clients=clients), key)


def run_dirichlet(alpha: float) -> Scheme:
    return lambda train, test, clients, key: dirichlet(
        train, test, DirichletSettings(num_clients=clients, alpha=alpha), key
    )


def run_pachinko(alpha: float, beta: float) -> Scheme:
    return lambda train, test, clients, key: pachinko(
        train,
        test,
        (3, 0, 3, 0, 1, 1),
        PachinkoSettings(num_clients=clients, alpha=alpha, beta=beta),
        key,
    )


SCHEMES: dict[str, Scheme] = {
    "iid": run_iid,
    "dirichlet": run_dirichlet(0.3),
    "dirichlet, tiny alpha": run_dirichlet(1e-3),
    "dirichlet, alpha below all floats' gamma": run_dirichlet(1e-300),
    "dirichlet, huge alpha": run_dirichlet(1e6),
    "pachinko": run_pachinko(0.3, 10.0),
    "pachinko, tiny alpha and beta": run_pachinko(1e-3, 1e-300),
}
labels = st.lists(st.integers(0, 5), max_size=40).map(
    lambda values: np.array(values, dtype=np.int64)
)
clients = st.integers(1, 12)
seeds = st.integers(0, 2**32)


def assert_each_sample_once(parts: tuple[Integers, ...], num_samples: int) -> None:
    for part in parts:
        assert part.dtype == np.int64
        assert np.all(np.diff(part) > 0)
    together = np.sort(np.concatenate(parts))
    np.testing.assert_array_equal(together, np.arange(num_samples))


def assert_tested_on_known_labels(
    assignment: Assignment, train: Integers, test: Integers
) -> None:
    somewhere = set(train.tolist())
    for train_part, test_part in zip(assignment.train, assignment.test, strict=True):
        asked = set(test[test_part].tolist()) & somewhere
        assert asked <= set(train[train_part].tolist())


def assert_same(first: Assignment, second: Assignment) -> None:
    pairs = zip(first.train + first.test, second.train + second.test, strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
@settings(max_examples=25, deadline=None)
@given(train=labels, test=labels, num_clients=clients, seed=seeds)
def test_every_sample_goes_to_one_client(
    scheme: Scheme, train: Integers, test: Integers, num_clients: int, seed: int
) -> None:
    assignment = scheme(train, test, num_clients, RandomKey(seed))
    assert len(assignment.train) == len(assignment.test) == num_clients
    assert_each_sample_once(assignment.train, len(train))
    assert_each_sample_once(assignment.test, len(test))
    assert_tested_on_known_labels(assignment, train, test)
    assert_same(assignment, scheme(train, test, num_clients, RandomKey(seed)))


@settings(max_examples=40, deadline=None)
@given(
    num_labels=st.integers(1, 6),
    num_clients=clients,
    classes_per_client=st.integers(1, 6),
    extra=labels,
    test=labels,
    seed=seeds,
)
def test_pathological_gives_exactly_c_classes(
    num_labels: int,
    num_clients: int,
    classes_per_client: int,
    extra: Integers,
    test: Integers,
    seed: int,
) -> None:
    classes_per_client = min(classes_per_client, num_labels)
    num_clients = max(num_clients, -(-num_labels // classes_per_client))
    enough = np.repeat(np.arange(num_labels), num_clients)
    train = np.concatenate([enough, extra % num_labels])
    chosen = PathologicalSettings(
        num_clients=num_clients, classes_per_client=classes_per_client
    )
    assignment = pathological(train, test, chosen, RandomKey(seed))
    assert_each_sample_once(assignment.train, len(train))
    assert_each_sample_once(assignment.test, len(test))
    assert_tested_on_known_labels(assignment, train, test)
    held = [set(train[part].tolist()) for part in assignment.train]
    assert {len(classes) for classes in held} == {classes_per_client}
    holders = [sum(label in h for h in held) for label in range(num_labels)]
    assert min(holders) >= 1
    assert max(holders) - min(holders) <= 1
    assert_same(assignment, pathological(train, test, chosen, RandomKey(seed)))


@settings(max_examples=25, deadline=None)
@given(
    train=st.lists(st.integers(-5, 5), min_size=1, max_size=30),
    test=st.lists(st.integers(-5, 5), max_size=30),
)
def test_natural_follows_the_ids(train: list[int], test: list[int]) -> None:
    assignment = natural(np.array(train), np.array(test, dtype=np.int64))
    ids = sorted({*train, *test})
    assert len(assignment.train) == len(ids)
    assert_each_sample_once(assignment.train, len(train))
    assert_each_sample_once(assignment.test, len(test))
    for position, client_id in enumerate(ids):
        assert {train[sample] for sample in assignment.train[position]} <= {client_id}
        assert {test[sample] for sample in assignment.test[position]} <= {client_id}


@pytest.mark.parametrize("name", ["iid", "dirichlet", "pachinko"])
def test_another_key_is_another_assignment(name: str) -> None:
    train = np.arange(600) % 6
    first = SCHEMES[name](train, train, 5, RandomKey(1))
    second = SCHEMES[name](train, train, 5, RandomKey(2))
    assert any(
        not np.array_equal(one, other)
        for one, other in zip(first.train, second.train, strict=True)
    )

"""What every partition promises, on arbitrary labels."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.simulation.partition.allocation import Assignment, Integers
from knnper.simulation.partition.dirichlet import DirichletSettings, dirichlet
from knnper.simulation.partition.pachinko import PachinkoSettings, pachinko
from knnper.simulation.partition.pathological import PathologicalSettings, pathological
from knnper.simulation.partition.schemes import iid, natural
from knnper.simulation.partition.settings import CountedSettings

Scheme: TypeAlias = Callable[[Integers, Integers, int, RandomKey], Assignment]


def run_iid(
    train: Integers, test: Integers, clients: int, key: RandomKey
) -> Assignment:
    return iid(train, test, CountedSettings(num_clients=clients), key)


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


def assert_each_sample_once(parts: Sequence[Integers], num_samples: int) -> None:
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
    assert len(first.train) == len(second.train)
    both = [*first.train, *first.test], [*second.train, *second.test]
    for one, other in zip(*both, strict=True):
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


def test_sizes_and_labels_are_even() -> None:
    train = np.repeat(np.arange(10), 1000)
    test = np.repeat(np.arange(10), 200)
    assignment = iid(train, test, CountedSettings(num_clients=9), RandomKey(0))
    sizes = [len(part) for part in assignment.train]
    assert sorted(sizes) == [1111] * 8 + [1112]
    for part in assignment.train:
        np.testing.assert_allclose(np.bincount(train[part]), 111, atol=45)
    assert max(len(part) for part in assignment.test) < 240
    assert min(len(part) for part in assignment.test) > 204


LABELS = np.arange(50_000) % 10


def proportions(labels: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    counts = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
    return np.asarray(counts / counts.sum(axis=0))


def test_training_and_test_samples_have_the_same_proportions() -> None:
    settings = DirichletSettings(num_clients=20, alpha=0.3)
    assignment = dirichlet(LABELS, LABELS[:20_000], settings, RandomKey(0))
    train = proportions(LABELS, assignment.train)
    test = proportions(LABELS[:20_000], assignment.test)
    np.testing.assert_allclose(train, test, atol=1 / 2000)


def test_alpha_says_how_uneven_the_clients_are() -> None:
    spreads = []
    for alpha in (0.1, 1.0, 100.0):
        settings = DirichletSettings(num_clients=50, alpha=alpha)
        assignment = dirichlet(LABELS, LABELS, settings, RandomKey(0))
        # Var of one entry of Dir_M(α) is (1/M)(1 - 1/M) / (Mα + 1).
        expected = np.sqrt(0.02 * 0.98 / (50 * alpha + 1))
        spread = proportions(LABELS, assignment.train).std()
        assert abs(spread / expected - 1) < 0.25
        spreads.append(spread)
    assert spreads == sorted(spreads, reverse=True)


TEN_CLASSES = np.repeat(np.arange(10), 50)
KEY = RandomKey(0)


def settings_of(num_clients: int, classes_per_client: int) -> PathologicalSettings:
    return PathologicalSettings(
        num_clients=num_clients, classes_per_client=classes_per_client
    )


def test_the_samples_of_a_class_are_shared_evenly() -> None:
    # 20 clients with two of ten classes each: every class has four clients.
    assignment = pathological(TEN_CLASSES, TEN_CLASSES[::5], settings_of(20, 2), KEY)
    assert len(assignment.train) == len(assignment.test) == 20
    for part in assignment.train:
        counts = np.bincount(TEN_CLASSES[part], minlength=10)
        assert set(counts.tolist()) <= {0, 12, 13}
        assert np.count_nonzero(counts) == 2
    for part in assignment.test:
        counts = np.bincount(TEN_CLASSES[::5][part], minlength=10)
        assert set(counts.tolist()) <= {0, 2, 3}


def test_the_samples_of_a_class_are_shared_unevenly() -> None:
    """In proportion to draws from U(0.4, 0.6): at most 1.5 times apart."""
    chosen = replace(settings_of(20, 2), shares="uneven")
    assignment = pathological(TEN_CLASSES, TEN_CLASSES[::5], chosen, KEY)
    counts = np.stack(
        [np.bincount(TEN_CLASSES[part], minlength=10) for part in assignment.train]
    )
    assert counts.sum(axis=0).tolist() == np.bincount(TEN_CLASSES).tolist()
    for of_label in counts.T:
        held = of_label[of_label > 0]
        assert len(held) == 4
        assert (held.max() - 1) / (held.min() + 1) <= 1.5
    assert len({*counts[counts > 0].tolist()}) > 4


def test_clients_have_many_different_pairs() -> None:
    assignment = pathological(TEN_CLASSES, TEN_CLASSES, settings_of(20, 2), KEY)
    pairs = {tuple(np.unique(TEN_CLASSES[part])) for part in assignment.train}
    assert len(pairs) > 12


SCARCE = np.append(TEN_CLASSES[TEN_CLASSES != 3], [3, 3])


@pytest.mark.parametrize(
    ("labels", "num_clients", "classes", "message"),
    [
        (TEN_CLASSES, 5, 11, "is 11, .* only 10"),
        (TEN_CLASSES, 4, 2, "4 clients with 2 .* cannot hold all 10"),
        (SCARCE, 20, 2, "class 3 has 2 training samples for the 4"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    labels: Integers, num_clients: int, classes: int, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        pathological(labels, labels, settings_of(num_clients, classes), KEY)


COARSE_OF = tuple(label // 5 for label in range(100))
TRAIN = np.arange(50_000) % 100
TEST = np.arange(10_000) % 100


def split(num_clients: int, alpha: float, beta: float) -> Assignment:
    settings = PachinkoSettings(num_clients=num_clients, alpha=alpha, beta=beta)
    return pachinko(TRAIN, TEST, COARSE_OF, settings, RandomKey(0))


def test_clients_get_equal_shares() -> None:
    assignment = split(199, 0.3, 10.0)
    assert {len(part) for part in assignment.train} == {251, 252}
    tests = [len(part) for part in assignment.test]
    assert min(tests) > 35
    assert max(tests) < 70


def test_alpha_governs_coarse_labels_and_beta_fine_ones() -> None:
    even_inside = split(200, 0.01, 1000.0).train[0]
    one_inside = split(200, 0.01, 0.001).train[0]
    coarse, counts = np.unique(TRAIN[even_inside] // 5, return_counts=True)
    largest = coarse[counts.argmax()]
    assert counts.max() > 200
    within = np.bincount(TRAIN[even_inside] - 5 * largest + 100)[100:105]
    assert within.min() > 0.1 * counts.max()
    assert np.bincount(TRAIN[one_inside]).max() > 200


def test_draws_follow_the_dirichlet_vectors() -> None:
    # The first clients draw from a full stock: the share of one coarse label over
    # them has the mean 1/20 and the variance of Dir_20(α) and of 5 draws.
    some = TRAIN[:20_000]
    settings = PachinkoSettings(num_clients=4000, alpha=0.3, beta=10.0)
    assignment = pachinko(some, some[:100], COARSE_OF, settings, RandomKey(0))
    shares = np.stack(
        [
            np.bincount(TRAIN[part] // 5, minlength=20) / len(part)
            for part in assignment.train[:800]
        ]
    )
    np.testing.assert_allclose(shares.mean(axis=0), 0.05, atol=0.02)
    spread = 0.05 * 0.95
    expected = spread / 7 + (spread - spread / 7) / 5
    np.testing.assert_allclose(shares.var(axis=0).mean(), expected, rtol=0.1)


@pytest.mark.parametrize(
    ("coarse_of", "message"),
    [(None, "needs .* coarse labels"), ((0, 0, 1), "of 3 labels, but has 100")],
)
def test_no_or_too_few_coarse_labels(
    coarse_of: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        pachinko(TRAIN, TEST, coarse_of, PachinkoSettings(num_clients=2), KEY)

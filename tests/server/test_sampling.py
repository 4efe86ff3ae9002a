import pytest
from hypothesis import given
from hypothesis import strategies as st

from knnper.seeding import RandomKey
from knnper.server.rounds import num_participants, sample_participants

CLIENTS = [f"{i:04d}" for i in range(40)]


@pytest.mark.parametrize(
    ("num_clients", "participation", "expected"),
    [(80, 0.2, 16), (10, 1.0, 10), (10, 0.25, 3), (10, 0.24, 2), (3, 0.01, 1)],
)
def test_the_nearest_number_takes_part(
    num_clients: int, participation: float, expected: int
) -> None:
    assert num_participants(num_clients, participation) == expected


@given(st.integers(0, 9), st.integers(1, 99))
def test_participants_are_distinct_sorted_and_repeatable(seed: int, rnd: int) -> None:
    chosen = sample_participants(CLIENTS, 0.3, rnd, RandomKey(seed))
    assert len(chosen) == len(set(chosen)) == 12
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(CLIENTS)
    assert chosen == sample_participants(CLIENTS, 0.3, rnd, RandomKey(seed))


def test_rounds_and_seeds_differ() -> None:
    of = {
        tuple(sample_participants(CLIENTS, 0.3, rnd, RandomKey(seed)))
        for seed in range(3)
        for rnd in range(1, 11)
    }
    assert len(of) == 30


def test_every_client_takes_its_turn() -> None:
    met = {
        name
        for rnd in range(1, 40)
        for name in sample_participants(CLIENTS, 0.2, rnd, RandomKey(0))
    }
    assert met == set(CLIENTS)

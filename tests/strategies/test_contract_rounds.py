"""What every method must bear in a round: few examples, and clients that miss it."""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from knnper.data.examples import ClientData
from knnper.records import fingerprint, is_finite, take_apart
from knnper.seeding import RandomKey
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.method import Method
from knnper.strategies.core.records import NoState
from tests.strategies.trained_methods import (
    TRAINING,
    WITH_ROUNDS,
    MakeClient,
    MakeTask,
    Train,
    build,
    client_update,
)

PARTICIPANTS = (("a", "b", "c"), ("c", "d", "e"), ("a", "b", "d"))
"""Of three rounds: some clients miss the first, some the second."""

KEEPING = [name for name in WITH_ROUNDS if METHODS[name].client_state != "0"]


def assert_finite(*records: Any) -> None:
    for record in records:
        parts = take_apart(record)
        for name, tensor in parts.tensors.items():
            assert is_finite(tensor), name
        json.loads(parts.structure, parse_constant=pytest.fail)


@pytest.mark.parametrize(("num_train", "labels"), [(1, 3), (2, 3), (6, 1)])
@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_a_client_with_little_to_learn_from_takes_part(
    name: str, num_train: int, labels: int, train: Train, noisy: MakeClient
) -> None:
    run = train(name)
    data, memory, state = noisy(num_train, 0, 9, labels=labels), None, run.before
    for server_round in (1, 2):
        memory, update = client_update(
            run.method, state, "a", data, memory, server_round
        )
        assert update.num_examples == num_train
        assert math.isfinite(update.train_loss)
        assert_finite(memory, update)
        if server_round == 1:
            state = run.method.aggregate(state, iter([("a", update), *run.updates[1:]]))
            assert_finite(state)


def rounds(
    method: Method, data: dict[str, ClientData], memory: dict[str, Any]
) -> Iterator[Any]:
    """Yield the server's state before each round; keep its participants' memory."""
    state = method.init(sorted(data), RandomKey(1))
    for server_round, names in enumerate(PARTICIPANTS, start=1):
        yield state
        updates = []
        for name in names:
            memory[name], update = client_update(
                method, state, name, data[name], memory.get(name), server_round
            )
            assert_finite(memory[name], update)
            updates.append((name, update))
        state = method.aggregate(state, iter(updates))
    yield state


@pytest.fixture
def make(normed_task: MakeTask) -> Callable[[str], Method]:
    task = normed_task(replace(TRAINING, num_rounds=len(PARTICIPANTS)))
    return lambda name: build(METHODS[name], task)


@pytest.fixture
def data(noisy: MakeClient) -> dict[str, ClientData]:
    return {client: noisy(6 + i, 4, seed=i) for i, client in enumerate("abcde")}


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_a_part_of_the_clients_replies(
    name: str, make: Callable[[str], Method], data: dict[str, ClientData]
) -> None:
    first, second = dict[str, Any](), dict[str, Any]()
    once, twice = rounds(make(name), data, first), rounds(make(name), data, second)
    for state, again in zip(once, twice, strict=True):
        assert_finite(state)
        assert fingerprint(state) == fingerprint(again)
    assert sorted(first) == sorted(second) == list("abcde")
    for client, memory in first.items():
        assert fingerprint(memory) == fingerprint(second[client])


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_who_keeps_something(name: str, make: Callable[[str], Method]) -> None:
    keeps_nothing = make(name).client_state_type is NoState
    assert keeps_nothing == (METHODS[name].client_state == "0")


@pytest.mark.parametrize("name", KEEPING)
def test_a_client_that_missed_a_round_goes_on_with_what_it_kept(
    name: str, make: Callable[[str], Method], data: dict[str, ClientData]
) -> None:
    method, memory = make(name), dict[str, Any]()
    *_, last = itertools.islice(rounds(method, data, memory), len(PARTICIPANTS))
    found, anew = (
        [
            fingerprint(one)
            for one in client_update(method, last, "a", data["a"], its, 3)
        ]
        for its in (memory["a"], None)
    )
    assert found != anew

"""A wrong update fails its client and nobody else, whichever comes first."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from knnper.experiment import TrainingSettings
from knnper.records import Parts, put_together, take_apart
from knnper.seeding import RandomKey
from knnper.server.federation import Reply
from knnper.server.rounds import Tally, usable_updates
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.method import Method
from knnper.strategies.hypcluster import ClusterUpdate
from tests.strategies.tiny import noisy, normed_task

CLIENTS = ("a", "b", "c", "d")
EXAMPLES = dict.fromkeys(CLIENTS, 6)
OF_A_MODEL = {"weights", "shared", "components", "models"}
WITH_ROUNDS = sorted(set(METHODS) - {"local"})
TRAINING = TrainingSettings(num_rounds=2, batch_size=4, learning_rate=0.1)


@pytest.fixture
def method(request: pytest.FixtureRequest) -> Method:
    spec = METHODS[request.param]
    return spec(normed_task(TRAINING), spec.settings_type())


def longer(update: Any) -> Iterator[Any]:
    """Yield the update with each of its tensors longer by one."""
    parts = take_apart(update)
    for name, tensor in parts.tensors.items():
        wrong = torch.cat([tensor.reshape(-1), torch.zeros(1)])
        tensors = {**parts.tensors, name: wrong}
        yield put_together(type(update), Parts(tensors, parts.structure))


def of_other_lengths(update: Any) -> Iterator[Any]:
    """Yield the update with another number of tensors, where that is a client's."""
    for field in dataclasses.fields(update):
        value = getattr(update, field.name)
        if isinstance(value, tuple):
            for wrong in ((), value[:-1], (*value, value[0])):
                yield dataclasses.replace(update, **{field.name: wrong})


def of_other_clusters(update: Any) -> Iterator[Any]:
    if isinstance(update, ClusterUpdate):
        yield dataclasses.replace(update, cluster=99)


def of_a_round(method: Method, state: Any) -> tuple[Tally, dict[str, Any]]:
    """Return what is known of what was sent, and every client's honest update."""
    checks = (method.update_problem, method.started_from)
    tally, updates = Tally(EXAMPLES, math.inf, *checks), {}
    for number, client in enumerate(CLIENTS):
        rng = RandomKey(1).child(client)
        payload = method.broadcast(state, client, rng)
        tally.sends(client, payload)
        data = noisy(6, 4, seed=number)
        updates[client] = method.client_update(payload, None, data, 1, rng)[1]
    return tally, updates


def used_of(
    replies: list[Reply], method: Method, tally: Tally
) -> list[tuple[str, Any]]:
    found = usable_updates(replies, method.update_type, tally)
    return [(one.client, one.update) for one in found if one is not None]


@pytest.mark.parametrize("method", WITH_ROUNDS, indirect=True)
def test_a_wrong_first_update_is_that_client_s_failure(method: Method) -> None:
    state = method.init(CLIENTS, RandomKey(1))
    _, honest = of_a_round(method, state)
    first = honest["a"]
    wrong_ones = [*longer(first), *of_other_lengths(first), *of_other_clusters(first)]
    for wrong in wrong_ones:
        tally, _ = of_a_round(method, state)
        replies = [Reply((c,), update) for c, update in (honest | {"a": wrong}).items()]
        used = used_of(replies, method, tally)
        assert [client for client, _ in used] == ["b", "c", "d"], wrong
        assert list(tally.failures) == ["a"]
        method.aggregate(state, iter(used))


@pytest.mark.parametrize("method", WITH_ROUNDS, indirect=True)
def test_how_far_a_client_moves_is_measured_from_what_it_was_sent(
    method: Method,
) -> None:
    state = method.init(CLIENTS, RandomKey(1))
    tally, honest = of_a_round(method, state)
    replies = [Reply((client,), update) for client, update in honest.items()]
    for one in usable_updates(replies, method.update_type, tally):
        assert one is not None
        fields = [name for name in one.changes if name in OF_A_MODEL]
        assert fields
        for name in fields:
            # A step moves a model by a part of its length.
            assert 0 <= one.changes[name].norm < one.changes[name].sent


@pytest.mark.parametrize("method", ["fedattn"], indirect=True)
def test_an_update_without_what_may_be_missing_does_not_decide_for_others(
    method: Method,
) -> None:
    state = method.init(CLIENTS, RandomKey(1))
    tally, honest = of_a_round(method, state)
    honest["a"] = dataclasses.replace(honest["a"], representation=None)
    replies = [Reply((client,), update) for client, update in honest.items()]
    used = used_of(replies, method, tally)
    assert [client for client, _ in used] == list(CLIENTS)
    assert method.aggregate(state, iter(used)).known.names == ("b", "c", "d")

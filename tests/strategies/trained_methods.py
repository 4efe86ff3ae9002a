"""Any method of the catalogue on a small task, after one round with three clients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from knnper.data.examples import ClientData
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.catalogue import METHODS, PERSONALIZERS
from knnper.strategies.core.method import Method
from knnper.strategies.core.task import Task
from tests.strategies import tiny

MakeTask = Callable[..., Task]
MakeClient = Callable[..., ClientData]
RunRounds = Callable[..., tuple[Any, dict[str, Any]]]

TRAINING = TrainingSettings(num_rounds=2, batch_size=4, learning_rate=0.1)
CLIENTS = ("a", "b", "c")
WITH_ROUNDS = sorted(set(METHODS) - {"local"})


@dataclass(frozen=True)
class Trained:
    """A method, its clients' data, and what is known after one round."""

    task: Task
    method: Method
    data: dict[str, ClientData]
    before: Any
    updates: Sequence[tuple[str, Any]]
    memory: dict[str, Any]
    state: Any


Train = Callable[..., Trained]
"""``(name, on_top=None) -> Trained``, anew at every call."""


def build(spec: type[Method], task: Task, on_top: str | None = None) -> Method:
    """Return a method with what it has on top, or with ``on_top``."""
    top = PERSONALIZERS[on_top or spec.personalization]
    method = spec(task, spec.settings_type())
    return top(task, method, top.settings_type())


def client_update(
    method: Method,
    state: Any,
    client: str,
    data: ClientData,
    memory: Any = None,
    server_round: int = 1,
) -> tuple[Any, Any]:
    """Return what ``client`` keeps of a round and what it sends."""
    rng = RandomKey(server_round).child(client)
    payload = method.broadcast(state, client, rng)
    return method.client_update(payload, memory, data, server_round, rng)


def trained(
    name: str, task: Task, noisy: MakeClient, on_top: str | None = None
) -> Trained:
    """Return what comes of a round of a method that has its default settings."""
    method = build(METHODS[name], task, on_top)
    data = {client: noisy(6 + i, 4, seed=i) for i, client in enumerate(CLIENTS)}
    before = method.init(CLIENTS, RandomKey(1))
    if method.num_rounds == 0:
        return Trained(task, method, data, before, (), {}, before)
    results = {c: client_update(method, before, c, data[c]) for c in CLIENTS}
    updates = [(client, results[client][1]) for client in CLIENTS]
    memory = {client: results[client][0] for client in CLIENTS}
    state = method.aggregate(before, iter(updates))
    return Trained(task, method, data, before, updates, memory, state)


def train_on_four_pixels(name: str, on_top: str | None = None) -> Trained:
    """Return a round of any method of the catalogue; the server has data of its own."""
    proxy = tiny.noisy(7, 0, seed=2).train
    task = replace(tiny.normed_task(TRAINING), proxy=lambda: proxy)
    return trained(name, task, tiny.noisy, on_top)

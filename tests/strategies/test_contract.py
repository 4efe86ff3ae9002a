"""What every method of the catalogue must keep to."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from knnper.config.sections import TrainingSettings
from knnper.config.seeding import RandomKey
from knnper.data.examples import ClientData
from knnper.transport.codec import fingerprint, put_together, take_apart
from strategies.catalogue import METHODS
from strategies.core.method import NEWCOMER, Method, MethodSpec
from strategies.core.records import Record, Update
from strategies.core.task import Task
from strategies.personalizers import PERSONALIZERS

MakeTask = Callable[..., Task]
MakeClient = Callable[..., ClientData]

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


def build(spec: MethodSpec, task: Task, on_top: str | None = None) -> Method:
    top = PERSONALIZERS[on_top or spec.personalization]
    method = spec.build(task, spec.settings_type())
    return top.apply(task, method, top.settings_type())


def client_update(
    method: Method, state: Any, client: str, data: ClientData, memory: Any = None
) -> tuple[Any, Any]:
    rng = RandomKey(1).child(client)
    payload = method.broadcast(state, client, rng)
    return method.client_update(payload, memory, data, 1, rng)


@pytest.fixture
def train(normed_task: MakeTask, noisy: MakeClient) -> Callable[[str], Trained]:
    def run(name: str) -> Trained:
        task = normed_task(TRAINING)
        method = build(METHODS[name], task)
        data = {client: noisy(6 + i, 4, seed=i) for i, client in enumerate(CLIENTS)}
        before = method.init(CLIENTS, RandomKey(1))
        if method.num_rounds == 0:
            return Trained(task, method, data, before, (), {}, before)
        results = {c: client_update(method, before, c, data[c]) for c in CLIENTS}
        updates = [(client, results[client][1]) for client in CLIENTS]
        memory = {client: results[client][0] for client in CLIENTS}
        state = method.aggregate(before, iter(updates))
        return Trained(task, method, data, before, updates, memory, state)

    return run


def test_the_table_is_read_only() -> None:
    assert list(METHODS) == [
        "fedavg",
        "local",
        "fedavg_plus",
        "knn_per",
        "knn_per_protonn",
        "scaffold",
        "fedem",
        "pfedhn",
        "clustered_fl",
        "ditto",
        "apfl",
        "fedrep",
        "per_fedavg",
        "fedprox",
        "pfedme",
        "fedbn",
        "fedper",
        "lg_fedavg",
        "fed_mtl",
        "l2gd",
        "agnostic",
        "hypcluster",
        "mapper",
        "fedattn",
        "fedbasis",
        "pfedgp",
        "fedavgm",
        "fedadam",
        "fedadagrad",
        "fedyogi",
        "qfedavg",
        "fedmedian",
        "fedtrimmedavg",
        "krum",
        "multikrum",
        "bulyan",
    ]
    with pytest.raises(TypeError):
        METHODS["fedavg"] = METHODS["local"]  # type: ignore[index]


@pytest.mark.parametrize("name", METHODS)
def test_the_entry_is_described(name: str) -> None:
    spec = METHODS[name]
    texts = (spec.title, spec.summary, spec.source, spec.unseen, spec.client_state)
    assert all(texts)
    assert spec.upload
    assert spec.download


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_a_round_moves_the_model(name: str, train: Callable[[str], Trained]) -> None:
    run = train(name)
    assert run.method.num_rounds == TRAINING.num_rounds
    assert fingerprint(run.state) != fingerprint(run.before)
    for client, update in run.updates:
        assert isinstance(update, Update)
        assert update.num_examples == len(run.data[client].train)
        assert math.isfinite(update.train_loss)
        assert update.train_loss > 0


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_a_round_is_deterministic(name: str, train: Callable[[str], Trained]) -> None:
    first, second = train(name), train(name)
    assert fingerprint(first.state) == fingerprint(second.state)
    for client in CLIENTS:
        assert fingerprint(first.memory[client]) == fingerprint(second.memory[client])


@pytest.mark.parametrize("name", METHODS)
def test_records_survive_the_codec(name: str, train: Callable[[str], Trained]) -> None:
    run, method = train(name), train(name).method
    pairs: list[tuple[type[Record], Any]] = [(method.state_type, run.state)]
    for client in (*CLIENTS, NEWCOMER):
        payload = method.broadcast(run.state, client, RandomKey(2))
        pairs.append((method.payload_type, payload))
    pairs += [(method.update_type, update) for _, update in run.updates]
    pairs += [(method.client_state_type, memory) for memory in run.memory.values()]
    for record_type, record in pairs:
        assert type(record) is record_type
        copied = put_together(record_type, take_apart(record))
        assert fingerprint(copied) == fingerprint(record)


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_no_argument_of_a_round_is_changed(
    name: str, train: Callable[[str], Trained]
) -> None:
    run = train(name)
    payload = run.method.broadcast(run.state, "a", RandomKey(2))
    arguments = [run.state, payload, run.memory["a"]]
    arguments += [update for _, update in run.updates]
    marks = [fingerprint(argument) for argument in arguments]
    images, initial = (
        run.data["a"].train.images.clone(),
        run.task.initial_weights.clone(),
    )

    run.method.client_update(payload, run.memory["a"], run.data["a"], 2, RandomKey(2))
    run.method.aggregate(run.state, iter(run.updates))
    predictor = run.method.personalize(
        payload, run.memory["a"], run.data["a"], RandomKey(2)
    )
    predictor(run.data["a"].validation.images)

    assert [fingerprint(argument) for argument in arguments] == marks
    assert torch.equal(run.data["a"].train.images, images)
    assert torch.equal(run.task.initial_weights, initial)


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_a_result_is_independent_of_what_was_trained_before(
    name: str, train: Callable[[str], Trained]
) -> None:
    run = train(name)
    again = client_update(run.method, run.before, "a", run.data["a"])
    assert fingerprint(again[1]) == fingerprint(run.updates[0][1])
    assert fingerprint(again[0]) == fingerprint(run.memory["a"])


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_the_order_of_the_clients_does_not_matter(
    name: str, train: Callable[[str], Trained]
) -> None:
    run = train(name)
    reverse = run.method.aggregate(run.before, iter(run.updates[::-1]))
    expected, found = take_apart(run.state).tensors, take_apart(reverse).tensors
    assert expected.keys() == found.keys()
    for path, tensor in expected.items():
        torch.testing.assert_close(found[path], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("known_as", ["a", NEWCOMER])
@pytest.mark.parametrize(
    ("num_train", "num_validation", "labels"),
    [(0, 0, 3), (0, 2, 3), (1, 0, 3), (1, 1, 3), (2, 1, 3), (6, 4, 1), (6, 4, 3)],
)
@pytest.mark.parametrize("name", METHODS)
def test_every_client_is_served_probabilities(
    name: str,
    num_train: int,
    num_validation: int,
    labels: int,
    known_as: str,
    train: Callable[[str], Trained],
    noisy: MakeClient,
) -> None:
    run = train(name)
    data = noisy(num_train, num_validation, seed=9, labels=labels)
    payload = run.method.broadcast(run.state, known_as, RandomKey(2))
    memory = run.memory.get(known_as)
    queries = noisy(5, 0, seed=10).train.images

    served = run.method.personalize(payload, memory, data, RandomKey(3))(queries)
    again = run.method.personalize(payload, memory, data, RandomKey(3))(queries)

    assert served.shape == (5, 3)
    assert served.dtype == torch.float32
    assert bool((served >= 0).all())
    torch.testing.assert_close(served.sum(dim=1), torch.ones(5))
    assert torch.equal(served, again)


@pytest.mark.parametrize("name", METHODS)
def test_no_queries_give_no_rows(name: str, train: Callable[[str], Trained]) -> None:
    run = train(name)
    payload = run.method.broadcast(run.state, "a", RandomKey(2))
    predictor = run.method.personalize(
        payload, run.memory.get("a"), run.data["a"], RandomKey(3)
    )
    assert predictor(run.data["a"].train.images[:0]).shape == (0, 3)
    assert all(isinstance(value, float) for value in predictor.describe().values())


@pytest.mark.parametrize("name", METHODS)
def test_without_data_everyone_is_served_the_unpersonalised_model(
    name: str, train: Callable[[str], Trained], noisy: MakeClient
) -> None:
    run, queries = train(name), noisy(5, 0, seed=10).train.images
    nothing = noisy(0, 0, seed=9)
    payload = run.method.broadcast(run.state, NEWCOMER, RandomKey(2))
    served = [
        run.method.personalize(payload, memory, nothing, RandomKey(seed))(queries)
        for seed, memory in [(3, None), (4, run.memory.get("a"))]
    ]
    assert torch.equal(served[0], served[1])
    if hasattr(run.state, "weights"):
        expected = run.task.probabilities(run.state.weights, queries)
        assert torch.equal(served[0], expected)


def count_embeddings(task: Task) -> list[int]:
    """Return a list that grows with each forward pass, by the number of images."""
    sizes: list[int] = []
    module = task.model.module
    embed = module.embed

    def counted(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return embed(x)

    module.embed = counted  # type: ignore[method-assign]
    return sizes


TOGETHER = (
    "agnostic",
    "bulyan",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedem",
    "fedmedian",
    "fedprox",
    "fedtrimmedavg",
    "fedyogi",
    "hypcluster",
    "knn_per",
    "knn_per_protonn",
    "krum",
    "multikrum",
    "pfedgp",
    "qfedavg",
    "scaffold",
)


def test_who_is_personalised_together(train: Callable[[str], Trained]) -> None:
    found = [name for name in METHODS if train(name).method.personalizes_by_inference]
    assert sorted(found) == sorted(TOGETHER)


@pytest.mark.parametrize("name", TOGETHER)
def test_clients_that_are_personalised_together_are_sent_the_same(
    name: str, train: Callable[[str], Trained]
) -> None:
    run = train(name)
    payloads = {
        fingerprint(run.method.broadcast(run.state, client, RandomKey(2).child(client)))
        for client in (*CLIENTS, NEWCOMER)
    }
    assert len(payloads) == 1


@pytest.mark.parametrize("name", TOGETHER)
def test_together_clients_are_served_what_they_would_be_alone(
    name: str, train: Callable[[str], Trained], noisy: MakeClient
) -> None:
    run = train(name)
    payload = run.method.broadcast(run.state, "a", RandomKey(2))
    tests = {client: noisy(5, 0, seed=20).train.images for client in CLIENTS}

    def served(client: str) -> torch.Tensor:
        data, memory = run.data[client], run.memory.get(client)
        return run.method.personalize(payload, memory, data, RandomKey(3))(
            tests[client]
        )

    calls = count_embeddings(run.task)
    alone = [served(client) for client in CLIENTS]
    num_calls_alone = len(calls)
    calls.clear()
    models = list(take_apart(payload).tensors.values())
    train_images = [run.data[client].train.images for client in CLIENTS]
    validation_images = [run.data[client].validation.images for client in CLIENTS]
    parts = [train_images, validation_images, list(tests.values())]
    with run.task.pool.holding(models, parts):
        together = [served(client) for client in CLIENTS]
    assert len(CLIENTS) * len(calls) == num_calls_alone
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)

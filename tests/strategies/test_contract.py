"""What every method of the catalogue must keep to."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from knnper import strategies
from knnper.records import fingerprint, put_together, take_apart
from knnper.seeding import RandomKey
from knnper.strategies.catalogue import METHODS, PERSONALIZERS
from knnper.strategies.core.method import AS_IT_IS, UNSEEN_CLIENT
from knnper.strategies.core.records import Record, Update
from knnper.strategies.core.task import Task
from tests.strategies.trained_methods import (
    CLIENTS,
    TRAINING,
    WITH_ROUNDS,
    MakeClient,
    Train,
    client_update,
)


def test_every_file_is_a_method_by_its_name() -> None:
    folder = Path(strategies.__path__[0])
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "catalogue"}
    names = {"protonn": "knn_per_protonn", "knn": "knn_per"}
    on_top = {names.get(name, name) for name in PERSONALIZERS} - {AS_IT_IS}
    assert METHODS.keys() | on_top == files
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
def test_a_round_moves_the_model(name: str, train: Train) -> None:
    run = train(name)
    assert run.method.num_rounds == TRAINING.num_rounds
    assert fingerprint(run.state) != fingerprint(run.before)
    for client, update in run.updates:
        assert isinstance(update, Update)
        assert update.num_examples == len(run.data[client].train)
        assert math.isfinite(update.train_loss)
        assert update.train_loss > 0


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_a_round_is_deterministic(name: str, train: Train) -> None:
    first, second = train(name), train(name)
    assert fingerprint(first.state) == fingerprint(second.state)
    for client in CLIENTS:
        assert fingerprint(first.memory[client]) == fingerprint(second.memory[client])


@pytest.mark.parametrize("name", METHODS)
def test_records_survive_the_codec(name: str, train: Train) -> None:
    run, method = train(name), train(name).method
    pairs: list[tuple[type[Record], Any]] = [
        (method.state_type, run.before),
        (method.state_type, run.state),
    ]
    for client in (*CLIENTS, UNSEEN_CLIENT):
        payload = method.broadcast(run.state, client, RandomKey(2))
        pairs.append((method.payload_type, payload))
    pairs += [(method.update_type, update) for _, update in run.updates]
    pairs += [(method.client_state_type, memory) for memory in run.memory.values()]
    for record_type, record in pairs:
        assert type(record) is record_type
        copied = put_together(record_type, take_apart(record))
        assert fingerprint(copied) == fingerprint(record)


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_no_argument_of_a_round_is_changed(name: str, train: Train) -> None:
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
    name: str, train: Train
) -> None:
    run = train(name)
    again = client_update(run.method, run.before, "a", run.data["a"])
    assert fingerprint(again[1]) == fingerprint(run.updates[0][1])
    assert fingerprint(again[0]) == fingerprint(run.memory["a"])


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_the_order_of_the_clients_does_not_matter(name: str, train: Train) -> None:
    run = train(name)
    reverse = run.method.aggregate(run.before, iter(run.updates[::-1]))
    expected, found = take_apart(run.state).tensors, take_apart(reverse).tensors
    assert expected.keys() == found.keys()
    for path, tensor in expected.items():
        torch.testing.assert_close(found[path], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("known_as", ["a", UNSEEN_CLIENT])
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
    train: Train,
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
def test_no_queries_give_no_rows(name: str, train: Train) -> None:
    run = train(name)
    payload = run.method.broadcast(run.state, "a", RandomKey(2))
    predictor = run.method.personalize(
        payload, run.memory.get("a"), run.data["a"], RandomKey(3)
    )
    assert predictor(run.data["a"].train.images[:0]).shape == (0, 3)
    assert all(isinstance(value, float) for value in predictor.describe().values())


@pytest.mark.parametrize("name", METHODS)
def test_without_data_everyone_is_served_the_unpersonalised_model(
    name: str, train: Train, noisy: MakeClient
) -> None:
    run, queries = train(name), noisy(5, 0, seed=10).train.images
    nothing = noisy(0, 0, seed=9)
    payload = run.method.broadcast(run.state, UNSEEN_CLIENT, RandomKey(2))
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


TOGETHER = [
    name
    for name in METHODS
    if METHODS[name].personalizes_by_inference
    and not PERSONALIZERS[METHODS[name].personalization].trains
]


@pytest.mark.parametrize("name", TOGETHER)
def test_clients_that_are_personalised_together_are_sent_the_same(
    name: str, train: Train
) -> None:
    run = train(name)
    payloads = {
        fingerprint(run.method.broadcast(run.state, client, RandomKey(2).child(client)))
        for client in (*CLIENTS, UNSEEN_CLIENT)
    }
    assert len(payloads) == 1


@pytest.mark.parametrize("name", TOGETHER)
def test_together_clients_are_served_what_they_would_be_alone(
    name: str, train: Train, noisy: MakeClient
) -> None:
    run = train(name)
    payload = run.method.broadcast(run.state, "a", RandomKey(2))
    tests = {client: noisy(5, 0, seed=20).train.images for client in CLIENTS}

    def served(client: str) -> torch.Tensor:
        data, memory = run.data[client], run.memory.get(client)
        return run.method.personalize(payload, memory, data, RandomKey(3))(
            tests[client]
        )

    alone = [served(client) for client in CLIENTS]
    calls = count_embeddings(run.task)
    models = list(take_apart(payload).tensors.values())
    learnt = [run.data[client].train.images for client in CLIENTS]
    held_out = [run.data[client].validation.images for client in CLIENTS]
    with run.task.pool.holding(models, [*learnt, *held_out, *tests.values()]):
        together = [served(client) for client in CLIENTS]
        num_calls = len(calls)
        again = [served(client) for client in CLIENTS]
    assert len(calls) == num_calls
    # In every bit: the batches are the same, each computed once.
    assert all(map(torch.equal, together, alone))
    assert all(map(torch.equal, again, alone))


@pytest.mark.parametrize(
    ("name", "field", "wrong"),
    [
        ("bulyan", "num_malicious", -1),
        ("fedadagrad", "server_learning_rate", 0),
        ("fedadagrad", "adaptivity", -1),
        ("fedadam", "server_learning_rate", 0),
        ("fedadam", "first_moment_decay", 1.0),
        ("fedadam", "second_moment_decay", 1.0),
        ("fedadam", "adaptivity", 0),
        ("fedavgm", "server_learning_rate", 0),
        ("fedavgm", "server_momentum", 1.0),
        ("fedtrimmedavg", "trimmed_fraction", 0.5),
        ("fedyogi", "server_learning_rate", -0.1),
        ("fedyogi", "first_moment_decay", 1.5),
        ("fedyogi", "second_moment_decay", -0.1),
        ("fedyogi", "adaptivity", 0),
        ("krum", "num_malicious", -1),
        ("multikrum", "num_malicious", -1),
        ("multikrum", "num_selected", 0),
        ("qfedavg", "fairness", -1),
        ("qfedavg", "lipschitz_constant", 0),
    ],
)
def test_settings_have_ranges(name: str, field: str, wrong: float) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(METHODS[name].settings_type).validate_json(
            f'{{"{field}": {wrong}}}'
        )
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]

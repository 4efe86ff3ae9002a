"""What a client does, with a method of functions."""

import contextlib
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor

from knnper.client.client_app import make_client_app
from knnper.client.runtime import ClientRuntime, TrainingRequest
from knnper.client.state_store import ClientStateStore
from knnper.data.examples import ClientData, Examples, InputSpec
from knnper.errors import CodecError, TrainingDivergedError
from knnper.records import unflatten
from knnper.seeding import RandomKey
from knnper.strategies.core.embedding_pool import EmbeddingPool
from knnper.strategies.core.method import Method
from knnper.strategies.core.records import ModelPayload, ModelState, ModelUpdate
from knnper.transport.messages import (
    FAILURES,
    IN_MESSAGE,
    TOGETHER,
    Carrier,
    Job,
    Purpose,
    pack,
    packed_of,
    reply_name,
    to_content,
    unpack,
    unpack_together,
)

SPEC = InputSpec((2, 2, 1), 2, (0.5,), (0.5,))


def examples(labels: list[int]) -> Examples:
    images = torch.zeros((len(labels), 2, 2, 1), dtype=torch.uint8)
    return Examples(images, torch.tensor(labels, dtype=torch.int64))


class Source:
    """One client: two zeros to train, a one to validate, two ones to test."""

    def __init__(self) -> None:
        self.num_test_reads = 0

    def data(self, client: str) -> ClientData:
        return ClientData(examples([0, 0]), examples([1]))

    def test(self, client: str) -> Examples:
        self.num_test_reads += 1
        return examples([1, 1])

    def test_names(self, client: str) -> list[str]:
        return ["a", "b"]

    def class_weights(self, client: str) -> Tensor | None:
        return None

    def is_seen(self, client: str) -> bool:
        return client == "seen"


@dataclass(frozen=True)
class Always:
    """Predicts one class, of batches whose sizes it notes."""

    label: int
    sizes: list[int]

    def __call__(self, images: Tensor) -> Tensor:
        self.sizes.append(len(images))
        return torch.eye(2)[[self.label] * len(images)]

    def describe(self) -> Mapping[str, float]:
        return {"label": float(self.label)}


class Counting(Method):
    """Each visit adds one to what the client remembers and to what it is sent."""

    client_state_type = ModelState

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def client_update(
        self,
        payload: ModelPayload,
        state: ModelState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[ModelState, ModelUpdate]:
        before = torch.zeros(1) if state is None else state.weights
        update = ModelUpdate(payload.weights + 1, len(data.train), 0.0)
        return ModelState(before + 1), update

    def personalize(
        self,
        payload: ModelPayload,
        state: ModelState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> Always:
        return Always(1 if len(data.train) else 0, self.sizes)


def runtime(
    folder: Path, sizes: list[int] | None = None
) -> tuple[ClientRuntime, Source, ClientStateStore]:
    method = Counting([] if sizes is None else sizes)
    source, states = Source(), ClientStateStore(folder)
    client_runtime = ClientRuntime(
        method, SPEC, source, states, RandomKey(0), EmbeddingPool()
    )
    return client_runtime, source, states


def state(value: float) -> ModelState:
    return ModelState(torch.full((2,), float(value)))


def value_of(states: ClientStateStore, client: str, after_round: int) -> float | None:
    state = states.load(ModelState, client, after_round)
    return None if state is None else float(state.weights[0])


def test_a_client_remembers_between_rounds(tmp_path: Path) -> None:
    client, source, states = runtime(tmp_path)
    for server_round in (1, 2):
        payload = ModelPayload(torch.ones(1))
        update = client.train(
            TrainingRequest("seen", payload, server_round, server_round - 1, [0])
        )
        assert update.weights.tolist() == [2.0]
    assert [value_of(states, "seen", r) for r in (0, 1, 2)] == [None, 1.0, 2.0]
    assert source.num_test_reads == 0


def test_a_diverged_round_is_not_remembered(tmp_path: Path) -> None:
    client, _, states = runtime(tmp_path)
    client.train(TrainingRequest("seen", ModelPayload(torch.ones(1)), 1, 0, [0]))
    diverging = ModelPayload(torch.tensor([torch.inf]))
    with pytest.raises(TrainingDivergedError, match="weights of the client's update"):
        client.train(TrainingRequest("seen", diverging, 2, 1, [0]))
    assert value_of(states, "seen", 2) == 1.0


def test_the_test_split_is_read_once(tmp_path: Path) -> None:
    client, source, _ = runtime(tmp_path)
    payload = ModelPayload(torch.ones(1))
    (result,) = client.personalize(["seen"], payload, payload, [2]).results
    assert source.num_test_reads == 1
    evaluations = (result.personal, result.reference, result.validation)
    assert [evaluation.accuracy for evaluation in evaluations] == [1.0, 0.0, 0.0]
    assert (result.seen, result.num_train, result.num_validation) == (True, 2, 1)
    assert result.chosen == {"label": 1.0}


def test_validation_uses_the_unpersonalised_model(tmp_path: Path) -> None:
    sizes: list[int] = []
    client, source, _ = runtime(tmp_path, sizes)
    validated = client.validate(["unseen", "seen"], ModelPayload(torch.ones(1)))
    assert (validated.reference.num_examples, validated.reference.num_correct) == (2, 0)
    assert validated.num_personal == 0
    assert sizes == [1, 1], "a batch has rows of one client"
    assert source.num_test_reads == 0


class Remembering(Method):
    """Serves every class that the validation split has, and nothing else."""

    client_state_type = ModelState

    def __init__(self) -> None:
        self.given: list[tuple[list[int], float | None]] = []

    def personalize(
        self,
        payload: ModelPayload,
        state: ModelState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> Any:
        labels = data.validation.labels.tolist()
        if payload.weights.sum() < 0 and labels:
            raise TrainingDivergedError("too fast")
        self.given.append((labels, None if state is None else float(state.weights[0])))
        return Always(0 if labels.count(0) > labels.count(1) else 1, [])


class Halves(Source):
    """Clients with as many validation examples as their names say."""

    def data(self, client: str) -> ClientData:
        return ClientData(examples([0, 0]), examples([*map(int, client)]))


def test_a_personalised_model_is_asked_what_nothing_was_chosen_on(
    tmp_path: Path,
) -> None:
    method, states = Remembering(), ClientStateStore(tmp_path)
    arguments = (method, SPEC, Halves(), states, RandomKey(0), EmbeddingPool())
    client, payload = ClientRuntime(*arguments), ModelPayload(torch.ones(1))
    states.save("00101", 4, state(7.0), [0])
    before = [path.read_bytes() for path in tmp_path.glob("*.sqlite")]
    clients = ["00101", "1", ""]
    validated = client.validate(
        clients, payload, ModelPayload(torch.zeros(1)), 5, [4, 0, 0]
    )
    # The unpersonalised model first; then 0, 1, 1 is told and 0, 0 asked, and so on.
    assert method.given == [
        ([], None),
        *(([0, 1, 1], 7.0), ([0, 0], 7.0)),
        ([], None),
    ]
    # 1 is wrong on 0, 0; 0 is right on one of 0, 1, 1; without any it is 1.
    assert (validated.num_personal, validated.num_personal_correct) == (6, 0 + 1 + 1)
    assert (validated.reference.num_examples, validated.failures) == (6, {})
    assert [path.read_bytes() for path in tmp_path.glob("*.sqlite")] == before
    fast = ModelPayload(-torch.ones(1))
    failing = client.validate(["0011", "1"], fast, payload, 5, [0, 0])
    assert failing.failures == {"0011": "too fast"}
    assert (failing.num_personal, failing.num_personal_correct) == (1, 1)
    assert failing.reference.num_examples == 5


@dataclass(frozen=True)
class Behind:
    """A node with a runtime."""

    runtime: ClientRuntime

    def open(self, context: Context, job: Job) -> ClientRuntime:
        return self.runtime

    def carrier(self, context: Context, job: Job) -> Carrier:
        return IN_MESSAGE

    def answered(self, message: Message, context: Context) -> None:
        pass

    def failed(self, message: Message, context: Context, error: Exception) -> Message:
        raise error


def trained(worker: ClientRuntime, clients: list[str], rounds: list[int]) -> RecordDict:
    """Return what a node answers that is to train these clients in round 2."""
    app = make_client_app(lambda _: Behind(worker))  # type: ignore[arg-type,return-value]
    job = Job(clients, 2, [1], "{}", state_rounds=rounds)
    content = to_content(job, {"payload": pack(ModelPayload(torch.ones(2)))})
    context = Context(1, 1, {}, RecordDict(), {})
    message = Message(content, dst_node_id=1, message_type=Purpose.TRAIN.value)
    return app(message, context).content


@pytest.mark.usefixtures("inside_a_run")
def test_clients_of_one_task_are_trained_as_if_alone(tmp_path: Path) -> None:
    together, _, states = runtime(tmp_path / "together")
    alone, _, states_alone = runtime(tmp_path / "alone")
    for store in (states, states_alone):
        for client, value in (("a", 1), ("b", 5), ("c", 7)):
            store.save(client, 1, state(value), [1])
    # The state of b is damaged: that is its own failure, and nobody else's.
    for folder in (tmp_path / "together", tmp_path / "alone"):
        for path in folder.glob("*.sqlite"):
            with contextlib.closing(sqlite3.connect(path)) as connection:
                damage = "UPDATE states SET state = x'00' WHERE client = 'b'"
                connection.execute(damage)
                connection.commit()
    content = trained(together, ["a", "b", "c"], [1, 1, 0])
    assert list(content.config_records[FAILURES]) == ["1"]
    assert "the state of client 'b'" in str(content.config_records[FAILURES]["1"])
    sent = packed_of(content, TOGETHER)
    assert sent is not None
    unpacked = unpack_together(sent, IN_MESSAGE)
    assert list(unpacked) == [0, 2]
    for number, client, after in ((0, "a", 1), (2, "c", 0)):
        expected = packed_of(trained(alone, [client], [after]), reply_name(0))
        assert expected is not None
        update = unflatten(ModelUpdate, unpacked[number])
        other = unpack(ModelUpdate, expected)
        assert update.num_examples == other.num_examples
        assert torch.equal(update.weights, other.weights)
        assert value_of(states, client, 2) == value_of(states_alone, client, 2)


@pytest.mark.usefixtures("inside_a_run")
@pytest.mark.parametrize(
    ("clients", "rounds"), [(["a", "a"], [1, 1]), (["a", "b"], [1]), ([], [])]
)
def test_a_task_names_different_clients_with_the_round_of_each(
    tmp_path: Path, clients: list[str], rounds: list[int]
) -> None:
    with pytest.raises(CodecError, match="different clients"):
        trained(runtime(tmp_path)[0], clients, rounds)

"""What a client does when it is asked: the same code in every engine."""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor

from knnper.client.state_store import ClientStateStore
from knnper.data.examples import ClientData, Examples, InputSpec, no_examples
from knnper.errors import (
    CodecError,
    KnnPerError,
    OwnCodeError,
    printable,
)
from knnper.metrics import Compute
from knnper.own import explained
from knnper.predictions import Predictions
from knnper.records import Flat, flatten, tensors_of
from knnper.seeding import RandomKey
from knnper.strategies.core import task
from knnper.strategies.core.compression import CompressedUpdate
from knnper.strategies.core.method import Method
from knnper.strategies.core.records import NoState, require_finite
from knnper.transport.messages import (
    FAILURES,
    LEAST_IN_FILE,
    TOGETHER,
    CannotRunError,
    Carrier,
    CarrierError,
    Job,
    Packed,
    Purpose,
    has_job,
    job_of,
    pack,
    pack_flat,
    pack_together,
    packed_of,
    reply_name,
    to_content,
    unpack_shared,
)

if TYPE_CHECKING:
    from knnper.client.site import SiteWorker

R = TypeVar("R")


class DataSource(Protocol):
    """Where a client's data comes from."""

    def data(self, client: str) -> ClientData:
        """Return what ``client`` learns from."""

    def test(self, client: str) -> Examples:
        """Return the test split of ``client``; read once, by the evaluation."""

    def test_names(self, client: str) -> Sequence[str] | NDArray[np.int64]:
        """Return what the test examples of ``client`` are called, or their indices."""

    def class_weights(self, client: str) -> Tensor | None:
        """Return what a test example of each label counts, float64 (c,)."""

    def is_seen(self, client: str) -> bool:
        """Return whether ``client`` may take part in training."""


@dataclass(frozen=True)
class Personalized:
    """A client that has been handed the model."""

    reference: Any
    predictor: task.Predictor
    seen: bool


@dataclass(frozen=True)
class Served:
    """What a client that serves somebody, and so has read its test split, makes of it.

    Probabilities, float32 of shape (n, c).
    """

    personal: Tensor
    reference: Tensor
    chosen: Mapping[str, float]


@dataclass(frozen=True)
class ClientRuntime:
    """A method, bound to the data and the memory of the clients of this process."""

    method: Method
    spec: InputSpec
    source: DataSource
    states: ClientStateStore
    key: RandomKey  # the experiment's root key
    pool: task.EmbeddingPool  # where the method's task looks for embeddings first
    # Is given each client that has the model. Returns what is served from then on makes
    # of the test split; None where the predictor is to be tested.
    keep: Callable[[Personalized], Served | None] = lambda _: None
    metrics: Mapping[str, Compute] = field(default_factory=dict)  # of the test split
    predictions: Predictions | None = None  # where those of the test split are kept
    # Makes the text of a client's failure, which is sent to the server.
    explain: Callable[[KnnPerError], str] = str

    @explained()
    def train(
        self,
        client: str,
        payload: object,
        server_round: int,
        state_round: int,
        keep_rounds: Sequence[int],
        counted_round: int = 0,
    ) -> Any:
        """Train in one round; return the method's update.

        ``counted_round``: In which it counts, if that is a later one.
        """
        state, update = self.method.client_update(
            payload,
            self._state(client, state_round),
            self.source.data(client),
            server_round,
            self.key.child("client_update", server_round, client),
        )
        # The bytes of a code are no numbers; it was made of finite ones.
        if not isinstance(update, CompressedUpdate):
            require_finite("update", update)
        require_finite("state", state)
        if not isinstance(state, NoState):
            named = counted_round or server_round
            self.states.save(client, named, state, keep_rounds)
        return update

    @explained()
    def validate(
        self,
        clients: Sequence[str],
        payload: object,
        reference: object | None = None,
        server_round: int = 0,
        state_rounds: Sequence[int] = (),
    ) -> task.Validation:
        """Evaluate on all the clients' validation splits; no state changes.

        Without ``reference`` the payload is that of the unpersonalised model, which
        alone is evaluated.
        """
        model = self._unpersonalised(payload if reference is None else reference)
        data = {client: self.source.data(client) for client in clients}
        held_out = [one.validation for one in data.values()]
        # Each client's by themselves, as at a site: bits depend on the batch.
        probabilities = torch.cat([model(examples.images) for examples in held_out])
        labels = torch.cat([one.labels for one in held_out])
        found = task.score(probabilities, labels)
        if reference is None:
            return task.Validation(found)
        rounds = dict(zip(clients, state_rounds, strict=True))
        halves = {client: _halves(one.validation) for client, one in data.items()}
        failures: dict[str, str] = {}

        def num_correct(client: str) -> int:
            state, correct = self._state(client, rounds[client]), 0
            pairs = zip(halves[client], reversed(halves[client]), strict=True)
            # Each half is predicted by what is chosen on the other one.
            for number, (chosen_on, asked) in enumerate(pairs):
                own = ClientData(data[client].train, chosen_on)
                rng = self.key.child("validate", server_round, client, number)
                if len(asked) > 0:
                    served = self.method.personalize(payload, state, own, rng)
                    correct += task.evaluate(served, asked).num_correct
            return correct

        trained_on = [one.train for one in data.values()]
        splits = [*trained_on, *itertools.chain.from_iterable(halves.values())]
        with self._embedding_once((payload, reference), splits, keep=False):
            right = _for_each(clients, num_correct, failures, self.explain)
        total = sum(len(data[client].validation) for client in right)
        return task.Validation(found, total, sum(right.values()), failures)

    @explained()
    def personalize(
        self,
        clients: Sequence[str],
        payload: object,
        reference: object,
        state_rounds: Sequence[int],
    ) -> task.ClientResults:
        """Personalise, then read the test splits: once, and only here."""
        # Every client's figures are, in every bit, what they would be alone.
        failures: dict[str, str] = {}
        rounds = dict(zip(clients, state_rounds, strict=True))
        records = (payload, reference)
        unpersonalised = self._unpersonalised(reference)
        data = {client: self.source.data(client) for client in clients}

        def prepare(client: str) -> tuple[task.Predictor, task.Evaluation]:
            state = self._state(client, rounds[client])
            rng = self.key.child("personalize", client)
            predictor = self.method.personalize(payload, state, data[client], rng)
            return predictor, task.evaluate(unpersonalised, data[client].validation)

        splits = [
            split for one in data.values() for split in (one.train, one.validation)
        ]
        with self._embedding_once(records, splits):
            prepared = _for_each(clients, prepare, failures, self.explain)
        # Not before all predictors are made: no method can come across a test split.
        tests = {client: self.source.test(client) for client in prepared}

        def report(client: str) -> task.ClientResult:
            own, seen = data[client], self.source.is_seen(client)
            predictor, validation = prepared[client]
            test, weights = tests[client], self.source.class_weights(client)
            served = self.keep(Personalized(reference, predictor, seen)) or Served(
                task.predict(predictor, test),
                task.predict(unpersonalised, test),
                predictor.describe(),
            )
            if self.predictions is not None:
                names = self.source.test_names(client)
                found = served.personal, served.reference
                self.predictions.write(client, seen, names, test.labels, *found)
            personal, of_reference = (
                task.score(one, test.labels, weights, self.metrics)
                for one in (served.personal, served.reference)
            )
            return task.ClientResult(
                client=client,
                seen=seen,
                num_train=len(own.train),
                num_validation=len(own.validation),
                personal=personal,
                reference=of_reference,
                validation=validation,
                chosen=dict(served.chosen),
            )

        with self._embedding_once(records, list(tests.values())):
            results = _for_each(list(prepared), report, failures, self.explain)
        return task.ClientResults(tuple(results.values()), failures)

    def _embedding_once(
        self,
        records: Sequence[object],
        splits: Sequence[Examples],
        *,
        keep: bool = True,
    ) -> contextlib.AbstractContextManager[None]:
        """Hold the images that predictors will embed with the records' models."""
        if not self.method.personalizes_by_inference:
            return contextlib.nullcontext()
        parts = [tensors_of(record).values() for record in records]
        models = list(itertools.chain.from_iterable(parts))
        images = [split.images for split in splits]
        return self.pool.holding(models, images, keep=keep)

    def _state(self, client: str, after_round: int) -> Any:
        state_type = self.method.client_state_type
        if state_type is NoState:
            return None
        return self.states.load(state_type, client, after_round)

    def _unpersonalised(self, reference: object) -> task.Predictor:
        nothing = ClientData(no_examples(self.spec), no_examples(self.spec))
        return self.method.personalize(
            reference, None, nothing, self.key.child("reference")
        )


def _for_each(
    clients: Sequence[str],
    function: Callable[[str], R],
    failures: dict[str, str],
    explain: Callable[[KnnPerError], str] = str,
) -> dict[str, R]:
    """Return the function's value by client; note in ``failures`` why there is none."""
    done = {}
    for client in clients:
        try:
            done[client] = function(client)
        except OwnCodeError:
            raise
        except KnnPerError as error:
            failures[client] = explain(error)
    return done


def _halves(examples: Examples) -> tuple[Examples, Examples]:
    """Return every other example: files may lie sorted by class."""
    positions = torch.arange(len(examples))
    return examples.take(positions[::2]), examples.take(positions[1::2])


Worker: TypeAlias = "ClientRuntime | SiteWorker"


class Node(Protocol):
    """What is behind a node: the place where data comes from."""

    def open(self, context: Context, job: Job) -> Worker:
        """Return who runs the clients of a job."""

    def carrier(self, context: Context, job: Job) -> Carrier:
        """Return how numbers of a job may travel."""
        # A server could name any file or folder of this machine.

    def introduce(self, context: Context, job: Job | None) -> RecordDict:
        """Return what the node answers when it is asked who it is."""

    def refused(self, context: Context, reason: str) -> None:
        """Take note that the server does not let this node take part."""

    def failed(self, message: Message, context: Context, error: Exception) -> Message:
        """Return the reply to a message that could not be answered, or raise it."""


_Answer: TypeAlias = Callable[[Node, Message, Context], Message]


def make_client_app(node_of: Callable[[Context], Node]) -> ClientApp:
    """Return the ClientApp of nodes that are found by their context."""
    app = ClientApp()

    answering = _answering(node_of)

    @app.train()
    @answering
    def train(node: Node, message: Message, context: Context) -> Message:
        job, worker, carrier = _opened(node, message, context)
        payload = _record(message, "payload", worker.method.payload_type, carrier)
        return Message(_trained(worker, job, payload, carrier), reply_to=message)

    @app.evaluate(Purpose.VALIDATE.action)
    @answering
    def validate(node: Node, message: Message, context: Context) -> Message:
        job, worker, carrier = _opened(node, message, context)
        kind, content = worker.method.payload_type, message.content
        payload, reference = _record(message, "payload", kind, carrier), None
        if packed_of(content, "reference") is not None:
            reference = _record(message, "reference", kind, carrier)
        found = worker.validate(
            job.clients, payload, reference, job.server_round, job.state_rounds
        )
        return _reply(message, found, carrier)

    @app.evaluate(Purpose.PERSONALIZE.action)
    @answering
    def personalize(node: Node, message: Message, context: Context) -> Message:
        job, worker, carrier = _opened(node, message, context)
        payload, reference = (
            _record(message, name, worker.method.payload_type, carrier)
            for name in ("payload", "reference")
        )
        result = worker.personalize(job.clients, payload, reference, job.state_rounds)
        return _reply(message, result, carrier)

    @app.query()
    @answering
    def who_are_you(node: Node, message: Message, context: Context) -> Message:
        job = job_of(message.content) if has_job(message.content) else None
        return Message(node.introduce(context, job), reply_to=message)

    @app.query(Purpose.REFUSE.action)
    @answering
    def refused(node: Node, message: Message, context: Context) -> Message:
        reason = message.content.config_records["refusal"]["reason"]
        node.refused(context, printable(str(reason)))
        return Message(RecordDict(), reply_to=message)

    return app


def _answering(
    node_of: Callable[[Context], Node],
) -> Callable[[_Answer], Callable[[Message, Context], Message]]:
    """Return a decorator that lets no exception of an answer past its node."""

    def decorated(answer: _Answer) -> Callable[[Message, Context], Message]:
        def answered(message: Message, context: Context) -> Message:
            node = node_of(context)
            # Flower sends the text of an exception to the server.
            try:
                return answer(node, message, context)
            except Exception as error:  # noqa: BLE001 (of the user's code, too)
                return node.failed(message, context, error)

        return answered

    return decorated


def _opened(
    node: Node, message: Message, context: Context
) -> tuple[Job, Worker, Carrier]:
    job = job_of(message.content)
    return job, node.open(context, job), node.carrier(context, job)


def _record(message: Message, name: str, record_type: type, carrier: Carrier) -> object:
    packed = packed_of(message.content, name)
    if packed is None:
        raise CodecError(
            f"the request has no {name!r}; the server is of another version"
        )
    try:
        return unpack_shared(record_type, packed, carrier)
    except CarrierError as error:
        raise CannotRunError(str(error)) from error


def _reply(message: Message, record: object, carrier: Carrier) -> Message:
    content = to_content(None, {reply_name(0): pack(record, carrier)})
    return Message(content, reply_to=message)


def _trained(worker: Worker, job: Job, payload: object, carrier: Carrier) -> RecordDict:
    """Train the clients of a task; return what each replies, or why it does not."""
    if not len(set(job.clients)) == len(job.clients) == len(job.state_rounds) > 0:
        raise CodecError(
            "expected different clients to train and a round of the state of each, "
            f"found {len(job.clients)} and {len(job.state_rounds)}; the server's "
            "version may not fit this client's"
        )
    numbers = {client: number for number, client in enumerate(job.clients)}

    small: dict[int, Flat] = {}
    packed: dict[str, Packed] = {}

    def train(client: str) -> None:
        number = numbers[client]
        update = flatten(
            worker.train(
                client,
                payload,
                job.server_round,
                job.state_rounds[number],
                job.keep_rounds,
                job.counted_round,
            )
        )
        if len(numbers) > 1 and update.vector.nbytes < LEAST_IN_FILE:
            # Copied: the next client may be trained in the same memory.
            small[number] = replace(update, vector=update.vector.clone())
        else:
            packed[reply_name(number)] = pack_flat(update, carrier)

    if len(numbers) == 1:  # a failure is then the message's, as at a site
        train(*numbers)
        return to_content(None, packed)
    failures: dict[str, str] = {}
    _for_each(job.clients, train, failures)
    if small:
        packed[TOGETHER] = pack_together(small, carrier)
    content = to_content(None, packed)
    why = {str(numbers[client]): reason for client, reason in failures.items()}
    content[FAILURES] = ConfigRecord(dict(why))
    return content

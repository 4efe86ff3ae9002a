"""The Flower ClientApp: decodes requests, runs the clients, encodes their replies."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeAlias, TypeVar

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from knnper.client.runtime import ClientRuntime, TrainingRequest, call_for_each
from knnper.errors import CodecError, printable
from knnper.records import Flat, flatten
from knnper.secure.messages import MaskRequest, SecureReply, SecureRequest
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

R = TypeVar("R")


class Node(Protocol):
    """A Flower node: virtual clients of a simulation, or one site."""

    def open(self, context: Context, job: Job) -> ClientRuntime:
        """Return the runtime of the clients of ``job``."""

    def exchange_secrets(
        self, context: Context, job: Job, request: SecureRequest
    ) -> SecureReply:
        """Reply to a stage of secure aggregation without an update."""

    def carrier(self, context: Context, job: Job) -> Carrier:
        """Return the carrier by which vectors of ``job`` travel.

        A job may come from another machine, so its folder is not to be trusted: it
        could name any file here.
        """

    def introduce(self, context: Context, job: Job | None) -> RecordDict:
        """Return the node's answer to an introduction query."""

    def refused(self, context: Context, reason: str) -> None:
        """Handle that the server does not let this node take part."""

    def answered(self, message: Message, context: Context) -> None:
        """Handle that a message was answered, before the reply leaves."""

    def failed(self, message: Message, context: Context, error: Exception) -> Message:
        """Return the reply to a message that raised ``error``, or raise it."""


Handler: TypeAlias = Callable[[Node, Message, Context], Message]


def make_client_app(node_of: Callable[[Context], Node]) -> ClientApp:
    """Build the ClientApp of the nodes that ``node_of`` finds by a context."""
    app = ClientApp()

    def answering(handler: Handler) -> Callable[[Message, Context], Message]:
        """Pass any exception to the node: Flower would send its text to the server."""

        def answer(message: Message, context: Context) -> Message:
            node = node_of(context)
            try:
                reply = handler(node, message, context)
                node.answered(message, context)
            except Exception as error:  # noqa: BLE001 (the user's own code may raise any)
                return node.failed(message, context, error)
            return reply

        return answer

    @app.train()
    @answering
    def train(node: Node, message: Message, context: Context) -> Message:
        job = job_of(message.content)
        runtime = node.open(context, job)
        carrier = node.carrier(context, job)
        payload = _record(message, "payload", runtime.method.payload_type, carrier)
        masking = _optional_record(message, "masking", MaskRequest, carrier)
        content = _train_clients(runtime, job, payload, carrier, masking)
        return Message(content, reply_to=message)

    @app.evaluate(Purpose.VALIDATE.action)
    @answering
    def validate(node: Node, message: Message, context: Context) -> Message:
        job = job_of(message.content)
        runtime = node.open(context, job)
        carrier = node.carrier(context, job)
        payload_type = runtime.method.payload_type
        payload = _record(message, "payload", payload_type, carrier)
        reference = _optional_record(message, "reference", payload_type, carrier)
        validation = runtime.validate(
            job.clients, payload, reference, job.server_round, job.state_rounds
        )
        return _reply(message, validation, carrier)

    @app.evaluate(Purpose.PERSONALIZE.action)
    @answering
    def personalize(node: Node, message: Message, context: Context) -> Message:
        job = job_of(message.content)
        runtime = node.open(context, job)
        carrier = node.carrier(context, job)
        payload_type = runtime.method.payload_type
        payload = _record(message, "payload", payload_type, carrier)
        reference = _record(message, "reference", payload_type, carrier)
        results = runtime.personalize(job.clients, payload, reference, job.state_rounds)
        return _reply(message, results, carrier)

    @app.query()
    @answering
    def introduce(node: Node, message: Message, context: Context) -> Message:
        job = job_of(message.content) if has_job(message.content) else None
        return Message(node.introduce(context, job), reply_to=message)

    @app.query(Purpose.SECURE.action)
    @answering
    def exchange_secrets(node: Node, message: Message, context: Context) -> Message:
        job = job_of(message.content)
        carrier = node.carrier(context, job)
        request = _record(message, "payload", SecureRequest, carrier)
        return _reply(message, node.exchange_secrets(context, job, request), carrier)

    @app.query(Purpose.REFUSE.action)
    @answering
    def refused(node: Node, message: Message, context: Context) -> Message:
        reason = message.content.config_records["refusal"]["reason"]
        node.refused(context, printable(str(reason)))
        return Message(RecordDict(), reply_to=message)

    return app


def _optional_record(
    message: Message, name: str, record_type: type[R], carrier: Carrier
) -> R | None:
    is_missing = packed_of(message.content, name) is None
    return None if is_missing else _record(message, name, record_type, carrier)


def _record(message: Message, name: str, record_type: type[R], carrier: Carrier) -> R:
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


def _train_clients(
    runtime: ClientRuntime,
    job: Job,
    payload: object,
    carrier: Carrier,
    masking: MaskRequest | None,
) -> RecordDict:
    """Train the clients of a task; return their updates and the failures' reasons.

    The failure of an only client is raised.
    """
    if not len(set(job.clients)) == len(job.clients) == len(job.state_rounds) > 0:
        raise CodecError(
            "expected different clients to train and a round of the state of each, "
            f"found {len(job.clients)} and {len(job.state_rounds)}; the server's "
            "version may not fit this client's"
        )
    numbers = {client: number for number, client in enumerate(job.clients)}
    small_updates: dict[int, Flat] = {}
    packed: dict[str, Packed] = {}

    def train(client: str) -> None:
        number = numbers[client]
        update = flatten(
            runtime.train(
                TrainingRequest(
                    client,
                    payload,
                    job.server_round,
                    job.state_rounds[number],
                    job.keep_rounds,
                    job.counted_round,
                    masking,
                )
            )
        )
        if len(numbers) > 1 and update.vector.nbytes < LEAST_IN_FILE:
            # Copied: the next client may be trained in the same memory.
            small_updates[number] = replace(update, vector=update.vector.clone())
        else:
            packed[reply_name(number)] = pack_flat(update, carrier)

    if len(numbers) == 1:  # its failure is that of the whole message, as at a site
        train(*numbers)
        return to_content(None, packed)
    failures: dict[str, str] = {}
    call_for_each(job.clients, train, failures)
    if small_updates:
        packed[TOGETHER] = pack_together(small_updates, carrier)
    content = to_content(None, packed)
    content[FAILURES] = ConfigRecord(
        {str(numbers[client]): reason for client, reason in failures.items()}
    )
    return content

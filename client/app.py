"""The Flower ClientApp: messages in, whoever runs the clients, messages out."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from knnper.errors import CodecError, KnnPerError, RefusedError, printable
from knnper.transport.messages import (
    CannotPlayError,
    CarrierError,
    Job,
    Purpose,
    has_job,
    job_of,
    pack,
    packed_of,
    to_content,
    unpack_shared,
)

if TYPE_CHECKING:
    from knnper.client.runtime import ClientRuntime
    from knnper.client.site import SiteWorker


Worker: TypeAlias = "ClientRuntime | SiteWorker"


class Node(Protocol):
    """What is behind a node: the place where data comes from."""

    def open(self, context: Context, job: Job) -> Worker:
        """Return who runs the clients of a job."""

    def carrier_folder(self, context: Context, job: Job) -> Path | None:
        """Return where numbers of a job may be files; None if they may be nowhere."""
        # A server could name any other file or folder of this machine.

    def introduce(self, context: Context, job: Job | None) -> RecordDict:
        """Return what the node answers when it is asked who it is."""

    def refused(self, context: Context, reason: str) -> None:
        """Take note that the server does not let this node take part."""


def make_client_app(node_of: Callable[[Context], Node]) -> ClientApp:
    """Return the ClientApp of nodes that are found by their context."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        job, worker, folder = _opened(node_of(context), message, context)
        payload = _record(message, "payload", worker.method.payload_type, folder)
        if (len(job.clients), len(job.state_rounds)) != (1, 1):
            raise CodecError(
                "expected one client to train and one round of its state, found "
                f"{len(job.clients)} and {len(job.state_rounds)}; the server's version "
                "may not fit this client's"
            )
        (client,), (state_round,) = job.clients, job.state_rounds
        update = worker.train(
            client, payload, job.server_round, state_round, job.keep_rounds
        )
        return _reply(message, update, folder)

    @app.evaluate(Purpose.VALIDATE.action)
    def validate(message: Message, context: Context) -> Message:
        job, worker, folder = _opened(node_of(context), message, context)
        reference = _record(message, "payload", worker.method.payload_type, folder)
        return _reply(message, worker.validate(job.clients, reference), folder)

    @app.evaluate(Purpose.PERSONALIZE.action)
    def personalize(message: Message, context: Context) -> Message:
        job, worker, folder = _opened(node_of(context), message, context)
        payload, reference = (
            _record(message, name, worker.method.payload_type, folder)
            for name in ("payload", "reference")
        )
        result = worker.personalize(job.clients, payload, reference, job.state_rounds)
        return _reply(message, result, folder)

    @app.query()
    def who_are_you(message: Message, context: Context) -> Message:
        job = job_of(message.content) if has_job(message.content) else None
        content = node_of(context).introduce(context, job)
        return Message(content, reply_to=message)

    @app.query(Purpose.REFUSE.action)
    def refused(message: Message, context: Context) -> Message:
        reason = message.content.config_records["refusal"]["reason"]
        node_of(context).refused(context, printable(str(reason)))
        return Message(RecordDict(), reply_to=message)

    return app


def _opened(
    node: Node, message: Message, context: Context
) -> tuple[Job, Worker, Path | None]:
    job = job_of(message.content)
    try:
        return job, node.open(context, job), node.carrier_folder(context, job)
    except RefusedError:
        raise
    except (KnnPerError, OSError) as error:
        raise CannotPlayError(str(error)) from error


def _record(
    message: Message, name: str, record_type: type, folder: Path | None
) -> object:
    packed = packed_of(message.content, name)
    if packed is None:
        raise CodecError(
            f"the request has no {name!r}; the server is of another version"
        )
    try:
        return unpack_shared(record_type, packed, folder)
    except CarrierError as error:
        raise CannotPlayError(str(error)) from error


def _reply(message: Message, record: object, folder: Path | None) -> Message:
    return Message(to_content(None, {"reply": pack(record, folder)}), reply_to=message)

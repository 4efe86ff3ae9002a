"""The Flower ClientApp: messages in, `ClientRuntime`, messages out."""

from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client.runtime import ClientRuntime
from knnper.config.errors import KnnPerError
from knnper.transport.codec import CodecError
from knnper.transport.messages import (
    CannotPlayError,
    CarrierError,
    Job,
    Purpose,
    job_of,
    pack,
    packed_of,
    to_content,
    unpack_shared,
)

OpenRuntime = Callable[[Context, Job], ClientRuntime]
Roster = Callable[[Context], ConfigRecord]


def make_client_app(open_runtime: OpenRuntime, introduce: Roster) -> ClientApp:
    """Return the ClientApp of a federation.

    Parameters
    ----------
    open_runtime
        Gives the runtime for a job; the place where data comes from.
    introduce
        What the node answers when it is asked who it is.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        job, runtime = _open(message, context)
        payload = _record(message, "payload", runtime.method.payload_type)
        (client,) = job.clients
        update = runtime.train(client, payload, job.server_round, job.keep_round)
        return _reply(message, job, update)

    @app.evaluate(Purpose.VALIDATE.action)
    def validate(message: Message, context: Context) -> Message:
        job, runtime = _open(message, context)
        reference = _record(message, "payload", runtime.method.payload_type)
        return _reply(message, job, runtime.validate(job.clients, reference))

    @app.evaluate(Purpose.PERSONALIZE.action)
    def personalize(message: Message, context: Context) -> Message:
        job, runtime = _open(message, context)
        payload_type = runtime.method.payload_type
        result = runtime.personalize(
            job.clients,
            _record(message, "payload", payload_type),
            _record(message, "reference", payload_type),
            job.server_round,
        )
        return _reply(message, job, result)

    @app.query()
    def who_are_you(message: Message, context: Context) -> Message:
        content = RecordDict({"node": introduce(context)})
        return Message(content, reply_to=message)

    def _open(message: Message, context: Context) -> tuple[Job, ClientRuntime]:
        job = job_of(message.content)
        try:
            return job, open_runtime(context, job)
        except (KnnPerError, OSError) as error:
            raise CannotPlayError(str(error)) from error

    return app


def _record(message: Message, name: str, record_type: type) -> object:
    packed = packed_of(message.content, name)
    if packed is None:
        raise CodecError(
            f"the request has no {name!r}; the server is of another version"
        )
    try:
        return unpack_shared(record_type, packed)
    except CarrierError as error:
        raise CannotPlayError(str(error)) from error


def _reply(message: Message, job: Job, record: object) -> Message:
    packed = pack(record, job.shared_folder)
    return Message(to_content(None, {"reply": packed}), reply_to=message)

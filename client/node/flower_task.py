"""One message of a run, played through Flower's Runtime API as flwr-clientapp does it.

One of the two places that know private parts of Flower; see `flower_supernode`.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from unittest import mock

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullAppMessagesRequest
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime import run_clientapp

from client.node.error_text import without_folders
from knnper.config.errors import RunError

log = logging.getLogger(__name__)

LoadApp = Callable[[Run, Fab], ClientApp]

_PULL_BACKOFF_S = 0.02
_ACQUIRE_TASK = "/flwr.proto.Runtime/AcquireTask"


class TaskSource:
    """Where the runner gets tasks: the node's Runtime API.

    Parameters
    ----------
    address
        ``HOST:PORT`` of the API.
    secret
        That the API knows.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._client = RuntimeHttpClient.from_server_address(
            server_address=address,
            insecure=True,  # on this machine
            root_certificates=None,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperExec"),
                SuperExecAuthHttpInterceptor(
                    master_secret=secret, protected_methods=frozenset({_ACQUIRE_TASK})
                ),
            ],
        )

    def next_task(self) -> tuple[Task, str] | None:
        """Return a task and the token that entitles to play it; None without one.

        Raises
        ------
        httpx.HTTPError
            If the node does not answer.
        """
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        response = self._client.AcquireTask(request)
        if response.HasField("task") and response.token:
            return response.task, response.token
        return None


def installed_app(reference: str) -> LoadApp:
    """Return a loader that always gives the ClientApp called ``MODULE:NAME``.

    Raises
    ------
    ImportError
        If there is no such module.
    RunError
        If there is no ClientApp in it.
    """
    module, _, name = reference.partition(":")
    app = getattr(importlib.import_module(module), name, None)
    if not isinstance(app, ClientApp):
        raise RunError(f"expected a ClientApp at {reference}, found {app!r}")
    return lambda run, fab: app  # noqa: ARG005 (the code of the run is not looked at)


def app_of_the_run(run: Run, fab: Fab) -> ClientApp:
    """Return the ClientApp that came with the run."""
    install_from_fab(fab.content, skip_prompt=True)
    load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    return load(run.fab_id, run.fab_version, fab.hash_str)


def play(
    address: str, token: str, load: LoadApp, on_pulled: Callable[[bytes], None]
) -> None:
    """Play one message and hand its reply to the node, be it an error.

    Parameters
    ----------
    address
        ``HOST:PORT`` of the node's Runtime API.
    token
        Of the task.
    load
        Gives the ClientApp.
    on_pulled
        Is given what `report_failure` needs if this process dies from here on.
    """
    client = _connect(address, token)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    message, context, run, fab = _pull_task_input(client)
    on_pulled(_without_content(message).SerializeToString())
    try:
        reply = load(run, fab)(message=message, context=context)
        status, details = SubStatus.COMPLETED, ""
    except Exception as error:  # whatever an app raises is its reply
        log.error("the ClientApp failed", exc_info=error)
        reply = Message(_as_reply(error), reply_to=message)
        status, details = SubStatus.FAILED, str(reply.error.reason)
    run_clientapp.push_message(client, reply, context)
    run_clientapp.push_task_output(client, context, status, details)


def report_failure(
    address: str, token: str, task: Task, pulled: bytes, reason: str
) -> None:
    """Answer a message whose process has died; Flower would notice after a minute.

    Parameters
    ----------
    address, token
        As of `play`.
    task
        The task.
    pulled
        What `play` gave to ``on_pulled``; empty if it did not get as far.
    reason
        What happened, for the server.
    """
    client = _connect(address, token)
    message = _asked(client, pulled)
    metadata = message.metadata
    TaskIdentity.run_id = metadata.run_id
    TaskIdentity.node_id = metadata.dst_node_id
    TaskIdentity.task_id = task.task_id
    reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message)
    node = Context(metadata.run_id, metadata.dst_node_id, {}, RecordDict(), {})
    run_clientapp.push_message(client, reply, node)
    run_clientapp.push_task_output(client, None, SubStatus.FAILED, reason)


def _connect(address: str, token: str) -> RuntimeHttpClient:
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # on this machine
        root_certificates=None,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(token),
        ],
        retry_invoker=make_simple_http_retry_invoker(),
    )


def _pull_task_input(
    client: RuntimeHttpClient,
) -> tuple[Message, Context, Run, Fab]:
    """Pull as Flower does, but without its whole second between two tries."""
    pull = functools.partial(
        pull_and_inflate_object_from_tree, initial_backoff=_PULL_BACKOFF_S
    )
    with mock.patch.object(run_clientapp, "pull_and_inflate_object_from_tree", pull):
        return run_clientapp.pull_task_input(client)


def _asked(client: RuntimeHttpClient, pulled: bytes) -> Message:
    """Return the message without content; the node hands it out once."""
    if pulled:
        return message_from_proto(MessageProto.FromString(pulled))
    response = client.PullMessages(PullAppMessagesRequest())
    return message_from_proto(response.messages_list[0])


def _without_content(message: Message) -> MessageProto:
    return message_to_proto(remove_content_from_message(message))


def _as_reply(error: Exception) -> Error:
    """Return the error in Flower's own words: servers read the reason.

    Where a site's folders are stays with the site.
    """
    if isinstance(error, LoadClientAppError):
        reason = "An exception was raised when attempting to load `ClientApp`"
        return Error(ErrorCode.LOAD_CLIENT_APP_EXCEPTION, reason)
    reason = f"{type(error)}:<'{without_folders(str(error))}'>"
    return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)

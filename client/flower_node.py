"""A site's SuperNode: Flower's own with short waits, for a runner of our own.

Flower's private names are imported in this module and in
`knnper.simulation.flower_nodes`, and nowhere else; a test checks that. With
``KNNPER_PLAIN_FLOWER=1`` none is imported: the node is Flower's own
``flower-supernode``. Measured in seconds a round, with three clients that do next to no
work; unmodified Flower takes 7.3 s:

==========================================  =========================================
names in ``flwr``                           reason; saving; what happens without
==========================================  =========================================
``supernode.start_client_internal``:        The main loop runs in this process and
``time``, ``pull_objects``,                 asks again after 50 ms to 1 s instead of
``register_signal_handlers``,               3 s: 7.3 to 2.9 s. Without: it waits 3 s
``_init_connection``                        after each exchange, and takes 3 s to end.
``supernode.fleet_http_connection``,        Refusals are distinguished, explained, and
``supercore.retry``                         tried again within 5 s; no heartbeats while
                                            a request is held, which halves what an
                                            idle site costs the server. Without:
                                            Flower ends this process, and a new one
                                            starts every 10 s.
``supernode.main``, ``.nodestate``,         Tasks go to a runner that has torch and
``.runtime``; ``supercore.runtime``,        faiss loaded: 7.3 to 3.9 s, and 1.35 s
``.interceptors``, ``.heartbeat``,          together with the main loop. Without: a
``.object_store``, ``.task_identity``,      new Python for each message, where
``.constant``                               imports take 3 s.
``supercore.inflatable``, ``.run``,         Arrays that have not arrived are asked for
``superlink.grid.http_grid``                again after 50 ms instead of 1 s, on both
                                            sides: 1.35 to 1.2 s.
``app.message``, ``common.serde``,          A process that dies is reported at once.
``common.constant``                         Without: after a minute.
==========================================  =========================================
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar
from unittest import mock

import httpx
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullAppMessagesRequest
from flwr.proto.task_pb2 import Task

from knnper.client.refusal import Refusal, refusal_of, refusal_of_signature
from knnper.errors import RunError, printable, text_for_others
from knnper.transport import flower_protocol as flower

if not flower.is_plain():
    from flwr.app.message import remove_content_from_message
    from flwr.common.constant import ISOLATION_MODE_PROCESS, ErrorCode, SubStatus
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.supercore.constant import TaskType
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.inflatable.inflatable_utils import (
        pull_and_inflate_object_from_tree,
        pull_objects,
    )
    from flwr.supercore.interceptors import (
        RuntimeTokenHttpInterceptor,
        RuntimeVersionHttpInterceptor,
        SuperExecAuthHttpInterceptor,
    )
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supercore.retry import (
        RetryInvoker,
        RetryState,
        exponential,
        make_simple_http_retry_invoker,
    )
    from flwr.supercore.run import RunNotRunningException
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid import http_grid
    from flwr.supernode import fleet_http_connection
    from flwr.supernode import start_client_internal as main_loop
    from flwr.supernode.main import create_app
    from flwr.supernode.nodestate import NodeStateFactory
    from flwr.supernode.runtime import run_clientapp

T = TypeVar("T")

FIRST_RETRY_S = 0.05  # to pull an array that has not arrived
_PULL_BACKOFF_S = 0.02
_ACQUIRE_TASK = "/flwr.proto.Runtime/AcquireTask"
_LOOPBACK = "127.0.0.1"
_STOP_RUNTIME_API_S = 0.5
_LONGEST_RETRY_S = 5
_CODE = re.compile(r"\[code: (\d+)\]")  # in the message with which Flower exits

log = logging.getLogger(__name__)


# Tasks and messages, for the runner


class TaskQueue:
    """The tasks of a node that wait for its runner, over the node's Runtime API."""

    def __init__(self, address: str, secret: bytes) -> None:
        interceptor = SuperExecAuthHttpInterceptor(
            master_secret=secret, protected_methods=frozenset({_ACQUIRE_TASK})
        )
        self._node = _connect(address, "SuperExec", interceptor)

    def acquire(self) -> tuple[Task, str] | None:
        """Return a task and its token; None if there is no task."""
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        try:
            response = self._node.AcquireTask(request)
        except httpx.HTTPError as error:
            log.warning("the node did not answer its runner: %s", error)
            return None
        if response.HasField("task") and response.token:
            return response.task, response.token
        return None


def load_app(reference: str) -> ClientApp:
    """Return the ClientApp ``MODULE:NAME``."""
    module, _, name = reference.partition(":")
    app = getattr(importlib.import_module(module), name, None)
    if not isinstance(app, ClientApp):
        raise RunError(f"expected a ClientApp at {reference}, found {app!r}")
    return app


def run_message(
    address: str, token: str, app: ClientApp, on_pulled: Callable[[bytes], None]
) -> None:
    """Pull one message, run the app on it, and push the reply or its error.

    Parameters
    ----------
    address, token
        Of the node's Runtime API, and of the task.
    on_pulled
        Called with the message without its content, once it is pulled.
    """
    client = _connect_task(address, token)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    # As Flower does, but without its whole second between two attempts.
    pull = functools.partial(
        pull_and_inflate_object_from_tree, initial_backoff=_PULL_BACKOFF_S
    )
    with mock.patch.object(run_clientapp, "pull_and_inflate_object_from_tree", pull):
        # The code that comes with the run is not looked at.
        message, context, _, _ = run_clientapp.pull_task_input(client)
    envelope = message_to_proto(remove_content_from_message(message))
    on_pulled(envelope.SerializeToString())
    try:
        reply = app(message=message, context=context)
    except Exception as error:  # an app may raise any
        log.error("the ClientApp failed", exc_info=error)
        reply = Message(_describe_error(error), reply_to=message)
    status = SubStatus.COMPLETED
    details = ""
    if reply.has_error():
        status = SubStatus.FAILED
        details = str(reply.error.reason)
    run_clientapp.push_message(client, reply, context)
    run_clientapp.push_task_output(client, context, status, details)


def report_failure(
    address: str, token: str, task: Task, pulled: bytes, reason: str
) -> None:
    """Push an error as the reply to a message after its process died.

    Flower would notice after a minute. ``pulled`` is the message without content, or
    empty if the process died before it had pulled it.
    """
    client = _connect_task(address, token)
    if pulled:
        message = message_from_proto(MessageProto.FromString(pulled))
    else:  # the node gives it out once
        response = client.PullMessages(PullAppMessagesRequest())
        message = message_from_proto(response.messages_list[0])
    metadata = message.metadata
    TaskIdentity.run_id = metadata.run_id
    TaskIdentity.node_id = metadata.dst_node_id
    TaskIdentity.task_id = task.task_id
    reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message)
    node = Context(metadata.run_id, metadata.dst_node_id, {}, RecordDict(), {})
    run_clientapp.push_message(client, reply, node)
    run_clientapp.push_task_output(client, None, SubStatus.FAILED, reason)


def _connect(
    address: str, component: str, interceptor: Any, **options: Any
) -> RuntimeHttpClient:
    version = RuntimeVersionHttpInterceptor(component_name=component)
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[version, interceptor],
        **options,
    )


def _connect_task(address: str, token: str) -> RuntimeHttpClient:
    return _connect(
        address,
        "flwr-clientapp",
        RuntimeTokenHttpInterceptor(token),
        retry_invoker=make_simple_http_retry_invoker(),
    )


def _describe_error(error: Exception) -> Error:
    # Its text may hold data of the site.
    return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text_for_others(error))


# The node


@dataclass(frozen=True)
class Server:
    """The server, and the means by which both sides are authenticated."""

    address: str
    ca: Path | None
    key: ec.EllipticCurvePrivateKey | None


@dataclass(frozen=True)
class Hooks:
    """Callbacks of a running SuperNode.

    Attributes
    ----------
    connected
        The node is in the federation; gets the node id.
    no_message, no_reply
        There is no message to fetch, or no reply to send yet; they wait a while.
    is_heard
        Whether the server hears of this node anyway, so that no heartbeat is needed.
    received
        A message arrived; gets its type and group.
    unreachable, reachable
        A request failed and is repeated, with the reason; a request succeeded.
    """

    connected: Callable[[int], None]
    no_message: Callable[[], None]
    no_reply: Callable[[], None]
    is_heard: Callable[[], bool]
    received: Callable[[str, str], None]
    unreachable: Callable[[str], None]
    reachable: Callable[[], None]


class _Refused(BaseException):
    """Leaves Flower's main loop, which takes any `Exception` for a planned end."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def make_state() -> NodeStateFactory:
    """Return the storage of a SuperNode's messages and tasks."""
    return NodeStateFactory(objectstore_factory=ObjectStoreFactory())


@contextlib.contextmanager
def serve_runtime_api(state: NodeStateFactory, secret: bytes) -> Iterator[str]:
    """Serve the Runtime API to the runner, in a thread; yield HOST:PORT."""
    config = uvicorn.Config(
        create_app(state_factory=state, superexec_auth_secret=secret),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    with socket.create_server((_LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"{_LOOPBACK}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(_STOP_RUNTIME_API_S)


def serve(
    server: Server,
    state: NodeStateFactory,
    secret: bytes,
    node_config: dict[str, bool | float | int | str],
    hooks: Hooks,
) -> None:
    """Run a node of the federation until the server refuses it or a signal comes.

    Raises
    ------
    Refusal
        If the server refuses the node or the connection breaks.
    """
    rejected_signatures: list[Refusal] = []
    ca, key = server.ca, server.key
    try:
        with _replace_parts(hooks, rejected_signatures):
            main_loop.start_client_internal(
                state_factory=state,
                server_address=server.address,
                node_config=node_config,
                root_certificates=None if ca is None else ca.read_bytes(),
                insecure=ca is None,
                authentication_keys=None if key is None else (key, key.public_key()),
                isolation=ISOLATION_MODE_PROCESS,
                superexec_auth_secret=secret,
            )
    except _Refused as refused:
        raise refused.refusal from refused
    except KeyboardInterrupt:
        if rejected_signatures:
            raise rejected_signatures[0] from None
        raise
    raise Refusal(f"the connection to {server.address} broke off; see above")


def deactivate(server: Server, node_id: int) -> None:
    """Tell the server that a node with this key is gone."""
    if server.key is None:
        return
    request = DeactivateNodeRequest(node_id=node_id)
    headers = flower.signed_headers(server.key)
    with flower.http_client(server.address, server.ca) as client:
        flower.post(client, flower.DEACTIVATE, request, headers).raise_for_status()


@contextlib.contextmanager
def quick_pulls() -> Iterator[None]:
    """Let a ServerApp ask sooner for arrays of a reply that have not arrived.

    A reply is seen before its arrays arrive, and Flower then waits for a second.
    """
    if flower.is_plain():
        yield
        return
    pull = functools.partial(pull_objects, initial_backoff=FIRST_RETRY_S)
    with mock.patch.object(http_grid, "pull_objects", pull):
        yield


@contextlib.contextmanager
def _replace_parts(hooks: Hooks, rejected_signatures: list[Refusal]) -> Iterator[None]:
    """Replace parts of Flower's node within the block, so that it calls the hooks."""

    def sleep(seconds: float) -> None:  # 3 s without a message, 0.5 s without a reply
        (hooks.no_message if seconds > 1 else hooks.no_reply)()

    def kill(process: int, number: int) -> None:
        rejected_signatures.append(refusal_of_signature())
        os.kill(process, number)

    pull = functools.partial(pull_objects, initial_backoff=FIRST_RETRY_S)
    patches: tuple[tuple[object, str, object], ...] = (
        (main_loop, "time", SimpleNamespace(sleep=sleep)),
        (main_loop, "pull_objects", _end_with_run(pull)),
        # The process handles signals itself: Flower's handlers take seconds.
        (main_loop, "register_signal_handlers", lambda **_: None),
        (main_loop, "_init_connection", _connect_with_hooks(hooks)),
        (fleet_http_connection, "flwr_exit", _refuse),
        # Its heartbeat ends the process of a node that the server does not know.
        (fleet_http_connection, "os", SimpleNamespace(getpid=os.getpid, kill=kill)),
        (
            fleet_http_connection,
            "make_simple_http_retry_invoker",
            _retry_with_hooks(hooks),
        ),
        (
            fleet_http_connection,
            "HeartbeatSender",
            _send_heartbeats_unless(hooks.is_heard),
        ),
    )
    with contextlib.ExitStack() as stack:
        for module, name, replacement in patches:
            stack.enter_context(mock.patch.object(module, name, replacement))
        yield


def _end_with_run(receive: Callable[..., T]) -> Callable[..., T]:
    """Wrap a step of receiving a message, to raise `RunError` if its run has ended.

    Flower's `RunNotRunningException` is a `BaseException`, and the main loop removes
    the task that it has made for the message only after an `Exception`. A runner would
    wait for a task that stays for ever.
    """

    @functools.wraps(receive)
    def wrapped(*args: Any, **kwargs: Any) -> T:
        try:
            return receive(*args, **kwargs)
        except RunNotRunningException as error:
            raise RunError("the run has ended") from error

    return wrapped


def _send_heartbeats_unless(
    is_heard: Callable[[], bool],
) -> Callable[..., HeartbeatSender]:
    """Return a factory of heartbeats that are skipped while the server hears the node.

    Each needs a second connection while the first waits for a message.
    """

    def make(send: Callable[[], bool]) -> HeartbeatSender:
        return HeartbeatSender(lambda: is_heard() or send())

    return make


def _connect_with_hooks(hooks: Hooks) -> Callable[..., Any]:
    """Wrap Flower's connection, to call the hooks for a connection and a message."""
    connect = main_loop._init_connection

    @contextlib.contextmanager
    def announce(**kwargs: Any) -> Iterator[Any]:
        with connect(**kwargs) as connection:
            hooks.connected(connection[0])
            node_id, receive, *others, confirm_message_received = connection

            def receive_and_announce() -> Any:
                received = receive()
                if received is not None:
                    metadata = received[0].metadata
                    hooks.received(metadata.message_type, metadata.group_id)
                return received

            confirm = _end_with_run(confirm_message_received)
            yield node_id, receive_and_announce, *others, confirm

    return announce


def _refuse(code: int, message: str = "") -> NoReturn:  # noqa: ARG001 (as Flower's)
    match = _CODE.search(message)
    raise _Refused(refusal_of(int(match[1]) if match else 0, message))


def _retry_with_hooks(hooks: Hooks) -> Callable[[], RetryInvoker]:
    """Return a factory of retries that come soon and report lasting refusals."""

    def make() -> RetryInvoker:
        invoker = make_simple_http_retry_invoker()
        gives_up = invoker.should_giveup

        def give_up(error: Exception) -> bool:
            response = getattr(error, "response", None)
            if response is not None and response.status_code == 401:
                raise _Refused(refusal_of_signature())
            return gives_up is not None and gives_up(error)

        invoker.on_backoff = _call_both(
            lambda state: hooks.unreachable(_describe_failure(state.exception)),
            invoker.on_backoff,
        )
        invoker.on_success = _call_both(lambda _: hooks.reachable(), invoker.on_success)
        invoker.should_giveup = give_up
        invoker.wait_gen_factory = lambda: exponential(max_delay=_LONGEST_RETRY_S)
        return invoker

    return make


def _call_both(
    first: Callable[[RetryState], None], second: Callable[[RetryState], None] | None
) -> Callable[[RetryState], None]:
    def call(state: RetryState) -> None:
        first(state)
        if second is not None:
            second(state)

    return call


def _describe_failure(error: Exception | None) -> str:
    """Describe in few words why a request failed."""
    response = getattr(error, "response", None)
    if isinstance(response, httpx.Response):
        detail = flower.FlowerError.of(response.text).detail
        return printable(f"HTTP status {response.status_code}: {detail}")
    return printable(str(error) or type(error).__name__)

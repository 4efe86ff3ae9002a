"""A site's SuperNode: Flower's own with short waits, and a fork for each message.

A thread cannot be ended from outside, a process can. So each message has a process of
its own, forked from a runner that has everything loaded, and one that hangs does not
block those that come later.

What Flower keeps to itself is imported here and in `knnper.simulation.flower_nodes`,
and nowhere else; `tests/test_flowers_private_names.py` sees to that. With
``KNNPER_PLAIN_FLOWER=1`` none of it is: the node is Flower's own ``flower-supernode``.
Measured with three clients that have next to nothing to do, in seconds a round; Flower
as it is takes 7.3 s:

==========================================  =========================================
names in ``flwr``                           why; what it saves; what happens without
==========================================  =========================================
``supernode.start_client_internal``:        The main loop in this process, which asks
``time``, ``pull_objects``,                 again after 50 ms to 1 s instead of 3 s:
``register_signal_handlers``,               7.3 to 2.9 s. Without: it waits 3 s after
``_init_connection``                        each exchange, and takes 3 s to end.
``supernode.fleet_http_connection``,        Refusals are told from one another, with
``supercore.retry``                         what to do, and tried again within 5 s; no
                                            heartbeats while a request is held, which
                                            halves what an idle site costs the server.
                                            Without: Flower's own message, and a new
                                            start every 10 s.
``supernode.main``, ``.nodestate``,         Tasks go to a runner that has torch and
``.runtime``; ``supercore.runtime``,        faiss loaded: 7.3 to 3.9 s, and 1.35 s
``.interceptors``, ``.heartbeat``,          together with the main loop. Without: a
``.object_store``, ``.task_identity``,      new Python for each message, 3 s of which
``.constant``, ``.run``, ``.fab``           imports.
``supercore.inflatable``,                   Arrays on their way are asked for after
``superlink.grid.http_grid``                50 ms instead of 1 s, on both sides: 1.35
                                            to 1.2 s.
``app.message``, ``common.serde``,          A process that dies is answered for at
``common.constant``                         once. Without: after a minute.
``clientapp.utils``, ``.client_app``,       With ``--allow-app-code``, the app that
``cli.install``                             comes with a run. Without: always that one.
==========================================  =========================================
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import logging
import math
import os
import platform
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar
from unittest import mock

import flwr
import httpx
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullAppMessagesRequest
from flwr.proto.task_pb2 import Task

from knnper import files, lifeline
from knnper.errors import RunError, printable, text_for_others, write_harmlessly
from knnper.lifeline import die_with_parent
from knnper.transport import flower_protocol as flower

if not flower.is_plain():
    from flwr.app.message import remove_content_from_message
    from flwr.cli.install import install_from_fab
    from flwr.clientapp.client_app import LoadClientAppError
    from flwr.clientapp.utils import get_load_client_app_fn
    from flwr.common.constant import ISOLATION_MODE_PROCESS, ErrorCode, SubStatus
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.supercore.constant import TaskType
    from flwr.supercore.fab import Fab
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
    from flwr.supercore.run import Run, RunNotRunningException
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid import http_grid
    from flwr.supernode import fleet_http_connection
    from flwr.supernode import start_client_internal as main_loop
    from flwr.supernode.main import create_app
    from flwr.supernode.nodestate import NodeStateFactory
    from flwr.supernode.runtime import run_clientapp

log = logging.getLogger(__name__)
# Exit status of a process whose deadline passed, as of timeout(1).
DEADLINE_PASSED = 124
_GRACE_S = 1.0


@dataclass(frozen=True)
class Deadline:
    """When the server stops waiting for the reply to a message."""

    at: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline of a message that arrives now; 0 seconds are none."""
        return cls(time.monotonic() + seconds) if seconds else cls()

    def ends(self, job: str) -> contextlib.AbstractContextManager[None]:
        """End this process when the block goes on after the deadline."""
        if math.isinf(self.at):
            return contextlib.nullcontext()
        return process_ends_after(self.at - time.monotonic(), job)


@contextlib.contextmanager
def process_ends_after(seconds: float, job: str) -> Iterator[None]:
    """End this process when the block takes longer; call it in the main thread."""
    timer = threading.Timer(max(seconds, 0.0), _end_process, (seconds, job))
    timer.daemon = True
    # The kernel's timer is for code that never lets Python's threads run.
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.0) + _GRACE_S)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _end_process(seconds: float, job: str) -> None:
    log.error("%s was not done within %.3g s; its process ends", job, seconds)
    logging.shutdown()
    os._exit(DEADLINE_PASSED)


LoadApp = Callable[["Run", "Fab"], ClientApp]
_PULL_BACKOFF_S = 0.02
_ACQUIRE_TASK = "/flwr.proto.Runtime/AcquireTask"


def installed_app(reference: str) -> LoadApp:
    """Return a loader that always gives the ClientApp called ``MODULE:NAME``."""
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


def run_message(
    address: str, token: str, load: LoadApp, on_pulled: Callable[[bytes], None]
) -> None:
    """Answer one message and hand its reply to the node, be it an error."""
    client = _connect_task(address, token)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    # As Flower does, but without its whole second between two tries.
    pull = functools.partial(
        pull_and_inflate_object_from_tree, initial_backoff=_PULL_BACKOFF_S
    )
    with mock.patch.object(run_clientapp, "pull_and_inflate_object_from_tree", pull):
        message, context, run, fab = run_clientapp.pull_task_input(client)
    asked = message_to_proto(remove_content_from_message(message))
    on_pulled(asked.SerializeToString())
    try:
        reply = load(run, fab)(message=message, context=context)
    except Exception as error:  # whatever an app raises is its reply
        log.error("the ClientApp failed", exc_info=error)
        reply = Message(_as_reply(error), reply_to=message)
    status, details = SubStatus.COMPLETED, ""
    if reply.has_error():
        status, details = SubStatus.FAILED, str(reply.error.reason)
    run_clientapp.push_message(client, reply, context)
    run_clientapp.push_task_output(client, context, status, details)


def report_failure(
    address: str, token: str, task: Task, pulled: bytes, reason: str
) -> None:
    """Answer a message whose process has died; Flower would notice after a minute."""
    client = _connect_task(address, token)
    message = _asked(client, pulled)
    metadata = message.metadata
    TaskIdentity.run_id = metadata.run_id
    TaskIdentity.node_id = metadata.dst_node_id
    TaskIdentity.task_id = task.task_id
    reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message)
    node = Context(metadata.run_id, metadata.dst_node_id, {}, RecordDict(), {})
    run_clientapp.push_message(client, reply, node)
    run_clientapp.push_task_output(client, None, SubStatus.FAILED, reason)


def _connect(
    address: str, component: str, interceptor: Any, **more: Any
) -> RuntimeHttpClient:
    version = RuntimeVersionHttpInterceptor(component_name=component)
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[version, interceptor],
        **more,
    )


def _connect_task(address: str, token: str) -> RuntimeHttpClient:
    known, retry = RuntimeTokenHttpInterceptor(token), make_simple_http_retry_invoker()
    return _connect(address, "flwr-clientapp", known, retry_invoker=retry)


def _asked(client: RuntimeHttpClient, pulled: bytes) -> Message:
    """Return the message without content; the node hands it out once."""
    if pulled:
        return message_from_proto(MessageProto.FromString(pulled))
    response = client.PullMessages(PullAppMessagesRequest())
    return message_from_proto(response.messages_list[0])


def _as_reply(error: Exception) -> Error:
    """Return the reply to a message for which an app raised an error."""
    if isinstance(error, LoadClientAppError):
        reason = "An exception was raised when attempting to load `ClientApp`"
        return Error(ErrorCode.LOAD_CLIENT_APP_EXCEPTION, reason)
    # Its text may hold data of the site.
    return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text_for_others(error))


# The file in a client's state folder that is locked while its node runs.
LOCK_FILE = "node.lock"


@contextlib.contextmanager
def locked(state: Path) -> Iterator[None]:
    """Hold a state folder for this process; the kernel frees it when it ends."""
    try:
        files.make_private(state)
        lock = files.FileLock(state / LOCK_FILE)
    except files.LockHeldError as error:
        raise RunError(
            f"the state folder {state} is in use by another `knnper fed client` "
            f"(process {error}); end that one, or give this client another folder"
        ) from error
    except OSError as error:
        mend = "make it writable for this user, or set another `state`"
        raise RunError(
            f"the folder {state} cannot be written: {error}; {mend}"
        ) from error
    with lock:
        yield


def holder(state: Path) -> int | None:
    """Return the process that holds a state folder; None if none does."""
    found = files.lock_holder(state / LOCK_FILE)
    if found is None:
        return None
    return int(found) if found.isdecimal() else 0  # It has not said yet who it is.


_NOTE_FILE = "node.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Activation:
    """A state folder's note of the node that is online."""

    state: Path
    place: str

    @staticmethod
    def of(state: Path) -> Activation:
        """Return the note of a folder that was locked before."""
        machine = _BOOT.read_text().strip() if _BOOT.exists() else platform.node()
        return Activation(state, f"{machine}:{(state / LOCK_FILE).stat().st_ino}")

    def note(self, node_id: int) -> None:
        """Write down that the node is online."""
        content = {"node_id": str(node_id), "place": self.place}
        files.write_atomically(self._path, json.dumps(content))

    def forget(self) -> None:
        """Write down that it has left."""
        self._path.unlink(missing_ok=True)

    def left_behind(self) -> int | None:
        """Return the id of a node of this folder that did not leave; None without."""
        try:
            content = files.parse_json(files.read_plain(self._path))
            return int(content["node_id"]) if content["place"] == self.place else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def _path(self) -> Path:
        return self.state / _NOTE_FILE


_FLOWER = Path(flwr.__file__).parent


def log_to_stderr(*, verbose: bool = False) -> None:
    """Set up the logging of a process that is a client."""
    write_harmlessly("%(asctime)s %(levelname)s %(message)s")
    for chatty in ("httpx", "faiss"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logger = logging.getLogger("flwr")
    logger.setLevel(logging.INFO)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addFilter(lambda record: bool(record.getMessage().strip()))
    # Clients' apps write to the same log; only what is Flower's own is routine.
    logger.addFilter(
        lambda record: (
            verbose
            or record.levelno > logging.INFO
            or not Path(record.pathname).is_relative_to(_FLOWER)
        )
    )


READY = b"ready\n"  # what a runner writes once everything is loaded


@dataclass(frozen=True)
class Orders:
    """How the runner reaches the node and what it runs."""

    address: str  # HOST:PORT of the node's Runtime API, on this machine
    secret: str  # of that API, in hexadecimal digits: nobody else gets a task from it
    parent: int  # process id of the node
    app: str  # MODULE:NAME of the installed ClientApp, which answers all messages
    # The app that comes with a run, as Flower does: who submits runs runs code here.
    allow_app_code: bool = False
    verbose: bool = False


class Refusal(RunError):
    """The server cannot be reached or does not take the client."""

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class NotAcceptedError(Refusal):
    """Flower's one answer to two things: an unknown key, and one that is online."""

    def __init__(self, key: str = "", doctor: str = "knnper site doctor") -> None:
        which = f" ({key})" if key else ""
        super().__init__(
            f"the server does not accept this client's key{which}: either it is not "
            "registered there (send the public key to the operator, who adds it), or a "
            "node with this key is online (one that crashed counts as online for a "
            f"minute). Which of the two: {doctor}"
        )


def refusal_of(code: int, message: str) -> Refusal:
    """Return what Flower's answer means."""
    if code == flower.NOT_ACCEPTED:
        return NotAcceptedError()
    if code == flower.KEY_NEEDED:
        return Refusal(
            "the server takes only clients with a key; give `tls` and `key` instead of "
            "`insecure: true`",
            lasting=True,
        )
    reason = printable(" ".join(message.split()))
    return Refusal(f"the server did not take this client: {reason}")


def unknown_key() -> Refusal:
    """Return why a signature is refused."""
    return Refusal(
        "the server refuses this client's signature: the key was removed there, or the "
        "clocks of the two machines differ by more than ten seconds; compare `date`"
    )


T = TypeVar("T")
FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 5
_CODE = re.compile(r"\[code: (\d+)\]")


@dataclass(frozen=True)
class Server:
    """The server and how it knows this client."""

    address: str
    ca: Path | None
    key: ec.EllipticCurvePrivateKey | None


@dataclass(frozen=True)
class Hooks:
    """What is to happen while the SuperNode runs."""

    connected: Callable[[int], None]
    no_message: Callable[[], None]
    no_reply: Callable[[], None]
    is_heard: Callable[[], bool]  # whether a sign of life is superfluous
    received: Callable[[str, str], None]  # type and group of a message
    unreachable: Callable[[str], None]  # called before each retry, with the reason
    reachable: Callable[[], None]  # called after each request that succeeded


class _Ended(BaseException):
    """Leaves Flower's main loop, which takes any `Exception` for an end as planned."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def new_state() -> NodeStateFactory:
    """Return where a SuperNode keeps its messages and tasks."""
    return NodeStateFactory(objectstore_factory=ObjectStoreFactory())


def serve(
    server: Server,
    state: NodeStateFactory,
    secret: bytes,
    node_config: dict[str, bool | float | int | str],
    hooks: Hooks,
) -> None:
    """Be a node of the federation until the server refuses or a signal interrupts."""
    unknown: list[Refusal] = []
    ca, key = server.ca, server.key
    try:
        with _adapted(hooks, unknown):
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
    except _Ended as ended:
        raise ended.refusal from ended
    except KeyboardInterrupt:
        if unknown:
            raise unknown[0] from None
        raise
    raise Refusal(f"the connection to {server.address} broke off; see above")


def take_out(server: Server, node_id: int) -> None:
    """Tell the server that a node of this key is gone."""
    if server.key is None:
        return
    request, signed = (
        DeactivateNodeRequest(node_id=node_id),
        flower.signed_headers(server.key),
    )
    with flower.http_client(server.address, server.ca) as client:
        flower.post(client, flower.DEACTIVATE, request, signed).raise_for_status()


@contextlib.contextmanager
def _adapted(hooks: Hooks, unknown: list[Refusal]) -> Iterator[None]:
    def sleep(seconds: float) -> None:  # 3 s without a message, 0.5 s without a reply
        (hooks.no_message if seconds > 1 else hooks.no_reply)()

    def kill(process: int, number: int) -> None:
        unknown.append(unknown_key())
        os.kill(process, number)

    pull = functools.partial(pull_objects, initial_backoff=FIRST_RETRY_S)
    patches: tuple[tuple[object, str, object], ...] = (
        (main_loop, "time", SimpleNamespace(sleep=sleep)),
        (main_loop, "pull_objects", _tidied_up(pull)),
        # Signals are left to the process: Flower's way out takes seconds.
        (main_loop, "register_signal_handlers", lambda **_: None),
        (main_loop, "_init_connection", _announcing(hooks)),
        (fleet_http_connection, "flwr_exit", _refuse),
        # The parts of `os` with which the heartbeat ends a process that is unknown.
        (fleet_http_connection, "os", SimpleNamespace(getpid=os.getpid, kill=kill)),
        (fleet_http_connection, "make_simple_http_retry_invoker", _retries(hooks)),
        (fleet_http_connection, "HeartbeatSender", _sparing(hooks.is_heard)),
    )
    with contextlib.ExitStack() as stack:
        for place, name, replacement in patches:
            stack.enter_context(mock.patch.object(place, name, replacement))
        yield


def _tidied_up(receive: Callable[..., T]) -> Callable[..., T]:
    """Return a part of receiving that fails plainly when its run has ended."""
    # Only then does the main loop take back the task that it has made for the message,
    # for which a runner would wait for ever.

    @functools.wraps(receive)
    def received(*args: Any, **kwargs: Any) -> T:
        try:
            return receive(*args, **kwargs)
        except RunNotRunningException as error:
            raise RunError("the run has ended meanwhile") from error

    return received


def _sparing(is_heard: Callable[[], bool]) -> Callable[..., HeartbeatSender]:
    """Return a maker of heartbeats that are left out while the server hears the node.

    Each needs a connection of its own while the other one waits for a message.
    """

    def made(send: Callable[[], bool]) -> HeartbeatSender:
        return HeartbeatSender(lambda: is_heard() or send())

    return made


def _announcing(hooks: Hooks) -> Callable[..., Any]:
    connect = main_loop._init_connection

    @contextlib.contextmanager
    def announce(**kwargs: Any) -> Iterator[Any]:
        with connect(**kwargs) as connection:
            hooks.connected(connection[0])
            node_id, receive, *parts, confirm_message_received = connection

            def announced() -> Any:
                received = receive()
                if received is not None:
                    about = received[0].metadata
                    hooks.received(about.message_type, about.group_id)
                return received

            yield node_id, announced, *parts, _tidied_up(confirm_message_received)

    return announce


def _refuse(code: int, message: str = "") -> NoReturn:  # noqa: ARG001 (as Flower's)
    found = _CODE.search(message)
    raise _Ended(refusal_of(int(found[1]) if found else 0, message))


def _retries(hooks: Hooks) -> Callable[[], RetryInvoker]:
    """Return a maker of retries that come back soon and say what they cannot mend."""

    def made() -> RetryInvoker:
        invoker = make_simple_http_retry_invoker()
        is_hopeless = invoker.should_giveup

        def give_up(error: Exception) -> bool:
            response = getattr(error, "response", None)
            if response is not None and response.status_code == 401:
                raise _Ended(unknown_key())
            return is_hopeless is not None and is_hopeless(error)

        invoker.on_backoff = _both(
            lambda state: hooks.unreachable(_reason(state.exception)),
            invoker.on_backoff,
        )
        invoker.on_success = _both(lambda _: hooks.reachable(), invoker.on_success)
        invoker.should_giveup = give_up
        invoker.wait_gen_factory = lambda: exponential(max_delay=_LONGEST_RETRY_S)
        return invoker

    return made


def _both(
    first: Callable[[RetryState], None], second: Callable[[RetryState], None] | None
) -> Callable[[RetryState], None]:
    def call(state: RetryState) -> None:
        first(state)
        if second is not None:
            second(state)

    return call


def _reason(error: Exception | None) -> str:
    """Return in few words why a request failed."""
    response = getattr(error, "response", None)
    if isinstance(response, httpx.Response):
        detail = flower.FlowerError.of(response.text).detail
        return printable(f"HTTP status {response.status_code}: {detail}")
    return printable(str(error) or type(error).__name__)


_ORDERS, _REPORT = 0, 1
_LOOK_S = 0.005
_LONGEST_LINE = 65536


def main() -> None:
    """Run until standard input ends or the node does."""
    orders = Orders(**json.loads(_read_line()))
    log_to_stderr(verbose=orders.verbose)
    die_with_parent(orders.parent)
    runner = Runner(orders)
    os.write(_REPORT, READY)
    os.dup2(sys.stderr.fileno(), _REPORT)  # what apps print is for people
    runner.serve()
    os._exit(0)  # without torch's way out, which takes long


class Runner:
    """Forks a process for each task of a node."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        known = SuperExecAuthHttpInterceptor(
            master_secret=bytes.fromhex(orders.secret),
            protected_methods=frozenset({_ACQUIRE_TASK}),
        )
        self._node = _connect(orders.address, "SuperExec", known)
        self._load: LoadApp = app_of_the_run
        # What nearly every app needs; it starts no thread that a fork would lose.
        import faiss  # noqa: F401
        import torch  # noqa: F401

        if not orders.allow_app_code:
            self._load = installed_app(orders.app)
        # What is shared with the forks stays shared.
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Run tasks, one at a time, until standard input ends."""
        while os.read(_ORDERS, _LONGEST_LINE):
            # Again after each, since a call may have come while one was run.
            while (found := self._next_task()) is not None:
                self._run(*found)

    def _next_task(self) -> tuple[Task, str] | None:
        """Return a task and the token that entitles to run it; None without one."""
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        try:
            found = self._node.AcquireTask(request)
            is_one = found.HasField("task") and found.token
            return (found.task, found.token) if is_one else None
        except httpx.HTTPError as error:
            log.warning("the node did not answer its runner: %s", error)
            return None

    def _run(self, task: Task, token: str) -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)  # what the app started may hold the other end
        address = self._orders.address

        def note(pulled: bytes) -> None:
            os.write(writing, pulled)  # less than a pipe holds

        child = _fork(lambda: run_message(address, token, self._load, note))
        os.close(writing)
        died_of = why(_wait(child))
        if died_of is not None:
            log.error("the process of a message died: %s", died_of)
            pulled = b""
            with contextlib.suppress(BlockingIOError):
                pulled = os.read(reading, _LONGEST_LINE)
            reason = f"the client's process died: {died_of}"
            _wait(_fork(lambda: report_failure(address, token, task, pulled, reason)))
        os.close(reading)


def why(status: int) -> str | None:
    """Return what a process that ended with ``status`` died of; None if it did not."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGALRM:
            return "its deadline passed"
        hint = ", perhaps for lack of memory" if number == signal.SIGKILL else ""
        return f"it was ended by {signal.Signals(number).name}{hint}"
    code = os.WEXITSTATUS(status)
    if code == DEADLINE_PASSED:
        return "its deadline passed"
    return f"it ended with exit status {code}" if code else None


def _fork(work: Callable[[], None]) -> int:
    parent = os.getpid()
    child = os.fork()
    if not child:
        _work_and_end(parent, work)
    return child


def _work_and_end(parent: int, work: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(_ORDERS)
        work()
        status = 0
    except BaseException:  # nothing may get into the code of the parent
        log.exception("a message could not be run")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int) -> int:
    """Return the status with which ``child`` ends; kill it when the node is gone."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if select.select([_ORDERS], [], [], _LOOK_S)[0] and not os.read(
            _ORDERS, _LONGEST_LINE
        ):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os._exit(0)


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(_ORDERS, 1)
        if not byte:
            sys.exit("expected orders on standard input, of `knnper fed client`")
        line += byte
    return line


if __name__ == "__main__":
    main()


# Without the working directory on its path: what lies there is no part of the client.
_COMMAND = (sys.executable, "-P", "-m", "knnper.client.flower_node")
_STOP_S = 1.0


class RunnerProcess:
    """A runner."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._process = self._start()
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Wait until torch and the app are loaded."""
        if self._is_ready:
            return
        output = self._process.stdout
        assert output is not None
        if output.readline() != READY:
            self._process.wait()
            raise RunError(
                f"the runner ended with exit status {self._process.returncode} before "
                f"it had loaded {self._orders.app}; what it wrote is above"
            )
        self._is_ready = True

    def wake(self) -> None:
        """Tell the runner that there may be a task."""
        if self._process.poll() is not None:
            status = self._process.returncode
            log.error("the runner ended with exit status %d; it is restarted", status)
            self.stop()
            self._process, self._is_ready = self._start(), False
            self.wait_until_ready()
        assert self._process.stdin is not None
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._process.stdin.fileno(), b"\n")

    def stop(self) -> None:
        """End the runner and whatever it runs."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the node, which ends the runner
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asdict(self._orders)).encode() + b"\n")
        os.set_blocking(process.stdin.fileno(), False)
        return process


@contextlib.contextmanager
def started(orders: Orders) -> Iterator[RunnerProcess]:
    """Give a runner that ends with the block."""
    runner = RunnerProcess(orders)
    try:
        yield runner
    finally:
        runner.stop()


_LOOPBACK = "127.0.0.1"
_RUNTIME_API_STOP_S = 0.5


@contextlib.contextmanager
def runtime_api(state: NodeStateFactory, secret: bytes) -> Iterator[str]:
    """Answer the runner in a thread, at a free port."""
    app = create_app(state_factory=state, superexec_auth_secret=secret)
    silent: dict[str, Any] = {"log_level": "warning", "access_log": False}
    plain: dict[str, Any] = {"lifespan": "off", "ws": "none"}
    config = uvicorn.Config(app, **silent, **plain, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server((_LOOPBACK, 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield f"{_LOOPBACK}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(_RUNTIME_API_STOP_S)


@contextlib.contextmanager
def quick_pulls() -> Iterator[None]:
    """Have a ServerApp ask sooner for arrays of a reply that are on their way."""
    # A reply is seen before its arrays are there. Flower then waits for a second.
    if flower.is_plain():
        yield
        return
    pull = functools.partial(pull_objects, initial_backoff=FIRST_RETRY_S)
    with mock.patch.object(http_grid, "pull_objects", pull):
        yield


_TERM_S = 6.0  # Flower takes half of it
_GLANCE_S = 0.5


def serve_plainly(
    server: Server, key: Path | None, config: Path, home: Path, look: Callable[[], None]
) -> NoReturn:
    """Have Flower's own node in the federation, with a ``look`` now and then."""
    trust = ["--insecure"] if server.ca is None else ["--root-certificates", server.ca]
    proof = [] if key is None else ["--auth-supernode-private-key", key]
    with socket.create_server((_LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    folder = Path(sys.executable).parent
    process = subprocess.Popen(
        [
            *(sys.executable, "-I", lifeline.__file__, str(os.getpid())),
            folder / "flower-supernode",
            *("--superlink", server.address, *trust, *proof),
            *("--host", _LOOPBACK, "--port", str(port)),
            *("--node-config", f"config={json.dumps(str(config))}"),
        ],
        env={
            **os.environ,
            "PATH": os.pathsep.join((str(folder), os.environ.get("PATH", os.defpath))),
            "FLWR_HOME": str(home),
        },
    )
    try:
        while process.poll() is None:
            look()
            time.sleep(_GLANCE_S)
        raise Refusal(f"flower-supernode ended with status {process.returncode}")
    finally:
        process.terminate()
        try:
            process.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

"""A client's node: started, joined to its federation, and kept there.

`run_client` is the entry point. The node joins, waits for messages, and joins again
when the server lets go of it; a refused node tries again with back-off.
"""

import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import httpx

from knnper.client.activation import Activation, lock_state
from knnper.client.flower_node import (
    Hooks,
    Server,
    deactivate,
    make_state,
    serve,
    serve_runtime_api,
)
from knnper.client.node_log import WaitLog
from knnper.client.plain_node import serve_plainly
from knnper.client.refusal import NotAcceptedError, Refusal, RetryPolicy
from knnper.client.runner import RunnerOptions, RunnerProcess, start_runner
from knnper.client.server_checks import GATEWAY, server_checks
from knnper.client.settings import ClientSettings
from knnper.errors import CredentialError, RunError
from knnper.transport.credentials import fingerprint, read_node_key
from knnper.transport.diagnosis import Verdict
from knnper.transport.flower_protocol import PLAIN_FLOWER, is_plain

PATIENCE_S = 120.0

# Pauses between two requests for messages.
SHORTEST_S = 0.05
LONGEST_S = 1.0
PART_OF_IDLE_TIME = 0.05
REPLY_S = 0.01
# A request that returned no message after the first of these was held by the gateway;
# after the second its answer is overdue.
SHORTEST_HELD_S = 5.0
LONGEST_HELD_S = 25.0

_LEAVE_S = 1.5  # after SIGTERM, until the process ends in any case
_NOTICED_S = 3.0  # until a run has seen that a node is gone
_CHECKED = ("server", "tls", "certificate")  # before the node connects

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeOptions:
    """How a node is run.

    Attributes
    ----------
    app
        MODULE:NAME of the installed ClientApp.
    allow_app_code
        Run Flower's own node, which runs the app that comes with a run instead.
    patience_s
        How long to try to join; None is for ever.
    is_done
        Whether the node may leave; asked while it is idle.
    """

    app: str
    allow_app_code: bool = False
    patience_s: float | None = PATIENCE_S
    is_done: Callable[[], bool] = lambda: False
    verbose: bool = False


class Stopped(BaseException):
    """Raised on SIGTERM or when work is done.

    A BaseException, so that a library's "except Exception" cannot swallow it.
    """


def run_client(settings: ClientSettings, options: NodeOptions) -> None:
    """Take part in the federation until a signal comes or ``is_done``.

    Raises
    ------
    Refusal
        If the server does not accept the client within ``patience_s``.
    """
    with lock_state(settings.state), _stopped_by_sigterm():
        os.environ["FLWR_HOME"] = str(settings.state / "flwr")
        node = _Node(settings, options, Activation.of(settings.state))
        if settings.insecure:
            log.warning(
                "insecure: true: the network between client and server can read and "
                "change all messages"
            )
        try:
            while True:
                node.join_and_serve()
        except Stopped:
            log.info("stopped")


def require_server(address: str, ca: Path | None) -> None:
    """Check address, port and certificate of the server, as the doctor does."""
    for check in server_checks(address, ca):
        if check.subject not in _CHECKED:
            continue
        try:
            finding = check.look()
        except OSError as error:
            raise Refusal(f"nothing answers at {address} ({error})") from error
        if finding.verdict is Verdict.PROBLEM:
            # A server that is just starting may cause these problems.
            may_pass = check.subject == "server" or finding.expected == GATEWAY
            raise Refusal(f"{finding.found}; {finding.fix}", lasting=not may_pass)


class _Node:
    def __init__(
        self, settings: ClientSettings, options: NodeOptions, activation: Activation
    ) -> None:
        self._settings = settings
        self._options = options
        self._activation = activation
        self._server = self._read_server()

    def _read_server(self) -> Server:
        settings = self._settings
        ca = None if settings.tls is None else settings.tls.ca
        key = None if settings.key is None else read_node_key(settings.key)
        return Server(settings.server, ca, key)

    def join_and_serve(self) -> None:
        """Join the federation, and stay until the server lets go of this node."""
        if is_plain() or self._options.allow_app_code:
            self._serve_plainly()
        options = self._options
        state = make_state()
        secret = secrets.token_bytes(32)
        with serve_runtime_api(state, secret) as api_address:
            runner_options = RunnerOptions(
                address=api_address,
                secret=secret.hex(),
                parent=os.getpid(),
                app=options.app,
                verbose=options.verbose,
            )
            with start_runner(runner_options) as runner:
                membership = _Membership(
                    self._server.address, runner, self._activation, options.is_done
                )
                self._join(membership, lambda: self._serve(membership, state, secret))

    def _serve_plainly(self) -> NoReturn:
        """Run Flower's own node, again whenever it ends."""
        settings, server = self._settings, self._server
        if not self._options.allow_app_code:
            raise RunError(
                f"{PLAIN_FLOWER} is set, and Flower's own node runs any code that "
                "comes with a run: give --allow-app-code too, or unset it"
            )

        def check() -> None:
            if self._options.is_done():
                raise Stopped

        retry_policy = RetryPolicy(self._options.patience_s)
        while True:
            try:
                require_server(server.address, server.ca)
                serve_plainly(
                    server.address,
                    server.ca,
                    settings.key,
                    settings.file,
                    settings.state / "flwr",
                    check,
                )
            except Refusal as refusal:
                retry_policy.wait(refusal)

    def _join(self, membership: "_Membership", serve: Callable[[], None]) -> None:
        """Call ``serve``, again after refusals, until the node has joined."""
        retry_policy = RetryPolicy(self._options.patience_s)
        while not membership.has_begun:
            try:
                serve()
            except Refusal as refusal:
                if membership.has_begun:
                    log.warning("%s", refusal)
                elif not self._has_made_room(refusal):
                    retry_policy.wait(self._explain(refusal))
            finally:
                if membership.has_begun:
                    self._activation.forget()

    def _explain(self, refusal: Refusal) -> Refusal:
        """Name the key and the doctor's command in a refusal of the key."""
        key = self._server.key
        settings = self._settings
        if not isinstance(refusal, NotAcceptedError) or key is None:
            return refusal
        return NotAcceptedError(
            f"{settings.key}, {fingerprint(key.public_key())}",
            f"knnper site doctor {settings.file}",
        )

    def _serve(self, membership: "_Membership", state: Any, secret: bytes) -> None:
        # The operator may have replaced the key; a half-copied one is read next time.
        with contextlib.suppress(CredentialError):
            self._server = self._read_server()
        require_server(self._server.address, self._server.ca)
        membership.runner.wait_until_ready()
        config: dict[str, Any] = {"config": str(self._settings.file)}
        serve(self._server, state, secret, config, membership.hooks())

    def _has_made_room(self, refusal: Refusal) -> bool:
        """Deactivate the node that a crash of this client left online, if it did."""
        left_behind = self._activation.left_behind()
        if not isinstance(refusal, NotAcceptedError) or left_behind is None:
            return False
        log.info("this client did not leave in order the last time; tidying up")
        with contextlib.suppress(httpx.HTTPError):
            deactivate(self._server, left_behind)
        self._activation.forget()
        # A run that waits for the last node's reply has to see that it is gone: the new
        # node has the same id, and is not sent the message again.
        time.sleep(_NOTICED_S)
        return True


class _Membership:
    """A node's membership in the federation: whether it has begun, and the waits."""

    def __init__(
        self,
        address: str,
        runner: RunnerProcess,
        activation: Activation,
        is_done: Callable[[], bool],
    ) -> None:
        self.has_begun = False
        self.runner = runner
        self._address = address
        self._activation = activation
        self._is_done = is_done
        self._pause = PollPause()
        self._wait_log = WaitLog(address)

    def hooks(self) -> Hooks:
        return Hooks(
            connected=self._begin,
            no_message=self._await_message,
            no_reply=self._await_reply,
            is_heard=lambda: self._pause.is_heard,
            received=self._wait_log.received,
            unreachable=self._wait_log.unreachable,
            reachable=self._wait_log.reachable,
        )

    def _begin(self, node_id: int) -> None:
        self.has_begun = True
        self._activation.note(node_id)
        log.info("in the federation of %s as node %d", self._address, node_id)

    def _await_message(self) -> None:
        if self._is_done():
            raise Stopped
        self._wait_log.idle(self._pause.idle_s)
        self._pause.sleep()

    def _await_reply(self) -> None:
        self.runner.wake()
        time.sleep(REPLY_S)
        self._pause.note_work()


class PollPause:
    """The pause between two requests for messages, which grows with the idle time.

    A request costs the server, so an idle node asks once a second. A gateway that holds
    a request until there is a message is asked again at once.
    """

    def __init__(self) -> None:
        self._last_work = self._asked_at = time.monotonic()
        self._is_held = False  # as the last request was

    @property
    def idle_s(self) -> float:
        """Seconds since the node worked, or began."""
        return time.monotonic() - self._last_work

    @property
    def is_heard(self) -> bool:
        """Whether a request is being held, so that no heartbeat is needed.

        A gateway that holds requests reports the node to Flower
        (`knnper.server.link.gateway`).
        """
        waited_s = time.monotonic() - self._asked_at
        return self._is_held and waited_s < LONGEST_HELD_S

    def note_work(self) -> None:
        """Note that the node works now."""
        self._last_work = time.monotonic()
        self._is_held = False

    def sleep(self) -> None:
        """Wait until the node may ask again."""
        waited_s = time.monotonic() - self._asked_at
        self._is_held = waited_s >= SHORTEST_HELD_S
        interval_s = min(self.idle_s * PART_OF_IDLE_TIME, LONGEST_S)
        time.sleep(max(interval_s - waited_s, SHORTEST_S))
        self._asked_at = time.monotonic()


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Raise `Stopped` in the main thread on SIGTERM; end soon after in any case."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        way_out = threading.Timer(_LEAVE_S, os._exit, (0,))
        way_out.daemon = True
        way_out.start()
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

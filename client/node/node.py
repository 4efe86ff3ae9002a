"""One real client: joins the federation, stays in it, and leaves it in order."""

import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import httpx
from flwr.supernode.nodestate import NodeStateFactory

from client.node import flower_supernode
from client.node.activation import Activation
from client.node.flower_supernode import Hooks, Server
from client.node.lock import locked
from client.node.orders import CLIENT_APP, Orders
from client.node.pace import Pace
from client.node.patience import Patience
from client.node.reach import require_server
from client.node.refusal import NotAcceptedError, Refusal
from client.node.runner_process import RunnerProcess, started
from client.node.runtime_api import runtime_api
from client.settings import ClientSettings
from knnper.transport.credentials.node_keys import fingerprint, read_node_key

log = logging.getLogger(__name__)

PATIENCE_S = 120.0

_LEAVE_S = 1.5
_NOTICED_S = 3.0


@dataclass(frozen=True)
class NodeOptions:
    """How a node is run; nothing of it concerns what is learned.

    Attributes
    ----------
    app
        ``MODULE:NAME`` of the ClientApp that plays every message.
    allow_app_code
        See `Orders`.
    patience_s
        How long the node tries to get into the federation; None is for ever.
    is_done
        Whether the node may leave; asked when it has nothing to do or to send.
    verbose
        Whether what Flower says of every message is logged, too.
    """

    app: str = CLIENT_APP
    allow_app_code: bool = False
    patience_s: float | None = PATIENCE_S
    is_done: Callable[[], bool] = lambda: False
    verbose: bool = False


class Told(BaseException):
    """SIGTERM, or all is done; no `except Exception` of a library holds it up."""


def run_client(settings: ClientSettings, options: NodeOptions) -> None:
    """Be a client of the federation until a signal ends it, or all is done.

    Parameters
    ----------
    settings
        Who and where.
    options
        See `NodeOptions`.

    Raises
    ------
    RunError
        If the state folder is in use, or the server cannot be reached or does not take
        the client for longer than the patience lasts. SIGTERM ends it without an error,
        Ctrl-C with `KeyboardInterrupt`.
    CredentialError
        If the key cannot be read.
    """
    with locked(settings.state) as lock, _told_by_sigterm():
        os.environ["FLWR_HOME"] = str(settings.state / "flwr")
        node = _Node(settings, options, Activation.of(settings.state, lock))
        if settings.insecure:
            log.warning(
                "insecure: true: whoever is on the way reads and changes everything "
                "that this client and the server say to each other"
            )
        try:
            while True:
                node.join_and_serve()
        except Told:
            log.info("told to end")


class _Node:
    def __init__(
        self, settings: ClientSettings, options: NodeOptions, activation: Activation
    ) -> None:
        self._settings = settings
        self._options = options
        self._activation = activation
        ca = None if settings.tls is None else settings.tls.ca
        key = None if settings.key is None else read_node_key(settings.key)
        self._server = Server(settings.server, ca, key)

    def join_and_serve(self) -> None:
        """Join the federation and stay until the server lets go of this node.

        Everything is new each time: what the last connection left undone stays undone.
        """
        state, secret = flower_supernode.new_state(), secrets.token_bytes(32)
        with runtime_api(state, secret) as address:
            options = self._options
            orders = Orders(
                address,
                secret.hex(),
                os.getpid(),
                app=options.app,
                allow_app_code=options.allow_app_code,
                verbose=options.verbose,
            )
            with started(orders) as runner:
                stay = _Stay(self._server, runner, self._activation, options.is_done)
                self._join(stay, lambda: self._serve(stay, state, secret))

    def _join(self, stay: "_Stay", serve: Callable[[], None]) -> None:
        """Try until the stay has begun, and is over."""
        patience = Patience(self._options.patience_s)
        while not stay.has_begun:
            try:
                serve()
            except Refusal as refusal:
                if stay.has_begun:
                    log.warning("%s", refusal)
                elif not self._has_made_room(refusal):
                    patience.bear(self._in_full(refusal))
            finally:
                if stay.has_begun:
                    self._activation.forget()

    def _serve(self, stay: "_Stay", state: NodeStateFactory, secret: bytes) -> None:
        require_server(self._server.address, self._server.ca)
        stay.runner.wait_until_ready()
        flower_supernode.serve(
            self._server,
            state,
            secret,
            {"config": str(self._settings.file)},
            stay.hooks(),
        )

    def _in_full(self, refusal: Refusal) -> Refusal:
        """Return the refusal with what this client alone knows of it."""
        key, settings = self._server.key, self._settings
        if not isinstance(refusal, NotAcceptedError) or key is None:
            return refusal
        about = f"{settings.key}, {fingerprint(key.public_key())}"
        return NotAcceptedError(about, f"knnper doctor --config {settings.file}")

    def _has_made_room(self, refusal: Refusal) -> bool:
        """Take out the node that a crash of this client left online, if it did."""
        left_behind = self._activation.left_behind()
        if not isinstance(refusal, NotAcceptedError) or left_behind is None:
            return False
        log.info("this client did not leave in order the last time; tidying up")
        with contextlib.suppress(httpx.HTTPError):
            flower_supernode.take_out(self._server, left_behind)
        self._activation.forget()
        # A server that waits for the last one's reply has to see that it is gone: the
        # new one goes by the same number, and is not sent the message again.
        time.sleep(_NOTICED_S)
        return True


class _Stay:
    """One stay in the federation."""

    def __init__(
        self,
        server: Server,
        runner: RunnerProcess,
        activation: Activation,
        is_done: Callable[[], bool],
    ) -> None:
        self.has_begun = False
        self._server = server
        self.runner = runner
        self._activation = activation
        self._is_done = is_done
        self._pace = Pace()

    def hooks(self) -> Hooks:
        return Hooks(self._begin, self._await_message, self._await_reply)

    def _begin(self, node_id: int) -> None:
        self.has_begun = True
        self._activation.note(node_id)
        log.info("in the federation of %s as node %d", self._server.address, node_id)

    def _await_message(self) -> None:
        if self._is_done():
            raise Told
        self._pace.wait_for_message()

    def _await_reply(self) -> None:
        self.runner.wake()
        self._pace.wait_for_reply()


@contextlib.contextmanager
def _told_by_sigterm() -> Iterator[None]:
    """Raise `Told` in the main thread on SIGTERM, and end soon whatever happens."""

    def told(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        way_out = threading.Timer(_LEAVE_S, os._exit, (0,))
        way_out.daemon = True
        way_out.start()
        raise Told

    before = signal.signal(signal.SIGTERM, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""How a site's node is started, finds its server, and comes back after a crash.

A node that was killed counts as online for a minute, and Flower refuses a second one
with the same key meanwhile. The state folder is locked, so whoever finds that the last
node of this very folder did not leave may take it out.
"""

import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

import httpx

from knnper.client import flower_node as flower_supernode
from knnper.client.doctor import GATEWAY, server_checks
from knnper.client.flower_node import (
    Activation,
    Hooks,
    NotAcceptedError,
    Orders,
    Refusal,
    RunnerProcess,
    Server,
    locked,
    runtime_api,
    serve_plainly,
    started,
)
from knnper.client.settings import ClientSettings
from knnper.errors import CredentialError, RunError
from knnper.transport.credentials import fingerprint, read_node_key
from knnper.transport.diagnosis import Verdict
from knnper.transport.flower_protocol import PLAIN_FLOWER, is_plain
from knnper.transport.messages import Purpose
from knnper.transport.waiting import FIRST_REMINDER_S, Reminder, duration

SHORTEST_S = 0.05
LONGEST_S = 1.0
PART_OF_IDLE_TIME = 0.05
REPLY_S = 0.01
# A request that took so long to get no message was held; after as long as the second
# the answer is overdue.
SHORTEST_HELD_S, LONGEST_HELD_S = 5.0, 25.0


log = logging.getLogger(__name__)
_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 10.0


class Patience:
    """Bears with refusals: says each kind at once, and repeats it ever more seldom."""

    def __init__(self, lasts_s: float | None) -> None:
        self._end = None if lasts_s is None else time.monotonic() + lasts_s
        self._retry_s = _FIRST_RETRY_S
        self._reminder = Reminder()

    def bear(self, refusal: Refusal) -> None:
        """Say what is wrong and wait, or give up."""
        is_over = self._end is not None and time.monotonic() + self._retry_s > self._end
        if is_over or (refusal.lasting and self._end is not None):
            raise refusal
        if self._reminder.is_due(str(refusal)):
            log.warning(
                "%s. Tried again every %.0f s at least; said again in %s",
                refusal,
                _LONGEST_RETRY_S,
                duration(self._reminder.interval_s),
            )
        time.sleep(self._retry_s)
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)


_REACHED_BY = ("server", "tls", "certificate")


def require_server(server: str, ca: Path | None) -> None:
    """Check address, port and certificate of the server, as the doctor does."""
    for check in server_checks(server, ca):
        if check.subject not in _REACHED_BY:
            continue
        try:
            found = check.look()
        except OSError as error:
            raise Refusal(f"nothing answers at {server} ({error})") from error
        if found.verdict is Verdict.PROBLEM:
            # Of these, a server that is just starting may be the cause.
            passes = check.subject == "server" or found.expected == GATEWAY
            raise Refusal(f"{found.found}; {found.fix}", lasting=not passes)


PATIENCE_S = 120.0
_LEAVE_S = 1.5
_NOTICED_S = 3.0


@dataclass(frozen=True)
class NodeOptions:
    """How a node is run; nothing of it concerns what is learned."""

    app: str
    allow_app_code: bool = False
    patience_s: float | None = PATIENCE_S
    is_done: Callable[[], bool] = lambda: False
    verbose: bool = False


class Told(BaseException):
    """SIGTERM, or all is done; no `except Exception` of a library holds it up."""


def _leave_if(is_done: bool) -> None:
    if is_done:
        raise Told


def run_client(settings: ClientSettings, options: NodeOptions) -> None:
    """Be a client of the federation until a signal ends it, or all is done."""
    with locked(settings.state), _told_by_sigterm():
        os.environ["FLWR_HOME"] = str(settings.state / "flwr")
        node = _Node(settings, options, Activation.of(settings.state))
        if settings.insecure:
            log.warning("insecure: true: whoever is on the way can read and change all")
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
        self._server = self._described_server()

    def _described_server(self) -> Server:
        settings = self._settings
        ca = None if settings.tls is None else settings.tls.ca
        key = None if settings.key is None else read_node_key(settings.key)
        return Server(settings.server, ca, key)

    def join_and_serve(self) -> None:
        """Join the federation and stay until the server lets go of this node."""
        if is_plain():
            self._serve_plainly()
        state, secret = flower_supernode.new_state(), secrets.token_bytes(32)
        with runtime_api(state, secret) as address:
            options = self._options
            ours, app = (address, secret.hex(), os.getpid()), options.app
            orders = Orders(*ours, app, options.allow_app_code, options.verbose)
            with started(orders) as runner:
                address, is_done = self._server.address, options.is_done
                stay = _Stay(address, runner, self._activation, is_done)
                self._join(stay, lambda: self._serve(stay, state, secret))

    def _serve_plainly(self) -> NoReturn:
        """Have Flower's own node in the federation, over and over."""
        settings, server = self._settings, self._server
        if not self._options.allow_app_code:
            raise RunError(
                f"{PLAIN_FLOWER} is set, and Flower's own node runs whatever code "
                "comes with a run: give --allow-app-code too, or unset it"
            )
        patience = Patience(self._options.patience_s)
        home = settings.state / "flwr"
        while True:
            try:
                require_server(server.address, server.ca)
                told = settings.key, settings.file, home
                serve_plainly(server, *told, lambda: _leave_if(self._options.is_done()))
            except Refusal as refusal:
                patience.bear(refusal)

    def _join(self, stay: "_Stay", serve: Callable[[], None]) -> None:
        patience = Patience(self._options.patience_s)
        while not stay.has_begun:
            try:
                serve()
            except Refusal as refusal:
                if stay.has_begun:
                    log.warning("%s", refusal)
                elif not self._has_made_room(refusal):
                    key, settings = self._server.key, self._settings
                    if isinstance(refusal, NotAcceptedError) and key is not None:
                        about = f"{settings.key}, {fingerprint(key.public_key())}"
                        doctor = f"knnper site doctor {settings.file}"
                        refusal = NotAcceptedError(about, doctor)
                    patience.bear(refusal)
            finally:
                if stay.has_begun:
                    self._activation.forget()

    def _serve(self, stay: "_Stay", state: Any, secret: bytes) -> None:
        # Its operator may have replaced the key; one that is half copied is no news.
        with contextlib.suppress(CredentialError):
            self._server = self._described_server()
        require_server(self._server.address, self._server.ca)
        stay.runner.wait_until_ready()
        config: dict[str, Any] = {"config": str(self._settings.file)}
        flower_supernode.serve(self._server, state, secret, config, stay.hooks())

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


class PollPause:
    """The pause between two requests for messages, longer the longer none came.

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
        """Whether a request is being held, which is a sign of life in itself.

        A gateway that holds requests tells Flower so; see `knnper.server.link.gateway`.
        """
        asked_s = time.monotonic() - self._asked_at
        return self._is_held and asked_s < LONGEST_HELD_S

    def note_work(self) -> None:
        """Take note that the node works now."""
        self._last_work, self._is_held = time.monotonic(), False

    def sleep(self) -> None:
        """Wait until the node may ask again."""
        asked_s = time.monotonic() - self._asked_at
        self._is_held = asked_s >= SHORTEST_HELD_S
        interval_s = min(self.idle_s * PART_OF_IDLE_TIME, LONGEST_S)
        time.sleep(max(interval_s - asked_s, SHORTEST_S))
        self._asked_at = time.monotonic()


_LOST_AFTER_S = 5.0  # of failing: a single request may fail for many reasons
_DONE: Mapping[str, str] = MappingProxyType(
    {
        Purpose.INTRODUCE: "a run asked who this client is, and begins, or goes on, "
        "once the clients that it needs have answered",
        Purpose.TRAIN: "the update of round {round} is sent, and the server waits for "
        "the other clients, or has left this one out of the next round",
        Purpose.VALIDATE: "the evaluation of round {round} is sent, and the server "
        "waits for the other clients",
        Purpose.PERSONALIZE: "the trained model is here; another run may follow",
        Purpose.REFUSE: "the server has refused this client, see above",
    }
)


class WaitLog:
    """Logs what a node waits for: the server, other clients or work."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._situation = "no run has asked this client for anything yet"
        self._num_received = 0
        self._idle, self._lost = Reminder(), Reminder()
        self._lost_at: float | None = None
        self._is_lost = False  # and the log says so

    def received(self, message_type: str, group: str) -> None:
        """Note what the node is asked for; the group is the round."""
        done = _DONE.get(message_type, "a message of type {type} is answered")
        self._situation = done.format(round=group, type=message_type)
        self._num_received += 1

    def idle(self, seconds: float) -> None:
        """Log why there is nothing to do: after a minute, then ever more rarely."""
        state = f"{self._num_received}"
        if seconds >= FIRST_REMINDER_S and self._idle.is_due(state):
            log.info("waiting for work, %s: %s", duration(seconds), self._situation)

    def unreachable(self, reason: str) -> None:
        """Log that the server does not answer, once that lasts."""
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        lost_s = now - self._lost_at
        if lost_s < _LOST_AFTER_S or not self._lost.is_due(f"{self._lost_at}"):
            return
        self._is_lost = True
        log.warning(
            "waiting for the server: %s has not answered for %s (%s); trying again "
            "until it does, said again in %s",
            self._server,
            duration(lost_s),
            reason,
            duration(self._lost.interval_s),
        )

    def reachable(self) -> None:
        """Note that the server answers."""
        if self._is_lost and self._lost_at is not None:
            lost_s = time.monotonic() - self._lost_at
            log.info("the server answers again, after %s", duration(lost_s))
        self._lost_at, self._is_lost = None, False


class _Stay:
    def __init__(
        self,
        address: str,
        runner: RunnerProcess,
        activation: Activation,
        is_done: Callable[[], bool],
    ) -> None:
        self.has_begun = False
        self._address = address
        self.runner = runner
        self._activation = activation
        self._is_done = is_done
        self._pause = PollPause()
        self._progress = WaitLog(address)

    def hooks(self) -> Hooks:
        progress = self._progress
        return Hooks(
            connected=self._begin,
            no_message=self._await_message,
            no_reply=self._await_reply,
            is_heard=lambda: self._pause.is_heard,
            received=progress.received,
            unreachable=progress.unreachable,
            reachable=progress.reachable,
        )

    def _begin(self, node_id: int) -> None:
        self.has_begun = True
        self._activation.note(node_id)
        log.info("in the federation of %s as node %d", self._address, node_id)

    def _await_message(self) -> None:
        _leave_if(self._is_done())
        self._progress.idle(self._pause.idle_s)
        self._pause.sleep()

    def _await_reply(self) -> None:
        self.runner.wake()
        time.sleep(REPLY_S)
        self._pause.note_work()


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

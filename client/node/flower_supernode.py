"""Flower's SuperNode, in this process and without its waits of seconds.

One of the two places that know private parts of Flower; the other is `flower_task`. The
version of Flower is pinned for them, and tests check that each is still there:

- ``start_client_internal``: the main loop, with its names ``time``, ``pull_objects``,
  ``register_signal_handlers`` and ``_init_connection``
- ``fleet_http_connection``: its names ``flwr_exit``, ``os`` and
  ``make_simple_http_retry_invoker``
- ``FleetHttpClient`` and what signs its requests
"""

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar
from unittest import mock

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import ISOLATION_MODE_PROCESS
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.retry import (
    RetryInvoker,
    exponential,
    make_simple_http_retry_invoker,
)
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import fleet_http_connection
from flwr.supernode import start_client_internal as main_loop
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.nodestate import NodeStateFactory

from client.node.refusal import Refusal, refusal_of, unknown_key
from knnper.config.errors import RunError

log = logging.getLogger(__name__)

T = TypeVar("T")

_PULL_BACKOFF_S = 0.05
_LONGEST_RETRY_S = 5
_CODE = re.compile(r"\[code: (\d+)\]")


_KeyPair = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]


@dataclass(frozen=True)
class Server:
    """The server and how it knows this client.

    Attributes
    ----------
    address
        ``HOST:PORT`` of the gateway.
    ca
        Certificate of its authority; None for plain HTTP.
    key
        The client's private key; None without authentication.
    """

    address: str
    ca: Path | None
    key: ec.EllipticCurvePrivateKey | None

    def certificate(self) -> bytes | None:
        """Return the authority's certificate, as PEM."""
        return None if self.ca is None else self.ca.read_bytes()

    def key_pair(self) -> _KeyPair | None:
        """Return private and public key."""
        return None if self.key is None else (self.key, self.key.public_key())


@dataclass(frozen=True)
class Hooks:
    """What is to happen while the SuperNode runs.

    Attributes
    ----------
    connected
        Is given the node's id once the server has taken it.
    no_message
        Waits until it is time to ask for a message again.
    no_reply
        Waits a moment for the reply to the message that was received.
    """

    connected: Callable[[int], None]
    no_message: Callable[[], None]
    no_reply: Callable[[], None]


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
    """Be a node of the federation until the server refuses or a signal interrupts.

    Parameters
    ----------
    server
        Whose node.
    state
        Shared with the Runtime API.
    secret
        Of the Runtime API.
    node_config
        What ClientApps find in their context.
    hooks
        See `Hooks`.

    Raises
    ------
    Refusal
        If the server does not take the node, or not any more.
    """
    unknown: list[Refusal] = []
    try:
        with _adapted(hooks, unknown):
            main_loop.start_client_internal(
                state_factory=state,
                server_address=server.address,
                node_config=node_config,
                root_certificates=server.certificate(),
                insecure=server.ca is None,
                authentication_keys=server.key_pair(),
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
    """Tell the server that a node of this key is gone.

    Raises
    ------
    httpx.HTTPError
        If the server does not answer or does not agree.
    """
    key_pair = server.key_pair()
    if key_pair is None:
        return
    with FleetHttpClient.from_server_address(
        server.address,
        server.ca is None,
        server.certificate(),
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(*key_pair),
        ],
    ) as client:
        client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))


@contextlib.contextmanager
def _adapted(hooks: Hooks, unknown: list[Refusal]) -> Iterator[None]:
    """Replace what waits for seconds or ends the process; see the module."""
    patches: tuple[tuple[object, str, object], ...] = (
        (main_loop, "time", SimpleNamespace(sleep=_waiting(hooks))),
        (main_loop, "pull_objects", _pulling()),
        (main_loop, "register_signal_handlers", _no_handlers),
        (main_loop, "_init_connection", _announcing(hooks.connected)),
        (fleet_http_connection, "flwr_exit", _refuse),
        (fleet_http_connection, "os", _noting(unknown)),
        (fleet_http_connection, "make_simple_http_retry_invoker", _retries()),
    )
    with contextlib.ExitStack() as stack:
        for place, name, replacement in patches:
            stack.enter_context(mock.patch.object(place, name, replacement))
        yield


def _waiting(hooks: Hooks) -> Callable[[float], None]:
    """Return what becomes of the main loop's sleeps of 3 s and of 0.5 s."""

    def sleep(seconds: float) -> None:
        if seconds > 1:
            hooks.no_message()
        else:
            hooks.no_reply()

    return sleep


def _pulling() -> Callable[..., dict[str, bytes]]:
    return _tidied_up(functools.partial(pull_objects, initial_backoff=_PULL_BACKOFF_S))


def _tidied_up(receive: Callable[..., T]) -> Callable[..., T]:
    """Return a part of receiving a message that fails plainly when its run has ended.

    Flower's main loop then takes back the task that it has made for the message. It
    forgets to where the end of the run is not a plain error, and a runner would wait
    for ever for the message of that task.
    """

    @functools.wraps(receive)
    def received(*args: Any, **kwargs: Any) -> T:
        try:
            return receive(*args, **kwargs)
        except RunNotRunningException as error:
            raise RunError("the run has ended meanwhile") from error

    return received


def _no_handlers(**kwargs: object) -> None:
    """Leave signals to the process; Flower's way out takes seconds."""


def _announcing(connected: Callable[[int], None]) -> Callable[..., Any]:
    connect = main_loop._init_connection

    @contextlib.contextmanager
    def announce(**kwargs: Any) -> Iterator[Any]:
        with connect(**kwargs) as connection:
            connected(connection[0])
            *parts, confirm_message_received = connection
            yield (*parts, _tidied_up(confirm_message_received))

    return announce


def _refuse(code: int, message: str = "") -> NoReturn:  # noqa: ARG001 (as Flower's)
    found = _CODE.search(message)
    raise _Ended(refusal_of(int(found[1]) if found else 0, message))


def _noting(unknown: list[Refusal]) -> SimpleNamespace:
    """Return the parts of `os` with which the heartbeat ends a process unknown."""

    def kill(process: int, number: int) -> None:
        unknown.append(unknown_key())
        os.kill(process, number)

    return SimpleNamespace(getpid=os.getpid, kill=kill)


def _retries() -> Callable[[], RetryInvoker]:
    """Return a maker of retries that come back soon and say what they cannot mend."""

    def made() -> RetryInvoker:
        invoker = make_simple_http_retry_invoker()
        is_hopeless = invoker.should_giveup

        def give_up(error: Exception) -> bool:
            if _is_unauthorized(error):
                raise _Ended(unknown_key())
            return is_hopeless is not None and is_hopeless(error)

        invoker.should_giveup = give_up
        invoker.wait_gen_factory = lambda: exponential(max_delay=_LONGEST_RETRY_S)
        return invoker

    return made


def _is_unauthorized(error: Exception) -> bool:
    return (
        isinstance(error, httpx.HTTPStatusError)
        and error.response.status_code == httpx.codes.UNAUTHORIZED
    )

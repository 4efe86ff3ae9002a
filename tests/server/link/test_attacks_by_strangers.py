"""What whoever reaches the gateway can do to it: next to nothing.

The whole server runs: its processes are what is measured.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node

from knnper.transport.credentials import new_node_key, read_node_key
from tests.server.link.peers import FLEET, PROTOBUF, Peer, connected, head, peer, signed
from tests.server.link.running_server import RunningServer, running_server

pytestmark = pytest.mark.slow
NUM_BODIES, BODY, PIECE = 40, 60_000_000, 1 << 20
MOST_MB = 100
SLOT_S = 15.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("fed"), ("site-a", "site-b")) as one:
        yield one


@pytest.fixture(scope="module")
def honest(server: RunningServer) -> Iterator[Peer]:
    with peer(server.gateway, ca(server), key(server, "site-a")) as one:
        one.activate()
        yield one


def ca(server: RunningServer) -> Path:
    return server.folder.client("site-a") / "ca.crt"


def key(server: RunningServer, name: str) -> EllipticCurvePrivateKey:
    return read_node_key(server.folder.client(name) / f"{name}.key")


def is_well(server: RunningServer, honest: Peer) -> None:
    """See that the server lives, and that nothing went wrong inside."""
    honest.post(
        "pull-messages", PullMessagesRequest(node=honest.node)
    ).raise_for_status()
    for log in (server.said, (server.settings.state / "superlink.log").read_text()):
        assert "Traceback" not in log


def at_once(works: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _push(connection: socket.socket, start: bytes) -> None:
    with contextlib.suppress(OSError), connection:
        connection.sendall(start)
        piece = bytes(PIECE)
        for _ in range(0, BODY, PIECE):
            connection.sendall(piece)
        connection.recv(1000)


@pytest.mark.parametrize("who", ["stranger", "unregistered", "forger"])
def test_bodies_of_strangers_take_no_memory(
    who: str, server: RunningServer, honest: Peer
) -> None:
    headers = PROTOBUF
    if who == "unregistered":
        headers = signed(new_node_key())
    if who == "forger":  # a registered key, which is no secret, without its signature
        headers = {**signed(key(server, "site-b")), "flwr-signature": "AAAA"}
    start = head(f"{FLEET}push-object", BODY, headers)
    with server.growth() as grown:
        at_once(
            [
                partial(_push, connected(server.gateway, ca(server)), start)
                for _ in range(NUM_BODIES)
            ]
        )
    assert grown[0] < MOST_MB
    is_well(server, honest)


def test_headers_and_requests_without_end_take_no_memory(
    server: RunningServer, honest: Peer
) -> None:
    endless: list[Callable[[], bytes]] = [
        lambda: b"x-y: " + b"z" * 8000 + b"\r\n",
        lambda: b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 500,
    ]
    for more in endless:
        sent: list[int] = []

        def send(more: Callable[[], bytes] = more, sent: list[int] = sent) -> None:
            with (
                contextlib.suppress(OSError),
                connected(server.gateway, ca(server)) as connection,
            ):
                connection.settimeout(3)
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
                for _ in range(4000):
                    connection.sendall(more())
                    sent.append(1)

        with server.growth() as grown:
            at_once([send] * 10)
        assert grown[0] < MOST_MB
    is_well(server, honest)


def nested(depth: int) -> bytes:
    """Return a tree of that depth: no parser of protobuf follows so far."""
    body = b""
    for _ in range(depth):
        body = b"\x12" + _varint(len(body)) + body
    return b"\x1a" + _varint(len(body)) + body


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def crafted(node_id: int) -> dict[str, tuple[str, bytes]]:
    """Return bodies that are small, and are not small once they are parsed."""
    who = PullMessagesRequest(node=Node(node_id=node_id)).SerializeToString()
    empty = ObjectTree(children=[ObjectTree()] * 1_000_000).SerializeToString()
    return {
        "nested": ("push-messages", who + nested(10_000)),
        "length": ("push-object", who + b"\x22" + _varint(1 << 62) + b"x"),
        "short": ("push-object", who + b"\x22" + _varint(5_000_000) + b"x"),
        "types": ("push-messages", b"\x08\x01\x10\x02\x18\x03"),
        "groups": ("get-run", b"\x0b" * 50_000),
        "empty trees": ("push-messages", who + b"\x1a" + _varint(len(empty)) + empty),
        "empty messages": ("push-messages", who + b"\x12\x00" * 2_000_000),
        "empty ids": ("pull-messages", who + b"\x12\x00" * 2_000_000),
        "unknown fields": ("get-run", who + b"\xfa\x01\x00" * 2_000_000),
    }


def post_all(
    attacker: Peer, bodies: dict[str, tuple[str, bytes]], **how: dict[str, str]
) -> None:
    for case, (path, body) in bodies.items():
        for _ in range(3):
            answer = attacker.post(path, body, how.get("headers"))
            assert 400 <= answer.status_code < 500, case


@pytest.mark.parametrize("who", ["stranger", "unregistered"])
def test_crafted_bodies_of_strangers_are_not_parsed(
    who: str, server: RunningServer, honest: Peer
) -> None:
    headers = PROTOBUF if who == "stranger" else signed(new_node_key())
    with server.growth() as grown:
        for case, (path, body) in crafted(honest.node_id).items():
            with connected(server.gateway, ca(server)) as connection:
                start = head(f"{FLEET}{path}", len(body), headers)
                with contextlib.suppress(OSError):
                    connection.sendall(start + body)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(100).startswith(b"HTTP/1.1 401"), case
    assert grown[0] < MOST_MB
    is_well(server, honest)


def test_crafted_bodies_of_clients_are_refused(
    server: RunningServer, honest: Peer
) -> None:
    with server.growth() as grown:
        post_all(honest, crafted(honest.node_id))
    assert grown[0] < MOST_MB
    is_well(server, honest)


@pytest.mark.parametrize("who", ["stranger", "client"])
@pytest.mark.parametrize("how", ["header", "body", "nothing"])
def test_slow_peers_lose_their_place_in_seconds(
    how: str, who: str, server: RunningServer, honest: Peer
) -> None:
    headers = PROTOBUF if who == "stranger" else signed(key(server, "site-b"))
    start = head(f"{FLEET}push-object", 5_000_000, headers)
    said = {"header": start[:-3], "body": start + bytes(100), "nothing": b""}[how]
    with contextlib.ExitStack() as held:
        slow = [
            held.enter_context(connected(server.gateway, ca(server)))
            for _ in range(100)
        ]
        ended: list[float] = []
        began = time.monotonic()

        def drip(connection: socket.socket) -> None:
            """Send a byte a second: never idle, never fast."""
            connection.settimeout(1.0)
            with contextlib.suppress(OSError):
                connection.sendall(said)
                while time.monotonic() - began < 4 * SLOT_S:
                    with contextlib.suppress(TimeoutError):
                        if not connection.recv(1000):
                            break
                    if how != "nothing":
                        connection.sendall(b"x")
            ended.append(time.monotonic() - began)

        threads = [threading.Thread(target=drip, args=(one,)) for one in slow]
        for thread in threads:
            thread.start()
        for _ in range(5):  # honest clients get through meanwhile
            is_well(server, honest)
        for thread in threads:
            thread.join()
    assert max(ended) < SLOT_S

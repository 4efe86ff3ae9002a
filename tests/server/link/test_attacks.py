"""Attacks of strangers and clients on a server, which keeps serving the others.

The refusal of single requests is tested in `test_gateway` and `test_replies`.
"""

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node

from knnper.transport.credentials import new_node_key
from tests.processes import wait_until
from tests.server.link.peers import (
    FLEET,
    PROTOBUF,
    Peer,
    connected,
    deflated,
    head,
    id_of,
    peer,
    reply_to,
    signed,
)
from tests.server.link.running_server import (
    MessageRun,
    RunningServer,
    running_server,
    submitted,
)

pytestmark = pytest.mark.slow
NUM_BODIES, BODY, PIECE = 40, 60_000_000, 1 << 20
CHUNK = 5_000_000
MOST_MB = 100
NAMES = ("evil", "good", "other")


@dataclass
class Scene:
    """A server and three peers; the first one attacks."""

    server: RunningServer
    evil: Peer
    good: Peer
    other: Peer
    folder: Path
    num_runs: int = 0

    @property
    def ca(self) -> Path:
        return self.server.folder.client("evil") / "ca.crt"

    def run(self, *peers: Peer, **config: int) -> MessageRun:
        self.num_runs += 1
        self.beat()
        nodes = [peer.node_id for peer in peers]
        return submitted(self.server, self.folder / str(self.num_runs), nodes, **config)

    def beat(self) -> None:
        """Keep all online."""
        for client in (self.evil, self.good, self.other):
            request = SendNodeHeartbeatRequest(node=client.node, heartbeat_interval=30)
            client.post("send-node-heartbeat", request).raise_for_status()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("clients")
    with (
        running_server(folder / "fed", NAMES) as server,
        contextlib.ExitStack() as held,
    ):
        peers: list[Peer] = []
        for name in NAMES:
            client = server.folder.client(name)
            key = client / f"{name}.key"
            opened = held.enter_context(peer(server.gateway, client / "ca.crt", key))
            opened.activate()
            peers.append(opened)
        evil, good, other = peers
        yield Scene(server, evil, good, other, folder)
        for log in (
            server.printed,
            (server.settings.state / "superlink.log").read_text(),
        ):
            assert "Traceback" not in log


@pytest.mark.parametrize("stranger", ["stranger", "unregistered", "forger"])
def test_bodies_of_strangers_take_no_memory(stranger: str, scene: Scene) -> None:
    # A registered key is no secret; its signature is.
    headers = {
        "stranger": PROTOBUF,
        "unregistered": signed(new_node_key()),
        "forger": {**signed(scene.good.key), "flwr-signature": "AAAA"},
    }[stranger]
    start = head(f"{FLEET}push-object", BODY, headers)

    def push(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.sendall(start)
            piece = bytes(PIECE)
            for _ in range(0, BODY, PIECE):
                connection.sendall(piece)
            connection.recv(1000)

    with scene.server.growth() as grown:
        threads = [
            threading.Thread(
                target=push, args=(connected(scene.server.gateway, scene.ca),)
            )
            for _ in range(NUM_BODIES)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert grown[0] < MOST_MB
    scene.beat()


def test_long_headers_are_refused(scene: Scene) -> None:
    path, long = f"{FLEET}pull-messages", 9_000 * ";"
    for target, headers in (
        (path, {**PROTOBUF, "content-type": f'a/b; x="{long}"'}),
        (path, {**signed(scene.evil.key), "flwr-signature": long}),
        (f"{path}?{long}", PROTOBUF),
    ):
        with connected(scene.server.gateway, scene.ca) as connection:
            connection.sendall(head(target, 0, headers))
            assert connection.recv(1000).startswith(b"HTTP/1.1 431 ")
    scene.beat()


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


def test_crafted_bodies_of_clients_are_refused(scene: Scene) -> None:
    """They are small, and are not small once they are parsed."""
    node = Node(node_id=scene.evil.node_id)
    pull_request = PullMessagesRequest(node=node).SerializeToString()
    empty = ObjectTree(children=[ObjectTree()] * 1_000_000).SerializeToString()
    crafted = {
        "nested": ("push-messages", pull_request + nested(10_000)),
        "length": ("push-object", pull_request + b"\x22" + _varint(1 << 62) + b"x"),
        "short": ("push-object", pull_request + b"\x22" + _varint(5_000_000) + b"x"),
        "types": ("push-messages", b"\x08\x01\x10\x02\x18\x03"),
        "groups": ("get-run", b"\x0b" * 50_000),
        "empty trees": (
            "push-messages",
            pull_request + b"\x1a" + _varint(len(empty)) + empty,
        ),
        "empty messages": ("push-messages", pull_request + b"\x12\x00" * 2_000_000),
        "empty ids": ("pull-messages", pull_request + b"\x12\x00" * 2_000_000),
        "unknown fields": ("get-run", pull_request + b"\xfa\x01\x00" * 2_000_000),
    }
    with scene.server.growth() as grown:
        for case, (path, body) in crafted.items():
            for _ in range(3):
                assert scene.evil.post(path, body).is_client_error, case
    assert grown[0] < MOST_MB
    scene.beat()


def taken(peer: Peer) -> Message:
    """Return the next message, with all its objects fetched."""
    message, tree = peer.receive()
    peer.take(message, tree)
    return message


def test_client_cannot_reply_for_another_client(scene: Scene) -> None:
    evil, good = scene.evil, scene.good
    run = scene.run(evil, good)
    mine, (other_request, _) = taken(evil), good.receive()
    honest, stolen = reply_to(mine), reply_to(other_request)
    before = len(scene.server.printed)
    assert evil.announce(stolen).is_client_error
    assert "another client" in scene.server.printed[before:]
    # A reply whose object contradicts its announcement.
    claimed = Metadata()
    claimed.CopyFrom(honest.metadata)
    claimed.reply_to_message_id = other_request.metadata.message_id
    claimed.src_node_id = good.node_id
    before = len(scene.server.printed)
    assert evil.send(dataclasses.replace(honest, claimed=claimed))[-1].is_client_error
    assert "evil" in scene.server.printed[before:]
    good.send(stolen)[-1].raise_for_status()
    assert run.finished() == "finished completed"
    senders = {reply["to"]: (reply["from"], reply["error"]) for reply in run.replies}
    assert senders[good.node_id] == (good.node_id, None)
    # The round did not wait for it: the gateway answered in its place, with an error.
    source, error = senders[evil.node_id]
    assert source == evil.node_id
    assert error is not None


def test_a_reply_without_end_is_refused_and_the_round_goes_on(scene: Scene) -> None:
    evil, good, other = scene.evil, scene.good, scene.other
    run = scene.run(evil, good, other, rounds=3)
    names = [id_of(_content(number)) for number in range(320)]  # 1.6 GB
    answers: list[int] = []

    def push() -> None:
        children = [ObjectTree(object_id=name) for name in names]
        tree = ObjectTree(object_id="ab" * 32, children=children)
        endless = dataclasses.replace(reply_to(taken(evil)), tree_inside=tree)
        response = PushMessagesResponse.FromString(evil.announce(endless).content)
        for number, name in enumerate(names):
            content = _content(number)
            pushed = evil.push(run.run_id, response.session_id, name, content)
            answers.append(pushed.status_code)
            if not pushed.is_success:
                return

    def answer(client: Peer) -> None:
        for _ in range(3):
            client.answer()

    state = scene.server.settings.state
    with scene.server.growth() as grown, ThreadPoolExecutor(3) as pool:
        pushing = pool.submit(push)
        answering = [pool.submit(answer, client) for client in (good, other)]
        pushing.result()
        assert 400 <= answers[-1] < 500
        assert len(answers) < 100
        scene.beat()
        for _ in range(2):
            evil.answer()
        for future in answering:
            future.result()
    assert "evil" in scene.server.printed
    assert "MB" in scene.server.printed
    assert grown[0] < MOST_MB + 150  # the run's own process, too
    assert run.finished() == "finished completed"
    assert len(run.replies) == 9
    refused = [reply for reply in run.replies if reply["error"]]
    assert [(reply["round"], reply["from"]) for reply in refused] == [(0, evil.node_id)]
    files = [state / f"superlink.db{end}" for end in ("", "-wal")]
    wait_until(lambda: sum(file.stat().st_size for file in files) < 20e6, timeout_s=30)


def _content(number: int) -> bytes:
    return deflated("ArrayChunk", number.to_bytes(8, "big") * (CHUNK // 8))


def test_large_bodies_of_a_client_take_turns(scene: Scene) -> None:
    content = deflated("ArrayChunk", bytes(15_000_000))
    with scene.server.growth() as grown, ThreadPoolExecutor(40) as pool:
        for _ in range(40):
            pool.submit(scene.evil.push, 1, "", "ab" * 32, content)
    assert grown[0] < 2 * MOST_MB
    scene.beat()

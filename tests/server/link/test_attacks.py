"""What strangers and clients do to a server: it goes on for the others."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesResponse,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from knnper.transport.credentials import new_node_key, read_node_key
from tests.processes import wait_until
from tests.server.link.peers import (
    FLEET,
    PROTOBUF,
    Peer,
    Reply,
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


CHUNK = 5_000_000
NAMES = ("evil", "good", "other")


@dataclass
class Scene:
    """A server and three peers, of which the first is up to no good."""

    server: RunningServer
    evil: Peer
    good: Peer
    other: Peer
    folder: Path
    num_runs: int = 0

    def run(self, *peers: Peer, **config: int) -> MessageRun:
        self.num_runs += 1
        self.beat()
        nodes = [one.node_id for one in peers]
        return submitted(self.server, self.folder / str(self.num_runs), nodes, **config)

    def beat(self) -> None:
        """Keep all online."""
        for one in (self.evil, self.good, self.other):
            request = SendNodeHeartbeatRequest(node=one.node, heartbeat_interval=30)
            one.post("send-node-heartbeat", request).raise_for_status()

    def is_refused(self, answers: Callable[[], list[int]], *words: str) -> None:
        """See that the last answer is a refusal that the server's log explains."""
        before = len(self.server.said)
        assert 400 <= answers()[-1] < 500
        for word in ("evil", *words):
            assert word in self.server.said[before:]


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
            one = held.enter_context(peer(server.gateway, client / "ca.crt", key))
            one.activate()
            peers.append(one)
        evil, good, other = peers
        yield Scene(server, evil, good, other, folder)
        for log in (server.said, (server.settings.state / "superlink.log").read_text()):
            assert "Traceback" not in log


def taken(peer: Peer) -> Message:
    """Return the next message, with all its objects fetched."""
    message, tree = peer.receive()
    peer.take(message, tree)
    return message


def statuses(peer: Peer, reply: Reply) -> Callable[[], list[int]]:
    return lambda: [one.status_code for one in peer.send(reply)]


def changed(reply: Reply, **fields: object) -> Reply:
    metadata = Metadata()
    metadata.CopyFrom(reply.metadata)
    for name, value in fields.items():
        setattr(metadata, name, value)
    return dataclasses.replace(reply, metadata=metadata)


def inside(reply: Reply, **fields: object) -> Reply:
    """Return a reply whose own object says something else than its announcement."""
    return dataclasses.replace(reply, claimed=changed(reply, **fields).metadata)


def test_nobody_answers_for_somebody_else(scene: Scene) -> None:
    evil, good, other = scene.evil, scene.good, scene.other
    run = scene.run(evil, good)
    mine, (theirs, _) = taken(evil), good.receive()
    honest, stolen = reply_to(mine), reply_to(theirs)
    forged = {
        "another's reply": stolen,
        "source": changed(honest, src_node_id=good.node_id),
        "the server": changed(honest, src_node_id=1),
        "to a client": changed(honest, dst_node_id=good.node_id),
        "another's message": changed(stolen, src_node_id=evil.node_id),
        "invented": changed(honest, reply_to_message_id="ab" * 32),
        "no reply": changed(honest, reply_to_message_id=""),
        "another run": changed(honest, run_id=run.run_id + 1),
    }
    for case, reply in forged.items():
        answer = evil.announce(reply)
        assert 400 <= answer.status_code < 500, case
        assert "evil" in scene.server.said, case
    assert "another client" in scene.server.said
    # Somebody to whom nothing was sent.
    assert other.announce(changed(honest, src_node_id=other.node_id)).is_client_error
    lying = inside(
        honest, reply_to_message_id=theirs.metadata.message_id, src_node_id=good.node_id
    )
    scene.is_refused(statuses(evil, lying))
    good.send(stolen)[-1].raise_for_status()
    assert run.finished() == "finished completed"
    told = {one["to"]: (one["from"], one["error"]) for one in run.replies}
    assert told[good.node_id] == (good.node_id, None)
    # The round did not wait for it: the gateway answered in its place, with an error.
    source, error = told[evil.node_id]
    assert source == evil.node_id
    assert error is not None


def test_a_message_is_answered_once(scene: Scene) -> None:
    evil, good = scene.evil, scene.good
    run = scene.run(evil, good)
    mine, (theirs, _) = taken(evil), good.receive()
    first = reply_to(mine)
    assert evil.send(first)[-1].is_success
    again = changed(first, created_at=first.metadata.created_at + 0.5)
    scene.is_refused(statuses(evil, again), "answered")
    assert good.send(reply_to(theirs))[-1].is_success
    assert run.finished() == "finished completed"
    assert len(run.replies) == 2


def test_nobody_gets_at_what_is_another_clients(scene: Scene) -> None:
    evil, good = scene.evil, scene.good
    run = scene.run(good)
    message, tree = good.receive()
    root, node = tree.object_id, evil.node
    stranger = Node(node_id=good.node_id)
    asked = {
        "pull-object": PullObjectRequest(node=node, run_id=run.run_id, object_id=root),
        "confirm-message-received": ConfirmMessageReceivedRequest(
            node=node, run_id=run.run_id, message_object_id=root
        ),
        "get-run": GetRunRequest(node=node, run_id=run.run_id),
        "get-fab": GetFabRequest(node=node, run_id=run.run_id, hash_str="ab" * 32),
    }
    own = {
        "pull-messages": PullMessagesRequest(node=stranger),
        "send-node-heartbeat": SendNodeHeartbeatRequest(
            node=stranger, heartbeat_interval=30
        ),
        "deactivate-node": DeactivateNodeRequest(node_id=good.node_id),
        "get-run": GetRunRequest(node=stranger, run_id=run.run_id),
    }
    for bodies in (asked, own):
        for path, body in bodies.items():
            answer = evil.post(path, body)
            assert 400 <= answer.status_code < 500, path
    good.take(message, tree)  # It is all there yet.
    reply = reply_to(message)
    announced = PushMessagesResponse.FromString(good.announce(reply).content)
    name, content = next(iter(reply.objects.items()))
    pushed = evil.push(run.run_id, announced.session_id, name, content)
    assert pushed.is_client_error
    good.send(reply)[-1].raise_for_status()
    assert run.finished() == "finished completed"
    assert [one["error"] for one in run.replies] == [None]


def test_trees_that_are_none_are_refused(scene: Scene) -> None:
    evil = scene.evil
    run = scene.run(evil)
    mine = taken(evil)
    honest = reply_to(mine)
    leaf, child = "ab" * 32, honest.tree.children[0].object_id
    trees = {
        "no ids": ObjectTree(object_id="x"),
        "twice": _tree(honest.tree.object_id, leaf, leaf),
        "in itself": _tree(honest.tree.object_id, honest.tree.object_id),
        "of two kinds": ObjectTree(
            object_id=honest.tree.object_id,
            children=[_tree(child, leaf), _tree("cd" * 32, child)],
        ),
        "another root": _tree(leaf, child),
    }
    for case, wrong in trees.items():
        request = honest.request(evil.node_id)
        request.message_object_trees[0].CopyFrom(wrong)
        assert evil.post("push-messages", request).is_client_error, case
    for change in ("ttl", "created_at"):
        for value in (float("nan"), float("inf"), -1.0):
            wrong_time = changed(honest, **{change: value})
            assert evil.announce(wrong_time).is_client_error, (change, value)
    nan = honest.request(evil.node_id)
    nan.clientapp_runtime_list[0] = float("nan")
    assert evil.post("push-messages", nan).is_client_error
    for how in (b"", b"ArrayChunk  5\0four", b"Pickle  4\0four", b"\0\0\0"):
        assert evil.push(run.run_id, "", id_of(how), how).is_client_error
    assert evil.send(honest)[-1].is_success
    assert run.finished() == "finished completed"


def arrays(size: int) -> RecordDict:
    numbers = np.random.default_rng(size).standard_normal(size, np.float32)
    return RecordDict({"reply": ArrayRecord({"x": Array(numbers)})})


def _tree(root: str, *children: str) -> ObjectTree:
    return ObjectTree(
        object_id=root, children=[ObjectTree(object_id=one) for one in children]
    )


def test_objects_are_what_was_announced(scene: Scene) -> None:
    """Else the server's own message of a later round might be in the way."""
    evil, good = scene.evil, scene.good
    run = scene.run(evil, good)
    mine, (theirs, _) = taken(evil), good.receive()
    reply = reply_to(mine, arrays(100))
    name, content = next(iter(reply.objects.items()))
    told = PushMessagesResponse.FromString(evil.announce(reply).content)
    wrong = evil.push(run.run_id, told.session_id, name, content + b"more")
    assert wrong.is_client_error
    good.send(reply_to(theirs))[-1].raise_for_status()
    assert run.finished() == "finished completed"
    errors = {one["from"]: one["error"] for one in run.replies}
    assert errors[good.node_id] is None
    assert errors[evil.node_id] is not None


def test_a_reply_without_end_is_refused_and_the_round_goes_on(scene: Scene) -> None:
    evil, good, other = scene.evil, scene.good, scene.other
    run = scene.run(evil, good, other, rounds=3)
    pieces = {number: _piece(number) for number in range(320)}  # 1.6 GB
    answers: list[int] = []

    def push() -> None:
        mine = taken(evil)
        tree = _tree("ab" * 32, *(name for name, _ in pieces.values()))
        endless = dataclasses.replace(reply_to(mine), tree_inside=tree)
        told = PushMessagesResponse.FromString(evil.announce(endless).content)
        for name, number in pieces.values():
            content = _content(number)
            pushed = evil.push(run.run_id, told.session_id, name, content)
            answers.append(pushed.status_code)
            if not pushed.is_success:
                return

    def answer(one: Peer) -> None:
        for _ in range(3):
            one.answer()

    state = scene.server.settings.state
    with scene.server.growth() as grown, ThreadPoolExecutor(3) as pool:
        pushing = pool.submit(push)
        answering = [pool.submit(answer, one) for one in (good, other)]
        pushing.result()
        assert 400 <= answers[-1] < 500
        assert len(answers) < 100
        scene.beat()
        for _ in range(2):
            mine = taken(evil)
            evil.send(reply_to(mine))[-1].raise_for_status()
        for one in answering:
            one.result()
    assert "evil" in scene.server.said
    assert "MB" in scene.server.said
    assert grown[0] < MOST_MB + 150  # the run's own process, too
    assert run.finished() == "finished completed"
    assert len(run.replies) == 9
    refused = [one for one in run.replies if one["error"]]
    assert [(one["round"], one["from"]) for one in refused] == [(0, evil.node_id)]
    files = [state / f"superlink.db{end}" for end in ("", "-wal")]
    wait_until(lambda: sum(file.stat().st_size for file in files) < 20e6, timeout_s=30)


def _content(number: int) -> bytes:
    return deflated("ArrayChunk", number.to_bytes(8, "big") * (CHUNK // 8))


def _piece(number: int) -> tuple[str, int]:
    return id_of(_content(number)), number


def test_large_bodies_of_a_client_take_turns(scene: Scene) -> None:
    evil = scene.evil
    content = deflated("ArrayChunk", bytes(15_000_000))
    with scene.server.growth() as grown, ThreadPoolExecutor(40) as pool:
        for _ in range(40):
            pool.submit(evil.push, 1, "", "ab" * 32, content)
    assert grown[0] < 2 * MOST_MB
    scene.beat()


def test_honest_rounds(scene: Scene) -> None:
    peers = (scene.evil, scene.good, scene.other)
    run = scene.run(*peers, rounds=4, size=3_000_000)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(4):
            list(pool.map(lambda one: one.answer(arrays(3_000_000)), peers))
    assert run.finished() == "finished completed"
    assert len(run.replies) == 12
    assert not [one for one in run.replies if one["error"]]


def test_without_authentication_a_node_speaks_for_itself_too(tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "fed", insecure=True) as server,
        peer(server.gateway, None, new_node_key()) as honest,
        peer(server.gateway, None, new_node_key()) as evil,
    ):
        for one in (honest, evil):
            public = public_key_to_bytes(one.key.public_key())
            one.post("register-node", RegisterNodeFleetRequest(public_key=public))
            one.activate()
        run = submitted(server, tmp_path / "run", [honest.node_id], size=2_000_000)
        message, tree = honest.receive()
        for reply in (reply_to(message), changed(reply_to(message), src_node_id=1)):
            answer = evil.announce(reply)
            assert answer.is_client_error or answer.status_code == 503
        claimed = PullMessagesRequest(node=honest.node)
        assert evil.post("pull-messages", claimed).status_code == 401
        assert honest.post("pull-messages", claimed, PROTOBUF).status_code == 401
        honest.take(message, tree)
        reply = reply_to(message, arrays(2_000_000))
        wait_until(lambda: honest.announce(reply).is_success)
        honest.send(reply)[-1].raise_for_status()
        assert run.finished() == "finished completed"
        assert [one["error"] for one in run.replies] == [None]

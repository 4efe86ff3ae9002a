"""What a registered client can do to the server and to the others: its own part.

The whole server runs, with a run that waits for replies.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
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

from knnper.transport.credentials import new_node_key
from tests.processes import wait_until
from tests.server.link.message_run import MessageRun, submitted
from tests.server.link.peers import (
    PROTOBUF,
    Peer,
    Reply,
    deflated,
    id_of,
    peer,
    reply_to,
)
from tests.server.link.running_server import RunningServer, running_server

pytestmark = pytest.mark.slow
CHUNK = 5_000_000
MOST_MB = 100
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

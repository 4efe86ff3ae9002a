"""Requests that the gateway holds, or answers without Flower."""

import contextlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from flwr.proto import fleet_pb2
from flwr.proto.heartbeat_pb2 import (
    SendNodeHeartbeatRequest,
    SendNodeHeartbeatResponse,
)
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import Node

from knnper.server.link import arrivals
from knnper.server.link.gateway_rules import RegisteredClients
from knnper.server.link.presence import Presence
from knnper.transport import flower_protocol as flower
from knnper.transport.credentials import fingerprint
from tests.processes import wait_until
from tests.server.link.gateway_stage import KEY, NODE, ROSTER, Stage, gateway_stage
from tests.server.link.peers import Peer, head, signed

WHO = Node(node_id=NODE)
PULL = fleet_pb2.PullMessagesRequest(node=WHO)
RUN, NAME = 5, "ab" * 32
BEAT = SendNodeHeartbeatRequest(node=WHO, heartbeat_interval=30)


def answer_with(name: str = NAME) -> bytes:
    """Return Flower's answer with one message."""
    metadata = Metadata(run_id=RUN, message_id=name, created_at=time.time(), ttl=60)
    metadata.dst_node_id = NODE
    answer: bytes = fleet_pb2.PullMessagesResponse(
        messages_list=[Message(metadata=metadata)],
        message_object_trees=[ObjectTree(object_id=name)],
    ).SerializeToString()
    return answer


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(arrivals, "SHORTEST_HOLD_S", 15.0)
    with gateway_stage() as opened:
        opened.announce()
        opened.upstream.content = b""
        yield opened


@contextlib.contextmanager
def held(stage: Stage, client: Peer | None = None) -> Iterator[Future[httpx.Response]]:
    """Yield a request for messages for which Flower has nothing yet."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit((client or stage.client).post, "pull-messages", PULL)
        time.sleep(0.1)
        assert not answer.done()
        yield answer


def test_a_request_is_answered_once_a_message_is_announced(stage: Stage) -> None:
    with held(stage) as answer:
        stage.upstream.content = message = answer_with()
        stage.announce(NODE)
        assert answer.result(5).content == message


def test_a_client_that_hangs_up_takes_no_message(stage: Stage) -> None:
    body = PULL.SerializeToString()
    with stage.connected() as connection:
        connection.sendall(head("/v1/fleet/pull-messages", len(body), signed(KEY)))
        connection.sendall(body)
        wait_until(lambda: stage.upstream.seen, "Flower is asked once", 5)
    time.sleep(0.2)
    stage.upstream.seen.clear()
    stage.upstream.content = message = answer_with()
    stage.announce(NODE)
    time.sleep(0.2)
    assert stage.upstream.seen == []
    assert stage.client.post("pull-messages", PULL).content == message


def test_an_answer_that_nothing_came_of_is_sent_once_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "SHORTEST_HOLD_S", 0.4)
    stage.upstream.content = message = answer_with()
    stage.announce(NODE)
    assert stage.client.post("pull-messages", PULL).content == message
    stage.upstream.content, stage.upstream.seen = b"", []
    assert stage.client.post("pull-messages", PULL).content == message
    assert stage.upstream.seen == []
    with held(stage) as answer:
        assert answer.result(5).content == b""


def test_an_answer_that_its_node_goes_on_with_is_not_sent_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "SHORTEST_HOLD_S", 0.4)
    stage.upstream.content = message = answer_with()
    stage.announce(NODE)
    assert stage.client.post("pull-messages", PULL).content == message
    stage.upstream.content = b""
    fetch = PullObjectRequest(node=WHO, run_id=RUN, object_id=NAME)
    assert stage.client.post("pull-object", fetch).is_success
    with held(stage) as answer:
        assert answer.result(5).content == b""


def test_held_requests_do_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "SHORTEST_HOLD_S", 15.0)
    with contextlib.ExitStack() as clients:
        with gateway_stage() as stage:
            stage.upstream.content = b""
            url = f"http://{stage.address}"
            http = clients.enter_context(httpx.Client(base_url=url, timeout=30))
            answer = clients.enter_context(held(stage, Peer(KEY, http, NODE)))
            began = time.monotonic()
        assert time.monotonic() - began < 4
        assert (answer.result().status_code, answer.result().content) == (200, b"")


def test_a_heartbeat_of_a_node_reaches_flower(stage: Stage) -> None:
    for success in (False, True):
        beat = SendNodeHeartbeatResponse(success=success).SerializeToString()
        stage.upstream.content = beat
        assert stage.client.post("send-node-heartbeat", BEAT).content == beat
    assert stage.upstream.seen == [("POST", flower.HEARTBEAT)] * 2


def test_a_request_for_messages_is_a_sign_of_life(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "SHORTEST_HOLD_S", 0.1)
    heartbeat, pull = ("POST", flower.HEARTBEAT), ("POST", flower.PULL_MESSAGES)
    stage.upstream.content = SendNodeHeartbeatResponse(success=True).SerializeToString()
    stage.forget_heartbeat()
    for _ in range(2):
        stage.client.post("pull-messages", PULL)
    assert stage.upstream.seen.count(heartbeat) == 1
    assert stage.upstream.seen[0] == heartbeat
    # One that Flower does not take is no reason not to wait for messages.
    stage.forget_heartbeat()
    stage.upstream.reset()
    stage.upstream.status = 500
    answer = stage.client.post("pull-messages", PULL)
    assert answer.status_code in (200, 500)
    assert stage.upstream.seen[0] == heartbeat
    assert set(stage.upstream.seen) <= {heartbeat, pull}


def test_a_node_that_left_while_its_request_was_held_is_not_connected(
    stage: Stage,
) -> None:
    with held(stage) as answer:
        leaving = fleet_pb2.DeactivateNodeRequest(node_id=NODE)
        stage.client.post("deactivate-node", leaving)
        assert answer.result(5).content == b""
    assert stage.gateway.presence.heard == {}


def test_the_log_names_clients_that_connect_and_leave(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clients = RegisteredClients()
    clients.learn(ROSTER)
    presence, key = Presence(clients), fingerprint(KEY.public_key())
    pull = flower.PULL_MESSAGES
    with caplog.at_level(logging.INFO, "knnper.server.link.presence"):
        for path, seconds in (
            (flower.ACTIVATE, 20.0),
            (pull, 30.0),
            (pull, 300.0),
            (pull, 5.0),
            (flower.DEACTIVATE, 0.0),
            (flower.DEACTIVATE, 7200.0),
            (flower.ACTIVATE, 1.0),
            (pull, 1.0),
        ):
            presence.note(path, key)
            now += seconds
    assert [record.getMessage() for record in caplog.records] == [
        "client site-a is connected",
        "client site-a is connected",
        "client site-a has left",
        "client site-a is connected",
    ]

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node

from knnper.server.link.sockets import limits_for
from tests.processes import LOCALHOST
from tests.server.link.gateway_stage import KEY, NODE, Stage, gateway_stage
from tests.server.link.peers import head, signed

SOON = 0.3
STRICT = limits_for(per_address=3, in_all=5, header_s=SOON)
PATIENT = limits_for(per_address=3, in_all=5, header_s=30)
BEAT = SendNodeHeartbeatRequest(node=Node(node_id=NODE), heartbeat_interval=30)
BODY: bytes = BEAT.SerializeToString()
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def stage() -> Iterator[Stage]:
    with gateway_stage(limits=STRICT) as stage:
        yield stage


@pytest.fixture
def patient_stage() -> Iterator[Stage]:
    with gateway_stage(limits=PATIENT) as stage:
        yield stage


def connected(stage: Stage, host: str = LOCALHOST) -> socket.socket:
    """Return a connection from ``host``, any address of this machine."""
    place = (stage.address.host, stage.address.port)
    return socket.create_connection(place, timeout=5, source_address=(host, 0))


def seconds_until_closed(connection: socket.socket) -> float:
    began = time.monotonic()
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1000):
            pass
    return time.monotonic() - began


def test_a_header_has_to_end_in_time(stage: Stage) -> None:
    """More of it is tested with the socket, in `tests.transport.test_sockets`."""
    with connected(stage) as connection:
        connection.sendall(HEALTH[:-2])
        assert SOON / 2 < seconds_until_closed(connection) < 10 * SOON


def beat(name: str = "send-node-heartbeat") -> bytes:
    return head(f"/v1/fleet/{name}", len(BODY), signed(KEY)) + BODY


def test_requests_before_an_answer_have_an_end(stage: Stage) -> None:
    with connected(stage) as connection:
        connection.sendall(HEALTH * 1000)
        assert seconds_until_closed(connection) < 5
    assert len(stage.upstream.seen) < 3


def test_a_stranger_keeps_no_place(stage: Stage) -> None:
    for said in (HEALTH, head("/v1/fleet/get-run", 9, {}), b"GET / HTTP/1.1\r\n\r\n"):
        with connected(stage) as connection:
            connection.sendall(said)
            assert connection.recv(1000).startswith(b"HTTP/1.1")
            assert seconds_until_closed(connection) < SOON


def test_a_slow_body_is_waited_for(stage: Stage) -> None:
    with connected(stage) as connection:
        connection.sendall(beat()[:-1])
        time.sleep(2 * SOON)
        connection.sendall(beat()[-1:])
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_body_that_is_too_slow_is_not(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knnper.server.link.gateway._WINDOW_S", SOON)
    start = head("/v1/fleet/push-object", 5_000_000, signed(KEY))
    with connected(stage) as connection, contextlib.suppress(OSError):
        connection.sendall(start)
        for _ in range(10):
            connection.sendall(bytes(1000))
            time.sleep(SOON / 4)
        pytest.fail("the connection is still open")


def test_who_is_fast_enough_may_send_for_long(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knnper.server.link.gateway._WINDOW_S", SOON)
    pieces, piece = 20, bytes(60_000)
    start = head("/v1/fleet/push-object", pieces * len(piece), signed(KEY))
    with connected(stage) as connection:
        connection.sendall(start)
        for _ in range(pieces):
            connection.sendall(piece)
            time.sleep(SOON / 4)
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


def test_one_address_does_not_keep_the_others_out(
    patient_stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage = patient_stage
    with contextlib.ExitStack() as held:
        for _ in range(PATIENT.strangers_per_address):
            held.enter_context(connected(stage))
        for _ in range(3):
            with connected(stage) as refused:
                assert seconds_until_closed(refused) < 5
        with connected(stage, "127.0.0.2") as other:
            other.sendall(HEALTH)
            assert other.recv(1000).startswith(b"HTTP/1.1 200")
    assert caplog.text.count("or 3 of its address") == 1
    _until_it_answers(stage)


def test_there_is_an_end_to_all_connections(patient_stage: Stage) -> None:
    stage = patient_stage
    with contextlib.ExitStack() as held:
        for number in range(PATIENT.strangers):
            held.enter_context(connected(stage, f"127.0.0.{number + 1}"))
        with connected(stage, "127.0.0.99") as refused:
            assert seconds_until_closed(refused) < 5
    _until_it_answers(stage)


def _until_it_answers(stage: Stage) -> None:
    """See that places become free, and before the time for headers has passed."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            assert httpx.get(f"http://{stage.address}/health").is_success
            return
    pytest.fail("no place became free")

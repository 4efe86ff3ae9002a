import base64
import re
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from knnper.transport.credentials.node_keys import fingerprint, new_node_key
from tests.server.link.gateway_stage import LARGEST, Stage, gateway_stage

PULL = "/v1/fleet/pull-object"
ACTIVATE = "/v1/fleet/activate-node"
REGISTER = "/v1/fleet/register-node"
OPEN = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)


@pytest.fixture(scope="module")
def shared_stage() -> Iterator[Stage]:
    with gateway_stage() as stage:
        yield stage


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    shared_stage.upstream.seen.clear()
    shared_stage.upstream.status, shared_stage.upstream.error = 200, None
    shared_stage.connected.clear()
    shared_stage.clients.names = {}
    shared_stage.gateway.notices.said.clear()
    shared_stage.gateway.presence.heard.clear()
    return shared_stage


@pytest.mark.parametrize("name", OPEN)
def test_what_a_client_needs_is_let_through(name: str, stage: Stage) -> None:
    answer = stage.http.post(f"/v1/fleet/{name}", content=b"question")
    assert (answer.status_code, answer.content) == (200, b"question")
    assert stage.upstream.seen == [("POST", f"/v1/fleet/{name}")]


def test_nothing_else_that_flower_offers_is_let_through(stage: Stage) -> None:
    paths = {path for _, path in PROTOBUF_REQUEST_TYPES}
    closed = paths - {f"/v1/fleet/{name}" for name in OPEN}
    assert "/v1/control/start-run" in closed
    assert "/v1/control/register-node" in closed
    assert "/v1/runtime/acquire-task" in closed
    for path in closed:
        for method in ("POST", "GET"):
            answer = stage.http.request(method, path, content=b"x")
            assert answer.status_code in (403, 412), path
    assert stage.upstream.seen == []


@pytest.mark.parametrize(
    "target",
    [
        "/v1/fleet/../control/start-run",
        "/v1/fleet/pull-object/../../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/..%2fcontrol%2fstart-run",
        "/v1/fleet%2fpull-object",
        "/v1%2Ffleet/pull-object",
        "/v1/fleet/pull%2Dobject",
        "//v1/control/start-run",
        "//v1/fleet/pull-object",
        "/v1//fleet/pull-object",
        "/v1/fleet/pull-object/",
        "/V1/Fleet/Pull-Object",
        "/v1/fleet/pull-object?x=/v1/control/start-run",
        "/v1/fleet/pull-object;x",
        "/v1/fleet/pull-object%00",
        "/v1\\control\\start-run",
        "http://127.0.0.1/v1/control/start-run",
        "http://127.0.0.1/v1/fleet/../control/start-run",
        "/docs",
        "/openapi.json",
        "/health/../v1/control/start-run",
        "*",
    ],
)
def test_paths_are_taken_letter_by_letter(target: str, stage: Stage) -> None:
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n."
    line = stage.first_line(head.encode())
    assert line.split()[1] in (b"403", b"400")
    assert stage.upstream.seen == []


@pytest.mark.parametrize(
    "host", ["x/v1/control/start-run?", "x#", "127.0.0.1:8000", "x\tv1"]
)
def test_the_host_header_does_not_reach_flower(host: str, stage: Stage) -> None:
    stage.upstream.headers.clear()
    head = f"POST {PULL} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1\r\n\r\n."
    assert stage.first_line(head.encode()).split()[1] == b"200"
    assert stage.upstream.seen == [("POST", PULL)]
    assert stage.upstream.headers["host"] == "flower"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "CONNECT"])
def test_only_posts_are_let_through(method: str, stage: Stage) -> None:
    head = f"{method} {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    assert stage.first_line(head.encode()).split()[1] in (b"403", b"400")
    assert stage.upstream.seen == []


def test_two_lengths_in_one_request_are_refused(stage: Stage) -> None:
    head = f"POST {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
    for second in ("Transfer-Encoding: chunked", "Content-Length: 30"):
        line = stage.first_line(f"{head}{second}\r\n\r\n0\r\n\r\n".encode())
        assert line.split()[1] == b"400"
    assert stage.upstream.seen == []


def test_refusals_are_explained_and_logged(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    answer = stage.http.post("/v1/control/start-run?once", content=b"code")
    assert answer.status_code == 403
    assert "Operators use the control port" in answer.json()["detail"]
    assert "127.0.0.1: refused POST '/v1/control/start-run?once'" in caplog.text


def test_strangers_cannot_fill_the_log(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(50):
        stage.http.post(f"/x{number}/{'y' * 5000}")
        stage.http.post("/v1/control/start-run")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert max(map(len, lines)) < 300
    assert len(stage.gateway.notices.said) == 2


def test_what_is_no_http_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with gateway_stage() as stage:
        for _ in range(5):
            assert stage.first_line(b"\x00\x01\r\n\r\n").split()[1] == b"400"
    assert caplog.text.count("Invalid HTTP request") == 1


@pytest.mark.parametrize("header", ["flwr-signature", "flwr-x", "accept"])
def test_headers_that_are_no_ascii_are_refused(
    header: str, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: x\r\n{header}: \xe9\r\n\r\n"
    assert stage.first_line(head.encode("latin-1")).split()[1] == b"400"
    assert "Traceback" not in caplog.text


def test_nodes_do_not_register_themselves(stage: Stage) -> None:
    answer = stage.http.post(REGISTER, content=b"key")
    assert answer.status_code == 412
    assert answer.json()["code"] == 2001
    assert "registered clients only" in answer.json()["detail"]


def test_without_authentication_nodes_register_themselves() -> None:
    with gateway_stage(insecure=True) as stage:
        assert stage.http.post(REGISTER, content=b"key").is_success
        answer = stage.http.post("/v1/control/register-node", content=b"key")
        assert answer.status_code == 403


def test_headers_of_flower_alone_are_passed_on(stage: Stage) -> None:
    headers = {"flwr-signature": "s", "cookie": "c", "x-forwarded-for": "1.2.3.4"}
    answer = stage.http.post(PULL, content=b"x", headers=headers)
    assert stage.upstream.headers["flwr-signature"] == "s"
    assert not {"cookie", "x-forwarded-for"} & set(stage.upstream.headers)
    assert answer.headers["content-type"] == "application/x"
    assert "x-internal" not in answer.headers


def test_large_bodies_pass_and_too_large_ones_do_not(stage: Stage) -> None:
    body = bytes(range(256)) * (9_000_000 // 256)
    assert stage.http.post(PULL, content=body).content == body
    answer = stage.http.post(PULL, content=bytes(LARGEST + 1))
    assert answer.status_code == 413
    assert "max_request_mb" in answer.json()["detail"]


def test_a_body_of_unknown_length_is_refused(stage: Stage) -> None:
    answer = stage.http.post(PULL, content=iter([b"a", b"b"]))
    assert answer.status_code == 411
    assert stage.upstream.seen == []


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (httpx.ConnectError("refused"), 503, "cannot be reached.*Error: refused"),
        (httpx.ReadTimeout(""), 504, r"did not answer in time \(ReadTimeout\)"),
    ],
)
def test_clients_try_again_while_flower_is_away(
    error: httpx.HTTPError,
    status: int,
    said: str,
    stage: Stage,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage.upstream.error = error
    key = new_node_key().public_key()
    stage.clients.names = {fingerprint(key): "site-a"}
    header = base64.b64encode(public_key_to_bytes(key)).decode()
    answer = stage.http.post(PULL, content=b"x", headers={"flwr-public-key": header})
    assert answer.status_code == status
    assert re.search(f"site-a: {PULL} cannot be answered: Flower.*{said}", caplog.text)
    assert stage.http.get("/health").status_code == status


def test_a_client_that_goes_away_is_not_blamed_on_flower(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"POST {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf"
    place = (stage.address.host, stage.address.port)
    with socket.create_connection(place, timeout=5) as connection:
        connection.sendall(head.encode())
    end = time.monotonic() + 5
    while "The client went away" not in caplog.text:
        assert time.monotonic() < end, caplog.text
        time.sleep(0.01)
    assert "SuperLink" not in caplog.text


def test_connected_clients_are_noticed(stage: Stage) -> None:
    stage.http.post(PULL, content=b"x")
    assert stage.connected == []
    stage.http.post(ACTIVATE, content=b"x")
    assert stage.connected == [True]
    stage.upstream.status = 412
    stage.http.post(ACTIVATE, content=b"x")
    assert stage.connected == [True]


@pytest.mark.parametrize(
    ("status", "known", "ahead_s", "message"),
    [
        (412, False, 0, "is not registered with this federation"),
        (412, True, 0, "site-a is connected already"),
        (401, True, 30, "The clock of site-a is 30 s ahead"),
        (401, True, -900, "The clock of site-a is 900 s behind"),
        (401, False, 0, "is not registered with this federation"),
        (401, True, 0, "The signature of site-a"),
    ],
)
def test_flowers_refusals_are_explained(
    status: int,
    known: bool,
    ahead_s: int,
    message: str,
    stage: Stage,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = new_node_key().public_key()
    stage.clients.names = {fingerprint(key): "site-a"} if known else {}
    stage.upstream.status = status
    headers = {
        "flwr-public-key": base64.b64encode(public_key_to_bytes(key)).decode(),
        "flwr-timestamp": (datetime.now(UTC) + timedelta(seconds=ahead_s)).isoformat(),
    }
    said = b'{"code": 2004, "detail": "Failed."}'
    answer = stage.http.post(ACTIVATE, content=said, headers=headers)
    assert answer.status_code == status
    assert answer.json()["detail"] == "Failed."
    # Between signing and looking, a second may pass.
    expected = message.replace("30 s", "").replace("900 s", "").split("  ")
    assert all(part in answer.json()["extra"] for part in expected)
    assert all(part in caplog.text for part in expected)


def _pem(key: ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _of_unknown_kind() -> bytes:
    """Return a well-formed public key of an algorithm that nobody knows."""
    kind = bytes.fromhex("300a06082a03040506070809")
    der = bytes([0x30, len(kind) + 5]) + kind + bytes([0x03, 0x03, 0, 1, 2])
    body = base64.b64encode(der)
    return b"-----BEGIN PUBLIC KEY-----\n" + body + b"\n-----END PUBLIC KEY-----\n"


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"no key",
        _of_unknown_kind(),
        _pem(ed25519.Ed25519PrivateKey.generate().public_key()),
        _pem(ec.generate_private_key(ec.SECP256K1()).public_key()),
        _pem(ec.generate_private_key(ec.SECP256R1()).public_key()),
    ],
    ids=["none", "text", "unknown kind", "Ed25519", "another curve", "P-256"],
)
def test_any_public_key_is_refused_as_flower_does(
    pem: bytes, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.upstream.status = 401
    headers = {"flwr-public-key": base64.b64encode(pem).decode()}
    answer = stage.http.post(ACTIVATE, content=b"{}", headers=headers)
    assert answer.status_code == 401
    assert "Traceback" not in caplog.text


def test_only_registered_clients_are_remembered(stage: Stage) -> None:
    known, stranger = new_node_key().public_key(), new_node_key().public_key()
    stage.clients.names = {fingerprint(known): "site-a"}
    for key in (stranger, known):
        header = base64.b64encode(public_key_to_bytes(key)).decode()
        stage.http.get("/health", headers={"flwr-public-key": header})
        assert stage.gateway.presence.heard == {}
        stage.http.post(PULL, content=b"x", headers={"flwr-public-key": header})
    assert list(stage.gateway.presence.heard) == [fingerprint(known)]

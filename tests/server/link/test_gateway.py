import base64
import contextlib
import re
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.proto import fleet_pb2
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Metadata,
    ObjectTree,
    PullObjectRequest,
)
from flwr.proto.message_pb2 import Message as FlowersMessage
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from google.protobuf.message import Message

from knnper.server.link import arrivals
from knnper.server.link.authorized import Registered
from knnper.server.link.connections import ConnectionLimits
from knnper.server.settings import TlsFiles
from knnper.transport.credentials import (
    CertifiedKey,
    fingerprint,
    issue_server_certificate,
    new_authority,
    new_node_key,
    write_certificate,
)
from knnper.transport.diagnosis import (
    Standing,
    gateway_versions,
    own_versions,
    standing_in,
)
from tests.processes import LOCALHOST, wait_until
from tests.server.link.gateway_stage import (
    KEY,
    LARGEST,
    NODE,
    ROSTER,
    Stage,
    gateway_stage,
)
from tests.server.link.peers import (
    PROTOBUF,
    Peer,
    head,
    reason,
    seconds_until_closed,
    signed,
)

PULL = "/v1/fleet/pull-messages"
ACTIVATE = "/v1/fleet/activate-node"
REGISTER = "/v1/fleet/register-node"
RUN, SENT, OBJECT = 5, "ab" * 32, "cd" * 32
WHO = Node(node_id=NODE)
PUBLIC = public_key_to_bytes(KEY.public_key())
POLL = fleet_pb2.PullMessagesRequest(node=WHO).SerializeToString()

BODIES: Mapping[str, Message] = {
    "activate-node": fleet_pb2.ActivateNodeRequest(
        public_key=PUBLIC, heartbeat_interval=30
    ),
    "deactivate-node": fleet_pb2.DeactivateNodeRequest(node_id=NODE),
    "send-node-heartbeat": SendNodeHeartbeatRequest(node=WHO, heartbeat_interval=30),
    "pull-messages": fleet_pb2.PullMessagesRequest(node=WHO),
    "get-run": GetRunRequest(node=WHO, run_id=RUN),
    "get-fab": GetFabRequest(node=WHO, run_id=RUN, hash_str="x"),
    "pull-object": PullObjectRequest(node=WHO, run_id=RUN, object_id=OBJECT),
    "confirm-message-received": ConfirmMessageReceivedRequest(
        node=WHO, run_id=RUN, message_object_id=SENT
    ),
}

OPEN = (*BODIES, "push-messages", "push-object")


@pytest.fixture(scope="module")
def shared_stage() -> Iterator[Stage]:
    with gateway_stage() as stage, pytest.MonkeyPatch.context() as patch:
        # Each request for messages reaches Flower, also one right after another.
        patch.setattr(arrivals, "UNANNOUNCED_INTERVAL_S", 0.05)
        yield stage


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    shared_stage.upstream.reset()
    shared_stage.looked.clear()
    shared_stage.clients.learn(ROSTER)
    shared_stage.gateway.notices.logged_at.clear()
    shared_stage.gateway.presence.heard.clear()
    shared_stage.gateway.replies.forget_run(RUN)
    shared_stage.note_heartbeat()
    return shared_stage


def send(stage: Stage) -> None:
    """Have Flower send a message to the client, with one object, which goes on."""
    metadata = Metadata(
        run_id=RUN,
        message_id=SENT,
        dst_node_id=NODE,
        message_type="train",
        created_at=time.time(),
        ttl=60,
    )
    tree = ObjectTree(object_id=SENT, children=[ObjectTree(object_id=OBJECT)])
    stage.upstream.content = fleet_pb2.PullMessagesResponse(
        messages_list=[FlowersMessage(metadata=metadata)], message_object_trees=[tree]
    ).SerializeToString()
    stage.client.post("pull-messages", BODIES["pull-messages"])
    stage.client.post("get-run", BODIES["get-run"])
    stage.upstream.reset()


def test_requests_of_a_client_are_forwarded(stage: Stage) -> None:
    send(stage)
    for name, body in BODIES.items():
        stage.upstream.seen.clear()
        if name == "send-node-heartbeat":
            stage.forget_heartbeat()
        answer = stage.client.post(name, body)
        stage.note_heartbeat()
        if name != "pull-messages":
            assert answer.content == body.SerializeToString()
        assert answer.status_code == 200, name
        assert stage.upstream.seen == [("POST", f"/v1/fleet/{name}")]


@pytest.mark.parametrize(
    "name", ["get-run", "get-fab", "pull-object", "confirm-message-received"]
)
def test_request_for_something_not_sent_to_the_node_is_refused(
    name: str, stage: Stage
) -> None:
    assert stage.client.post(name, BODIES[name]).status_code == 400
    assert stage.upstream.seen == []


@pytest.mark.parametrize("name", OPEN)
def test_nothing_is_let_through_without_a_proof(
    name: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knnper.server.link.gateway._NEW_CLIENT_S", 0.2)
    send(stage)
    body = BODIES.get(name, fleet_pb2.PullMessagesRequest(node=WHO))
    proofs = {
        "none": PROTOBUF,
        "unknown": signed(new_node_key()),
        "another's": {
            **signed(KEY),
            "flwr-signature": signed(new_node_key())["flwr-signature"],
        },
        "old": signed(KEY, age_s=400),
        "of the future": signed(KEY, age_s=-30),
    }
    for case, headers in proofs.items():
        answer = stage.client.post(name, body, headers)
        expected = 412 if (name, case) == ("activate-node", "unknown") else 401
        assert answer.status_code == expected, case
        assert answer.headers["connection"] == "close"
    assert stage.upstream.seen == []


@pytest.mark.parametrize(
    "body",
    [
        fleet_pb2.PullMessagesRequest(node=Node(node_id=NODE + 1)),
        fleet_pb2.PullMessagesRequest(),
        fleet_pb2.ActivateNodeRequest(public_key=b"another", heartbeat_interval=30),
        fleet_pb2.DeactivateNodeRequest(node_id=NODE + 1),
    ],
)
def test_bodies_in_another_name_are_refused(body: Message, stage: Stage) -> None:
    names = {type(body): name for name, body in BODIES.items()}
    answer = stage.client.post(names[type(body)], body)
    assert answer.status_code == 401
    assert stage.upstream.seen == []


def test_concurrent_requests_of_a_client_are_limited(stage: Stage) -> None:
    meter = stage.gateway.meter
    key = fingerprint(KEY.public_key())
    with contextlib.ExitStack() as held:
        for _ in range(16):
            held.enter_context(meter.one_request(key))
        assert stage.client.post("pull-messages", POLL).status_code == 503
    assert stage.client.post("pull-messages", POLL).status_code == 200


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
        "/v1/fleet%2fpull-object",
        "/v1/fleet/pull%2Dobject",
        "//v1/control/start-run",
        "/v1//fleet/pull-object",
        "/v1/fleet/pull-object/",
        "/V1/Fleet/Pull-Object",
        "/v1/fleet/pull-object?x=/v1/control/start-run",
        "/v1\\control\\start-run",
        "http://127.0.0.1/v1/control/start-run",
        "/docs",
        "/health/../v1/control/start-run",
    ],
)
def test_paths_are_taken_letter_by_letter(target: str, stage: Stage) -> None:
    start = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n."
    line = stage.first_line(start.encode())
    assert line.split()[1] in (b"403", b"400")
    assert stage.upstream.seen == []


@pytest.mark.parametrize("host", [b"x/v1/control/start-run?", b"127.0.0.1:8000"])
def test_the_host_header_does_not_reach_flower(host: bytes, stage: Stage) -> None:
    stage.upstream.headers.clear()
    start = head(PULL, len(POLL), signed(KEY)).replace(b"host: x", b"host: %b" % host)
    assert stage.first_line(start + POLL).split()[1] == b"200"
    assert stage.upstream.seen == [("POST", PULL)]
    assert stage.upstream.headers["host"] == "flower"


def test_only_posts_of_one_length_are_let_through(stage: Stage) -> None:
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "CONNECT"):
        start = f"{method} {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        assert stage.first_line(start.encode()).split()[1] in (b"403", b"400"), method
    start = f"POST {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
    for second in ("Transfer-Encoding: chunked", "Content-Length: 30"):
        line = stage.first_line(f"{start}{second}\r\n\r\n0\r\n\r\n".encode())
        assert line.split()[1] == b"400", second
    answer = stage.http.post(PULL, content=iter([b"a", b"b"]), headers=signed(KEY))
    assert answer.status_code == 411
    assert stage.upstream.seen == []


def test_refusals_are_explained_and_logged(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    answer = stage.http.post("/v1/control/start-run?once", content=b"code")
    assert answer.status_code == 403
    assert "Operators use the control port" in reason(answer)
    assert "127.0.0.1: refused POST '/v1/control/start-run?once'" in caplog.text


def test_strangers_cannot_fill_the_log(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(50):
        stage.http.post(f"/x{number}/{'y' * 5000}")
        stage.http.post("/v1/control/start-run")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert max(map(len, lines)) < 500
    assert len(stage.gateway.notices.logged_at) == 2


def test_repeated_invalid_http_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with gateway_stage() as stage:
        for _ in range(5):
            assert stage.first_line(b"\x00\x01\r\n\r\n").split()[1] == b"400"
    assert caplog.text.count("Invalid HTTP request") == 1


def test_headers_that_are_no_ascii_are_refused(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    start = "GET /health HTTP/1.1\r\nHost: x\r\nflwr-signature: \xe9\r\n\r\n"
    assert stage.first_line(start.encode("latin-1")).split()[1] == b"400"
    assert "Traceback" not in caplog.text


def test_nodes_do_not_register_themselves(stage: Stage) -> None:
    answer = stage.http.post(REGISTER, content=b"key")
    assert answer.status_code == 412
    assert answer.json()["code"] == 2001
    assert "registered clients only" in reason(answer)


def test_without_authentication_nodes_register_themselves() -> None:
    with gateway_stage(insecure=True) as stage:
        anybody = Peer(new_node_key(), stage.http)
        public = public_key_to_bytes(anybody.key.public_key())
        registration = fleet_pb2.RegisterNodeFleetRequest(public_key=public)
        assert anybody.post("register-node", registration).is_success
        another = fleet_pb2.RegisterNodeFleetRequest(public_key=PUBLIC)
        assert anybody.post("register-node", another).status_code == 401
        answer = stage.http.post("/v1/control/register-node", content=b"key")
        assert answer.status_code == 403
        # The gateway does not know the node, and leaves the check to Flower.
        poll = fleet_pb2.PullMessagesRequest(node=Node(node_id=99))
        assert anybody.post("pull-messages", poll).is_success
        # A reply needs a node that the gateway knows, and then must come from it.
        assert anybody.post("push-messages", poll).status_code == 503
        known = Registered("any", fingerprint(anybody.key.public_key()))
        stage.clients.learn({"98": known})
        assert anybody.post("pull-messages", poll).status_code == 401


def test_headers_of_flower_alone_are_passed_on(stage: Stage) -> None:
    headers = {**signed(KEY), "cookie": "c", "x-forwarded-for": "1.2.3.4"}
    leaving = BODIES["deactivate-node"]
    answer = stage.client.post("deactivate-node", leaving, headers)
    assert stage.upstream.headers["flwr-signature"] == headers["flwr-signature"]
    assert not {"cookie", "x-forwarded-for"} & set(stage.upstream.headers)
    assert answer.headers["content-type"] == "application/x"
    assert "x-internal" not in answer.headers


def test_bodies_are_as_large_as_their_kind_needs(stage: Stage) -> None:
    too_large = {
        "push-object": LARGEST + 1,
        "push-messages": 1_000_001,
        "pull-messages": 20_000,
        "activate-node": 20_000,
    }
    for name, size in too_large.items():
        answer = stage.client.post(name, bytes(size))
        assert answer.status_code == 413, name
        assert "max_request_mb" in reason(answer)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (httpx.ConnectError("refused"), 503, "cannot be reached.*Error: refused"),
        (httpx.ReadTimeout(""), 504, "did not answer in time: ReadTimeout"),
    ],
)
def test_clients_try_again_while_flower_is_away(
    error: httpx.HTTPError,
    status: int,
    message: str,
    stage: Stage,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage.upstream.error = error
    answer = stage.client.post("pull-messages", POLL)
    assert answer.status_code == status
    assert re.search(f"of site-a: Flower.*{message}", caplog.text)
    health = stage.http.get("/health")
    assert health.status_code == status
    assert gateway_versions(health.headers) == own_versions()


def test_a_client_that_goes_away_is_not_blamed_on_flower(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with stage.connected() as connection:
        connection.sendall(head(PULL, 9, signed(KEY)) + b"half")
    wait_until(lambda: "The client went away" in caplog.text)
    assert "SuperLink" not in caplog.text


def test_node_registered_by_other_means_is_looked_up(
    stage: Stage,
) -> None:
    stage.client.post("pull-messages", POLL)
    assert stage.looked == []
    assert stage.client.post("activate-node", BODIES["activate-node"]).is_success
    assert stage.looked == [True]
    stage.looked.clear()
    late = Peer(new_node_key(), stage.http)
    public = public_key_to_bytes(late.key.public_key())
    activation = fleet_pb2.ActivateNodeRequest(public_key=public, heartbeat_interval=30)

    def register() -> None:
        while not stage.looked:
            time.sleep(0.01)
        client = Registered("late", fingerprint(late.key.public_key()))
        stage.clients.learn({**ROSTER, "8": client})

    registering = threading.Thread(target=register)
    registering.start()
    assert late.post("activate-node", activation).is_success
    registering.join()


@pytest.mark.parametrize(
    ("known", "age_s", "message"),
    [
        (True, -30, "ahead"),
        (True, 900, "900 s behind"),
        (False, 0, "knnper fed register"),
    ],
)
def test_refusals_of_a_key_are_explained_to_both_sides(
    known: bool,
    age_s: int,
    message: str,
    stage: Stage,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not known:
        stage.clients.learn({})
    answer = stage.client.post("pull-messages", POLL, signed(KEY, age_s))
    assert answer.status_code == 401
    assert message in reason(answer)
    assert message in caplog.text


def test_second_node_of_a_client_is_refused_with_the_reason(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.upstream.status = 412
    stage.upstream.content = b'{"code": 2004, "detail": "Failed."}'
    answer = stage.client.post("activate-node", BODIES["activate-node"])
    assert answer.status_code == 412
    assert answer.json()["detail"] == "Failed."
    assert "site-a is connected already" in reason(answer)
    assert "site-a is connected already" in caplog.text


def _of_unknown_kind() -> bytes:
    """Return a well-formed public key of an unknown algorithm."""
    kind = bytes.fromhex("300a06082a03040506070809")
    der = bytes([0x30, len(kind) + 5]) + kind + bytes([0x03, 0x03, 0, 1, 2])
    body = base64.b64encode(der)
    return b"-----BEGIN PUBLIC KEY-----\n" + body + b"\n-----END PUBLIC KEY-----\n"


def _of_another_kind() -> bytes:
    key = ed25519.Ed25519PrivateKey.generate().public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize("pem", [b"", _of_unknown_kind(), _of_another_kind()])
def test_any_public_key_is_refused_as_flower_does(
    pem: bytes, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"flwr-public-key": base64.b64encode(pem).decode()}
    for name in ("activate-node", "pull-messages"):
        answer = stage.client.post(name, POLL, {**signed(KEY), **headers})
        assert answer.status_code == 401
    assert stage.upstream.seen == []
    assert "Traceback" not in caplog.text


def test_only_registered_clients_are_remembered(stage: Stage) -> None:
    stage.http.get("/health", headers=signed(KEY))
    Peer(new_node_key(), stage.http).post("pull-messages", POLL)
    assert stage.gateway.presence.heard == {}
    stage.client.post("pull-messages", POLL)
    assert list(stage.gateway.presence.heard) == [fingerprint(KEY.public_key())]


def standing(stage: Stage, status: int = 400) -> Standing | None:
    """Return the standing in the answer to a doctor's request, which Flower refuses."""
    stage.upstream.status, stage.upstream.content = status, b'{"code": 2003}'
    answer = stage.client.post("activate-node", BODIES["activate-node"])
    stage.upstream.reset()
    return standing_in(answer.text)


def test_a_registered_client_learns_how_it_stands(stage: Stage) -> None:
    assert standing(stage) == Standing("site-a", None)
    stage.upstream.status, stage.upstream.content = 401, b'{"code": 2003}'
    refused = stage.client.post("pull-messages", POLL)
    assert refused.json() == {"code": 2003}
    # Asking does not count as a sign of life, nor does what Flower refuses.
    assert standing(stage) == Standing("site-a", None)
    stage.upstream.reset()
    stage.client.post("pull-messages", POLL)
    heard = standing(stage)
    assert heard is not None
    assert heard.idle_s is not None
    assert heard.idle_s < 5
    assert [standing(stage, status) for status in (401, 412)] == [None, None]
    stage.client.post("deactivate-node", BODIES["deactivate-node"])
    assert standing(stage) == Standing("site-a", None)


def test_versions_are_reported_by_health_alone(stage: Stage) -> None:
    assert gateway_versions(stage.http.get("/health").headers) == own_versions()
    assert gateway_versions(stage.client.post("pull-messages", POLL).headers) == {}


AUTHORITY = new_authority("test authority")


def files(folder: Path, hosts: Sequence[str] = (LOCALHOST,), days: int = 9) -> TlsFiles:
    tls = TlsFiles(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    for file in (tls.ca, tls.certificate, tls.key):
        file.unlink(missing_ok=True)
    write_certificate(tls.ca, AUTHORITY.certificate)
    issue_server_certificate(AUTHORITY, hosts, days).write(tls.certificate, tls.key)
    return tls


def trusting(authority: CertifiedKey, folder: Path) -> ssl.SSLContext:
    file = folder / "trusted.crt"
    write_certificate(file, authority.certificate)
    return ssl.create_default_context(cafile=file)


def shown_certificate(stage: Stage, context: ssl.SSLContext) -> int:
    """Return the serial number of the certificate that the gateway shows."""
    with (
        stage.connected() as plain,
        context.wrap_socket(plain, server_hostname=LOCALHOST) as connection,
    ):
        certificate = connection.getpeercert()
        assert certificate is not None
        return int(str(certificate["serialNumber"]), 16)


def test_a_client_that_trusts_the_authority_is_let_through(tmp_path: Path) -> None:
    with gateway_stage(tls=files(tmp_path)) as stage:
        assert stage.listener.config.ssl is not None
        oldest = stage.listener.config.ssl.minimum_version
        assert oldest == ssl.TLSVersion.TLSv1_2
        context = trusting(AUTHORITY, tmp_path)
        with httpx.Client(base_url=f"https://{stage.address}", verify=context) as http:
            client = Peer(KEY, http, NODE)
            leaving = BODIES["deactivate-node"]
            assert client.post("deactivate-node", leaving).is_success
            stage.upstream.content = large = bytes(5_000_000)
            assert client.post("deactivate-node", leaving).content == large
            assert http.post("/v1/control/start-run", content=b"").status_code == 403


def test_clients_that_are_idle_do_not_hold_up_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gateway_stage(tls=files(tmp_path)) as stage:
        context = trusting(AUTHORITY, tmp_path)
        http = httpx.Client(base_url=f"https://{stage.address}", verify=context)
        assert http.get("/health").is_success
        began = time.monotonic()
    assert time.monotonic() - began < 4
    assert "graceful shutdown exceeded" not in caplog.text
    http.close()


def test_without_tls_to_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gateway_stage(tls=files(tmp_path)) as stage:
        with pytest.raises(httpx.TransportError):
            stage.http.get("/health")
        wait_until(lambda: "a TLS handshake failed: HTTP_REQUEST" in caplog.text)
        assert stage.upstream.seen == []


@pytest.mark.parametrize(
    ("served", "trusts", "to_client", "to_server"),
    [
        (
            {},
            new_authority("other"),
            "self-signed|unable to get",
            "ALERT_UNKNOWN_CA",
        ),
        ({"days": -1}, AUTHORITY, "certificate has expired", "CERTIFICATE_EXPIRED"),
        ({"hosts": ["other.org"]}, AUTHORITY, "IP address", "ALERT_BAD_CERTIFICATE"),
    ],
)
def test_untrusted_certificates_are_named_on_both_sides(
    served: dict[str, Any],
    trusts: CertifiedKey,
    to_client: str,
    to_server: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with gateway_stage(tls=files(tmp_path, **served)) as stage:
        context = trusting(trusts, tmp_path)
        with pytest.raises(ssl.SSLCertVerificationError, match=to_client):
            shown_certificate(stage, context)
        wait_until(lambda: to_server in caplog.text)


def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    with gateway_stage(tls=files(tmp_path)) as stage:
        context = trusting(AUTHORITY, tmp_path)
        before = shown_certificate(stage, context)
        tls = files(tmp_path)
        stage.listener.renew()
        renewed = shown_certificate(stage, context)
        assert renewed != before
        _refuses_half(stage, tls)
        assert shown_certificate(stage, context) == renewed


def _refuses_half(stage: Stage, tls: TlsFiles) -> None:
    """See that a certificate without its key changes nothing."""
    tls.certificate.unlink()
    other = issue_server_certificate(AUTHORITY, (LOCALHOST,))
    write_certificate(tls.certificate, other.certificate)
    with pytest.raises(OSError, match="KEY_VALUES_MISMATCH"):
        stage.listener.renew()


SOON = 0.3
LIMITS = ConnectionLimits(per_address=3, in_all=5, header_s=30)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def narrow() -> Iterator[Stage]:
    with gateway_stage(limits=LIMITS) as stage:
        yield stage


def test_requests_before_an_answer_have_an_end(narrow: Stage) -> None:
    with narrow.connected() as connection:
        connection.sendall(HEALTH * 1000)
        assert seconds_until_closed(connection) < 5
    assert len(narrow.upstream.seen) < 3


def test_a_stranger_keeps_no_place(narrow: Stage) -> None:
    for sent in (HEALTH, head("/v1/fleet/get-run", 9, {}), b"GET / HTTP/1.1\r\n\r\n"):
        with narrow.connected() as connection:
            connection.sendall(sent)
            assert connection.recv(1000).startswith(b"HTTP/1.1")
            assert seconds_until_closed(connection) < SOON


def test_a_body_that_is_too_slow_is_not_waited_for(
    narrow: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knnper.server.link.request_limits._WINDOW_S", SOON)
    start = head("/v1/fleet/push-object", 5_000_000, signed(KEY))
    with narrow.connected() as connection, contextlib.suppress(OSError):
        connection.sendall(start)
        for _ in range(10):
            connection.sendall(bytes(1000))
            time.sleep(SOON / 4)
        pytest.fail("the connection is still open")


def test_fast_sender_may_send_for_long(
    narrow: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knnper.server.link.request_limits._WINDOW_S", SOON)
    pieces, piece = 20, bytes(60_000)
    start = head("/v1/fleet/push-object", pieces * len(piece), signed(KEY))
    with narrow.connected() as connection:
        connection.sendall(start)
        for _ in range(pieces):
            connection.sendall(piece)
            time.sleep(SOON / 4)
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


def test_connections_of_one_address_do_not_keep_others_out(
    narrow: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(LIMITS.per_address):
            held.enter_context(narrow.connected())
        for _ in range(3):
            with narrow.connected() as refused:
                assert seconds_until_closed(refused) < 5
        with narrow.connected("127.0.0.2") as other:
            other.sendall(HEALTH)
            assert other.recv(1000).startswith(b"HTTP/1.1 200")
    assert caplog.text.count("or 3 of its address") == 1

    def answers() -> bool:
        """Whether places become free before the time for headers has passed."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://{narrow.address}/health").is_success
        return False

    wait_until(answers, timeout_s=10)

"""What the gateway tells the doctor of a client."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import (
    EllipticCurvePrivateKey as Private,
)
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from knnper.server.link.authorized import Registered
from knnper.server.link.gateway import Gateway
from knnper.server.link.gateway_rules import Clients
from knnper.transport.credentials import fingerprint, new_node_key
from knnper.transport.diagnosis import (
    Standing,
    own_versions,
    standing_in,
    told_versions,
)
from knnper.transport.flower_protocol import ACTIVATE, DEACTIVATE, HEALTH
from tests.server.link.gateway_stage import gateway_to
from tests.server.link.peers import signed

SECRET = new_node_key()
KEY = SECRET.public_key()
PUBLIC = public_key_to_bytes(KEY)
NODE = 7
PULL = "/v1/fleet/pull-messages"
BODIES = {
    ACTIVATE: ActivateNodeRequest(public_key=PUBLIC).SerializeToString(),
    DEACTIVATE: DeactivateNodeRequest(node_id=NODE).SerializeToString(),
    PULL: PullMessagesRequest(node=Node(node_id=NODE)).SerializeToString(),
    HEALTH: b"",
}
INVALID_HEARTBEAT = b'{"code": 2003, "detail": "Invalid heartbeat interval."}'


class Answered:
    """One answer of the gateway, with Flower behind it giving ``status``."""

    def __init__(
        self, gateway: Gateway, path: str, signed_by: Private = SECRET, age_s: float = 0
    ) -> None:
        self.headers: dict[str, str] = {}
        self.content = b""
        self._body = BODIES[path]
        headers = {**signed(signed_by, age_s), "content-length": str(len(self._body))}
        headers[FLEET_HTTP_PUBLIC_KEY_HEADER] = base64.b64encode(PUBLIC).decode()
        scope = {
            "method": "GET" if path == HEALTH else "POST",
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (one.encode(), value.encode()) for one, value in headers.items()
            ],
        }
        asyncio.run(gateway(scope, self._receive, self._send))

    async def _receive(self) -> Mapping[str, Any]:
        return {"type": "http.request", "body": self._body}

    async def _send(self, event: Mapping[str, Any]) -> None:
        for name, value in event.get("headers", ()):
            self.headers[name.decode()] = value.decode()
        self.content += event.get("body", b"")


def gateway_for(statuses: dict[str, int]) -> Gateway:
    def answer(request: httpx.Request) -> httpx.Response:
        status = statuses[request.url.path]
        content = b"" if status == HTTPStatus.OK else INVALID_HEARTBEAT
        return httpx.Response(status, content=_pieces(content))

    clients = Clients()
    clients.learn({str(NODE): Registered("site-a", fingerprint(KEY), "folder")})
    return gateway_to(answer, clients)


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    yield content


def asked(gateway: Gateway) -> Standing | None:
    return standing_in(Answered(gateway, ACTIVATE).content.decode())


def test_a_registered_client_learns_how_it_stands() -> None:
    statuses = {ACTIVATE: 400, PULL: 200, DEACTIVATE: 200}
    gateway = gateway_for(statuses)
    assert asked(gateway) == Standing("site-a", None)
    # Asking does not count as a sign of life.
    assert asked(gateway) == Standing("site-a", None)
    Answered(gateway, PULL)
    heard = asked(gateway)
    assert heard is not None
    assert heard.idle_s is not None
    assert heard.idle_s < 5
    Answered(gateway, DEACTIVATE)
    assert asked(gateway) == Standing("site-a", None)


def test_what_flower_refuses_is_no_sign_of_life() -> None:
    gateway = gateway_for({ACTIVATE: 400, PULL: 401})
    Answered(gateway, PULL)
    assert asked(gateway) == Standing("site-a", None)


def test_who_only_knows_the_public_key_learns_nothing() -> None:
    gateway = gateway_for({ACTIVATE: 400, PULL: 200, HEALTH: 200})
    stranger = new_node_key()
    Answered(gateway, HEALTH, stranger)
    assert asked(gateway) == Standing("site-a", None)
    for answer in (
        Answered(gateway, ACTIVATE, stranger),
        Answered(gateway, ACTIVATE, age_s=400),
    ):
        assert standing_in(answer.content.decode()) is None


def test_who_left_is_forgotten() -> None:
    gateway = gateway_for({PULL: 200})
    Answered(gateway, PULL)
    assert list(gateway.presence.heard) == [fingerprint(KEY)]
    gateway.rules.clients.names = {"SHA256:other": "site-b"}
    gateway.presence.heard["SHA256:other"] = 0.0
    gateway.rules.clients.names = {fingerprint(KEY): "site-a"}
    Answered(gateway, PULL)
    assert list(gateway.presence.heard) == [fingerprint(KEY)]


def test_nobody_else_learns_anything() -> None:
    for status in (401, 412):
        assert asked(gateway_for({ACTIVATE: status})) is None
    refused = Answered(gateway_for({PULL: 400}), PULL)
    assert json.loads(refused.content) == json.loads(INVALID_HEARTBEAT)


def test_versions_are_told_with_the_health_alone() -> None:
    gateway = gateway_for({HEALTH: 200, PULL: 200})
    assert told_versions(Answered(gateway, HEALTH).headers) == own_versions()
    assert told_versions(Answered(gateway, PULL).headers) == {}
    sick = gateway_for({HEALTH: 503})
    assert told_versions(Answered(sick, HEALTH).headers) == own_versions()

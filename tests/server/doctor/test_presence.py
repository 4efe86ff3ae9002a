"""What the gateway tells the doctor of a client."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import (
    EllipticCurvePrivateKey as Private,
)
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from knnper.transport.credentials.node_keys import fingerprint, new_node_key
from knnper.transport.diagnosis.standing import Standing, standing_in
from knnper.transport.diagnosis.versions import own_versions, told_versions
from server.link.gateway.allowed import ACTIVATE, DEACTIVATE, HEALTH, Rules
from server.link.gateway.application import Gateway
from server.link.gateway.explanation import Clients

SECRET = new_node_key()
KEY = SECRET.public_key()
HEADER = base64.b64encode(public_key_to_bytes(KEY))
PULL = "/v1/fleet/pull-messages"
INVALID_HEARTBEAT = b'{"code": 2003, "detail": "Invalid heartbeat interval."}'


class Answered:
    """One answer of the gateway, with Flower behind it giving ``status``."""

    def __init__(
        self, gateway: Gateway, path: str, signed_by: Private = SECRET, age_s: float = 0
    ) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        scope = _scope(path, _signature(signed_by, age_s))
        asyncio.run(gateway(scope, _receive, self._send))

    async def _send(self, event: Mapping[str, Any]) -> None:
        for name, value in event.get("headers", ()):
            self.headers[name.decode()] = value.decode()
        self.body += event.get("body", b"")


def _signature(key: Private, age_s: float) -> list[tuple[bytes, bytes]]:
    timestamp = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat().encode()
    signature = base64.b64encode(sign_message(key, timestamp))
    names = TIMESTAMP_HEADER.encode(), FLEET_HTTP_SIGNATURE_HEADER.encode()
    return list(zip(names, (timestamp, signature), strict=True))


def _scope(path: str, signature: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {
        "method": "GET" if path == HEALTH else "POST",
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [
            (FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), HEADER),
            (b"content-length", b"0"),
            *signature,
        ],
    }


async def _receive() -> Mapping[str, Any]:
    return {"type": "http.request", "body": b""}


async def _pieces() -> AsyncIterator[bytes]:
    yield INVALID_HEARTBEAT


def gateway_to(statuses: dict[str, int]) -> Gateway:
    def answer(request: httpx.Request) -> httpx.Response:
        status = statuses[request.url.path]
        return httpx.Response(status, content=_pieces())

    upstream = httpx.AsyncClient(
        base_url="http://flower", transport=httpx.MockTransport(answer)
    )
    clients = Clients({fingerprint(KEY): "site-a"})
    return Gateway(upstream, Rules(False, 1000), clients, lambda: None)


def asked(gateway: Gateway) -> Standing | None:
    return standing_in(Answered(gateway, ACTIVATE).body.decode())


def test_a_registered_client_learns_how_it_stands() -> None:
    statuses = {ACTIVATE: 400, PULL: 200, DEACTIVATE: 200}
    gateway = gateway_to(statuses)
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
    gateway = gateway_to({ACTIVATE: 400, PULL: 401})
    Answered(gateway, PULL)
    assert asked(gateway) == Standing("site-a", None)


def test_who_only_knows_the_public_key_learns_nothing() -> None:
    gateway = gateway_to({ACTIVATE: 400, PULL: 200, HEALTH: 200})
    stranger = new_node_key()
    Answered(gateway, HEALTH, stranger)
    assert asked(gateway) == Standing("site-a", None)
    for answer in (
        Answered(gateway, ACTIVATE, stranger),
        Answered(gateway, ACTIVATE, age_s=400),
    ):
        assert standing_in(answer.body.decode()) is None


def test_who_left_is_forgotten() -> None:
    gateway = gateway_to({PULL: 200})
    Answered(gateway, PULL)
    assert list(gateway.presence.heard) == [fingerprint(KEY)]
    gateway.clients.names = {"SHA256:other": "site-b"}
    gateway.presence.heard["SHA256:other"] = 0.0
    gateway.clients.names = {fingerprint(KEY): "site-a"}
    Answered(gateway, PULL)
    assert list(gateway.presence.heard) == [fingerprint(KEY)]


def test_nobody_else_learns_anything() -> None:
    for status in (401, 412):
        assert asked(gateway_to({ACTIVATE: status})) is None
    refused = Answered(gateway_to({PULL: 400}), PULL)
    assert json.loads(refused.body) == json.loads(INVALID_HEARTBEAT)


def test_versions_are_told_with_the_health_alone() -> None:
    gateway = gateway_to({HEALTH: 200, PULL: 200})
    assert told_versions(Answered(gateway, HEALTH).headers) == own_versions()
    assert told_versions(Answered(gateway, PULL).headers) == {}
    sick = gateway_to({HEALTH: 503})
    assert told_versions(Answered(sick, HEALTH).headers) == own_versions()

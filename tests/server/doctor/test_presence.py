"""What the gateway tells the doctor of a client."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from knnper.transport.credentials.node_keys import fingerprint, new_node_key
from knnper.transport.diagnosis.standing import Standing, standing_in
from knnper.transport.diagnosis.versions import own_versions, told_versions
from server.link.gateway.allowed import ACTIVATE, DEACTIVATE, HEALTH, Rules
from server.link.gateway.application import Gateway
from server.link.gateway.explanation import Clients

KEY = new_node_key().public_key()
HEADER = base64.b64encode(public_key_to_bytes(KEY))
PULL = "/v1/fleet/pull-messages"
INVALID_HEARTBEAT = b'{"code": 2003, "detail": "Invalid heartbeat interval."}'


class Answered:
    """One answer of the gateway, with Flower behind it giving ``status``."""

    def __init__(self, gateway: Gateway, path: str) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        asyncio.run(gateway(_scope(path), _receive, self._send))

    async def _send(self, event: Mapping[str, Any]) -> None:
        for name, value in event.get("headers", ()):
            self.headers[name.decode()] = value.decode()
        self.body += event.get("body", b"")


def _scope(path: str) -> dict[str, Any]:
    return {
        "method": "GET" if path == HEALTH else "POST",
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [
            (FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), HEADER),
            (b"content-length", b"0"),
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

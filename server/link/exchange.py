"""An HTTP request to the gateway, and its answer."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx

from knnper.server.link.gateway_rules import raw_path
from knnper.server.link.request_limits import Receive

Scope = Mapping[str, Any]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

FLOWER_HEADER_PREFIX = "flwr-"
_HEADERS_TO_CLIENTS = frozenset({"content-type", "content-length"})


class Exchange:
    """An HTTP request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.method, self.path = scope, scope["method"], raw_path(scope)
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        client = scope.get("client")
        self.host = "?" if client is None else str(client[0])
        self.receive, self._send = receive, send

    async def answer(
        self,
        status: int,
        body: bytes,
        kind: str = "application/json",
        extra_headers: Headers = (),
    ) -> None:
        """Send an answer with a body."""
        length = str(len(body)).encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", length)]
        await self._start(status, [*headers, *extra_headers])
        await self._send({"type": "http.response.body", "body": body})

    async def disconnected(self) -> None:
        """Wait until the client has disconnected; its request was read before."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def stream(
        self, response: httpx.Response, extra_headers: Headers = ()
    ) -> None:
        """Forward Flower's answer."""
        passed = {
            name.encode(): value.encode()
            for name, value in response.headers.items()
            if name in _HEADERS_TO_CLIENTS or name.startswith(FLOWER_HEADER_PREFIX)
        }
        await self._start(response.status_code, [*passed.items(), *extra_headers])
        body = {"type": "http.response.body"}
        try:
            async for piece in response.aiter_raw():
                await self._send({**body, "body": piece, "more_body": True})
        except httpx.HTTPError:
            # uvicorn closes the connection, and the client sees an incomplete answer.
            return
        await self._send({**body, "body": b""})

    async def _start(self, status: int, headers: Headers) -> None:
        start = {"type": "http.response.start", "status": int(status)}
        await self._send({**start, "headers": headers})

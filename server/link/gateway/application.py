"""Passes allowed requests on to Flower, both ways as a stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx

from knnper.transport.diagnosis.standing import with_standing
from knnper.transport.diagnosis.versions import GATEWAY_HEADERS, own_versions
from server.link.gateway.allowed import (
    ACTIVATE,
    HEALTH,
    Refusal,
    Rules,
    kind_of_path,
    raw_path,
)
from server.link.gateway.explanation import (
    Clients,
    explain,
    key_of,
    with_explanation,
)
from server.link.gateway.notices import Notices, plain
from server.link.gateway.presence import Presence

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_PASSED_ON = frozenset({"content-type", "content-length", "content-encoding", "accept"})
_FLOWERS = "flwr-"
_SLOWEST_PIECE = 60.0  # seconds until the next piece of a body
_SLOWEST_BYTES_PER_SECOND = 2000
_LONGEST_ERROR = 64 * 1024


@dataclass(frozen=True)
class Gateway:
    """An ASGI application in front of Flower.

    Attributes
    ----------
    upstream
        Reaches Flower; its base address is Flower's own port.
    rules
        What is let through.
    clients
        Who is registered.
    on_connected
        Called when a client has connected.
    notices
        What is said of refusals.
    presence
        Which clients are heard of.
    """

    upstream: httpx.AsyncClient
    rules: Rules
    clients: Clients
    on_connected: Callable[[], None]
    notices: Notices = field(default_factory=Notices)
    presence: Presence = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "presence", Presence(self.clients))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = _headers(scope["headers"])
        refusal = self.rules.refusal(scope, headers.get("content-length"))
        if raw_path(scope) == HEALTH:
            send = _telling_versions(send)
        if refusal is None:
            await self._pass_on(scope, headers, receive, send)
            return
        path, why = raw_path(scope), refusal.status.phrase
        self.notices.warn(
            _host(scope),
            f"refused {kind_of_path(path)}: {why}",
            f"refused {scope['method']} '{plain(path)}': {why}",
        )
        await _answer(send, refusal.status, refusal.body())

    async def _pass_on(
        self, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send
    ) -> None:
        path = raw_path(scope)
        content = None
        if path != HEALTH:
            content = _body(receive, int(headers["content-length"]))
        request = self.upstream.build_request(
            scope["method"], path, headers=_passed_on(headers.items()), content=content
        )
        try:
            response = await self.upstream.send(request, stream=True)
        except httpx.HTTPError as error:
            refusal = _unreachable(error)
            self.notices.warn(
                _host(scope),
                f"{self._name(headers)}: {refusal.message}",
                f"{self._name(headers)}: {path} cannot be answered: {refusal.message}",
            )
            await _answer(send, refusal.status, refusal.body())
            return
        try:
            if response.is_error:
                await self._tell_why(scope, headers, response, send)
            else:
                await _stream(response, send)
        finally:
            await response.aclose()
        if response.is_success:
            self.presence.note(path, headers)
            if path == ACTIVATE:
                self.on_connected()

    async def _tell_why(
        self,
        scope: Scope,
        headers: Mapping[str, str],
        response: httpx.Response,
        send: Send,
    ) -> None:
        body = (await response.aread())[:_LONGEST_ERROR]
        path = raw_path(scope)
        standing = self.presence.standing(path, headers, response.status_code)
        if standing is not None:
            await _answer(send, response.status_code, with_standing(body, standing))
            return
        why = explain(self.clients, path, headers, response.status_code)
        if why is not None:
            body = with_explanation(body, why)
        said = why or body.decode(errors="replace")
        self.notices.warn(
            _host(scope),
            f"{self._name(headers)}: {path}: {response.status_code}",
            f"Flower refused {path}: {said}",
        )
        await _answer(send, response.status_code, body)

    def _name(self, headers: Mapping[str, str]) -> str:
        return self.clients.names.get(key_of(headers) or "", "a stranger")


class _GoneError(httpx.ReadError):
    """The client went away before it had sent all."""


class _SlowError(httpx.ReadTimeout):
    """The client takes too long to send."""


def _headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in raw}


def _passed_on(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers that Flower needs; hop-by-hop ones and cookies are not."""
    return {
        name: value
        for name, value in headers
        if name in _PASSED_ON or name.startswith(_FLOWERS)
    }


async def _body(receive: Receive, length: int) -> AsyncIterator[bytes]:
    end = time.monotonic() + _SLOWEST_PIECE + length / _SLOWEST_BYTES_PER_SECOND
    more = True
    while more:
        patience = min(_SLOWEST_PIECE, end - time.monotonic())
        try:
            event = await asyncio.wait_for(receive(), patience)
        except TimeoutError as error:
            raise _SlowError("the client sends too slowly") from error
        if event["type"] == "http.disconnect":
            raise _GoneError("the client went away")
        yield event.get("body", b"")
        more = event.get("more_body", False)


async def _stream(response: httpx.Response, send: Send) -> None:
    passed = _passed_on(response.headers.items())
    raw = [(name.encode(), value.encode()) for name, value in passed.items()]
    await _start(send, response.status_code, raw)
    async for piece in response.aiter_raw():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _telling_versions(send: Send) -> Send:
    """Return what sends the same, with the installed versions among the headers."""
    own = own_versions()
    told = [
        (header.encode(), own[package].encode())
        for package, header in GATEWAY_HEADERS.items()
    ]

    async def tell(event: Mapping[str, Any]) -> None:
        if event["type"] == "http.response.start":
            event = {**event, "headers": [*event["headers"], *told]}
        await send(event)

    return tell


async def _answer(send: Send, status: int, body: bytes) -> None:
    length = str(len(body)).encode()
    kind = b"application/json"
    await _start(send, status, [(b"content-type", kind), (b"content-length", length)])
    await send({"type": "http.response.body", "body": body})


async def _start(send: Send, status: int, headers: Headers) -> None:
    start = {"type": "http.response.start", "status": int(status), "headers": headers}
    await send(start)


def _unreachable(error: httpx.HTTPError) -> Refusal:
    """Return an answer after which SuperNodes try again."""
    if isinstance(error, _GoneError):
        message = "The client went away before it had sent all of its request."
        return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, 0, message)
    if isinstance(error, _SlowError):
        message = "The client sends its request too slowly."
        return Refusal(HTTPStatus.GATEWAY_TIMEOUT, 0, message)
    what = f"{type(error).__name__}: {error}".rstrip(": ")  # many have no text
    if isinstance(error, httpx.TimeoutException):
        message = f"Flower's SuperLink did not answer in time ({what})."
        return Refusal(HTTPStatus.GATEWAY_TIMEOUT, 0, message)
    message = f"Flower's SuperLink cannot be reached at the moment ({what})."
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, 0, message)


def _host(scope: Scope) -> str:
    client = scope.get("client")
    return "?" if client is None else str(client[0])

"""Who is answered, and what every answer tells a browser: around the application."""

import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.service.metrics import Metrics
from client.service.problems import error_document, error_headers
from client.service.token import is_authorized

PUBLIC_PATHS = frozenset(("/", "/page.css", "/page.js", "/health", "/ready"))
LOCAL_HOSTS = frozenset(("localhost", "127.0.0.1", "::1"))

SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; "
        "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


class Guard:
    """Answers only whoever knows the token.

    Without a token only this machine's programs, and pages that this service itself
    gave, are answered: another web page, which a browser would let send requests here,
    is found out by the headers ``Host`` and ``Origin``.

    Parameters
    ----------
    app
        What is guarded.
    token
        None where none is needed.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before its body is read."""
        if scope["type"] != "http" or (status := self._refusal(scope)) is None:
            await self._app(scope, receive, send)
            return
        message = (
            "expected the header `Authorization: Bearer TOKEN` with the token in the "
            "service's token file"
            if status == 401
            else "found a request for, or from a page of, another machine; without a "
            "token only this machine is answered"
        )
        refusal = JSONResponse(
            error_document(status, message).model_dump(), status, error_headers(status)
        )
        await refusal(scope, receive, send)

    def _refusal(self, scope: Scope) -> int | None:
        """Return the status with which a request is refused, if it is."""
        headers = Headers(scope=scope)
        if self._token is None:
            return None if _is_local(headers) else 403
        if scope["path"] in PUBLIC_PATHS:
            return None
        given = headers.get("authorization", "").encode("latin-1")
        return None if is_authorized(given, self._token) else 401


def _is_local(headers: Headers) -> bool:
    host = headers.get("host", "")
    origin = headers.get("origin")
    return _host_of(f"//{host}") in LOCAL_HOSTS and (
        origin is None or _place_of(origin) == host
    )


def _place_of(origin: str) -> str:
    """Return ``HOST:PORT`` of a header ``Origin``; empty if it names no place."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _host_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


class SecureHeaders:
    """Tells browsers, with each answer, to load nothing from elsewhere, and the like.

    Parameters
    ----------
    app
        What answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, with the headers."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class Metered:
    """Counts every request, and how long it takes.

    Parameters
    ----------
    app
        What answers.
    metrics
        Where it is counted.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def send_and_look(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_and_look)
        finally:
            # As it is written in the route: the paths that are asked for have no end.
            path = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - began
            self._metrics.answered(scope["method"], path, status, seconds)

"""Access to the service: every request is checked before its body is read."""

from collections.abc import Mapping
from urllib.parse import urlsplit

from fastapi import Request, Security, params
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Connection
from typing_extensions import override

from knnper.client.service.errors import RequestError, error_response
from knnper.client.service.tokens import SCOPES, Caller, Scope, Tokens

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
EVERYBODY = Caller("this machine", frozenset(SCOPES), is_owner=True)


class Guard:
    """Rejects requests without a known token, and sets headers for browsers.

    With ``tokens`` None only this machine is answered. A browser lets pages of other
    sites send requests here; they are recognised by the headers Host and Origin.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens | None) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Forward a request to the application, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        app = self._app
        try:
            # The service uses no cookies, and FastAPI would parse them in quadratic
            # time: CVE-2024-7592 of Python before 3.11.10 and 3.12.6.
            scope["headers"] = [
                field for field in scope["headers"] if field[0] != b"cookie"
            ]
            scope.setdefault("state", {})["caller"] = self._caller(scope)
        except RequestError as error:
            app = error_response(error.status, str(error), error.headers)
        await app(scope, receive, send_with_headers)

    def _caller(self, scope: Connection) -> Caller | None:
        """Return the caller; None for a request without a token for a public path."""
        headers = Headers(scope=scope)
        if self._tokens is None:
            if not _is_local(headers):
                raise RequestError(
                    403,
                    "found a request for, or from a page of, another machine; without "
                    "a token only this machine is answered",
                )
            return EVERYBODY
        caller = self._tokens.caller(headers.get("authorization", ""))
        if caller is None and scope["path"] not in PUBLIC_PATHS:
            header = "none"
            if "authorization" in headers:
                header = "one that is not known: mistyped, or revoked"
            raise RequestError(
                401,
                f"found {header}, expected the header `Authorization: Bearer TOKEN`; "
                "the service's operator makes tokens: knnper site token add "
                "CLIENT.yaml NAME",
            )
        return caller


def _is_local(headers: Headers) -> bool:
    host = headers.get("host", "")
    origin = headers.get("origin")
    try:
        return urlsplit(f"//{host}").hostname in LOCAL_HOSTS and (
            origin is None or urlsplit(origin).netloc == host
        )
    except ValueError:
        return False


class _RequiredScopes(HTTPBearer):
    def __init__(self, *scopes: Scope) -> None:
        super().__init__(
            scheme_name="token",
            description="Made with `knnper site token add`; its scopes limit its use.",
            auto_error=False,
        )
        self._required = scopes

    @override
    async def __call__(self, request: Request) -> Caller:  # type: ignore[override]
        bearer: Caller = request.state.caller
        caller = bearer
        if request.app.state.is_private:
            caller = bearer.with_private_answers()
        for scope in self._required:
            if scope in bearer.scopes - caller.scopes:
                raise RequestError(
                    403,
                    f"this needs {scope!r}, which the token {caller.name!r} may not "
                    "use while answers are private (service.privacy): it would show "
                    "stored examples without noise. The owner's token may",
                )
            if scope not in caller.scopes:
                scopes = [name for name in SCOPES if name in caller.scopes]
                raise RequestError(
                    403,
                    f"the token {caller.name!r} has the scopes "
                    f"{', '.join(scopes) or 'none'}; this needs {scope!r}. The "
                    "service's operator makes such a token: knnper site token add "
                    f"CLIENT.yaml NAME --scope {scope}",
                    {
                        "WWW-Authenticate": 'Bearer realm="knnper", '
                        f'error="insufficient_scope", scope="{scope}"'
                    },
                )
        return caller


def needs(*scopes: Scope) -> params.Security:
    """Declare that an endpoint's `Caller` must have these scopes."""
    dependency: params.Security = Security(
        _RequiredScopes(*scopes), scopes=list(scopes)
    )
    return dependency

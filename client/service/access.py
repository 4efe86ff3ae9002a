"""Who is answered, and what for: tokens, their scopes, and who checks them."""

import contextlib
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from fastapi import Request, Security, params
from fastapi.security import HTTPBearer
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Connection

from knnper.client.service.inputs import RequestError, answer
from knnper.client.state import StateFolder
from knnper.errors import RunError
from knnper.experiment import is_name
from knnper.files import read_file, read_plain, write_atomically
from knnper.transport.credentials import SECRET, permission_problem, write_new
from knnper.transport.sockets import introduce

Scope = Literal[
    "predict", "probabilities", "neighbors", "read", "add", "delete", "metrics"
]
SCOPES: Mapping[Scope, str] = {
    "predict": "the class of an input, and nothing more",
    "probabilities": "predict, and the probability of each class",
    "neighbors": "probabilities, and all that explains them: neighbours, distances, λ",
    "read": "stored examples: their pictures, and how many there are of each class",
    "add": "store examples",
    "delete": "delete examples",
    "metrics": "figures for Prometheus",
}
_INCLUDED: Mapping[str, tuple[Scope, ...]] = {
    "probabilities": ("predict",),
    "neighbors": ("predict", "probabilities"),
}

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
OWNER, _TOKENS_FILE = "owner", "tokens.json"
_MIN_LENGTH = 16

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Token:
    """A token as it is kept: enough to know it again, not enough to use it."""

    # It has 256 random bits, so that no slow hash is needed.

    name: str
    scopes: tuple[Scope, ...]
    sha256: str
    made: float


@dataclass(frozen=True)
class Caller:
    """Who asks: a token's name, and all that it may."""

    name: str
    scopes: frozenset[Scope]

    @staticmethod
    def by(token: Token) -> "Caller":
        """Return who has a token."""
        included = [one for scope in token.scopes for one in _INCLUDED.get(scope, ())]
        return Caller(token.name, frozenset((*token.scopes, *included)))


EVERYBODY = Caller("this machine", frozenset(SCOPES))
_TOKENS = TypeAdapter(tuple[Token, ...])


def read_tokens(state: Path) -> tuple[Token, ...]:
    """Return the named tokens of a client's state folder, oldest first."""
    path = state / _TOKENS_FILE
    try:
        return _TOKENS.validate_json(read_plain(path))
    except FileNotFoundError:
        return ()
    except (OSError, ValidationError) as error:
        mend = "mend or remove the file; until then no named token is known"
        raise RunError(
            f"the tokens in {path} cannot be read: {error}; {mend}"
        ) from error


def add_token(state: Path, name: str, scopes: Iterable[Scope]) -> str:
    """Make a token, which a service that runs knows from then on, and return it."""
    if not is_name(name) or name == OWNER:
        raise RunError(
            f"found the name {name!r}, expected letters, digits, '.', '_' and '-', "
            f"a letter or digit first, and not {OWNER!r}"
        )
    secret = secrets.token_urlsafe(32)
    with StateFolder(state).committing():
        known = read_tokens(state)
        if any(one.name == name for one in known):
            mend = f"another name, or run: knnper site token revoke {name}"
            raise RunError(f"there is a token {name!r} already; choose {mend}")
        kept = tuple(scope for scope in SCOPES if scope in set(scopes))
        new = Token(name, kept, _digest(secret), time.time())
        _write_tokens(state, (*known, new))
    return secret


def revoke_token(state: Path, name: str) -> None:
    """Forget a token; a service that runs refuses it from then on."""
    with StateFolder(state).committing():
        known = read_tokens(state)
        left = tuple(one for one in known if one.name != name)
        if len(left) == len(known):
            names = ", ".join(one.name for one in known) or "none"
            raise RunError(f"there is no token {name!r}, expected one of: {names}")
        _write_tokens(state, left)


def _write_tokens(state: Path, tokens: tuple[Token, ...]) -> None:
    write_atomically(state / _TOKENS_FILE, _TOKENS.dump_json(tokens, indent=2))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def read_or_create_owner_token(path: Path) -> str:
    """Return the token in a file; a new one, readable by its owner only, if none is."""
    try:
        if not path.exists():
            write_new(path, f"{secrets.token_urlsafe(32)}\n".encode(), SECRET)
        problem, token = (
            permission_problem(path),
            read_file(path).decode("ascii").strip(),
        )
    except (OSError, UnicodeDecodeError) as error:
        mend = "mend it, or remove it to get a new token"
        raise RunError(f"{path} cannot be used: {error}; {mend}") from error
    if problem is not None:
        raise RunError(problem)
    if len(token) < _MIN_LENGTH:
        found = f"the token in {path} has {len(token)} characters"
        raise RunError(f"{found}, expected {_MIN_LENGTH}; remove it to get a new one")
    return token


class Tokens:
    """The tokens that a service knows, while others are made and revoked."""

    def __init__(self, state: Path, owner: str) -> None:
        self._state = state
        self._owner = Token(OWNER, tuple(SCOPES), _digest(owner), 0.0)
        self._seen: object = None
        self._known = (self._owner, *read_tokens(state))

    def caller(self, header: str) -> Caller | None:
        """Return whose token an ``Authorization`` header bears; None if nobody's."""
        # It takes as long for a token that is nearly right as for any other.
        self._follow()
        scheme, _, secret = header.partition(" ")
        digest, found = _digest(secret.strip()), None
        for token in self._known:
            if hmac.compare_digest(token.sha256, digest):
                found = Caller.by(token)
        return found if scheme.lower() == "bearer" else None

    def _follow(self) -> None:
        seen = None
        with contextlib.suppress(OSError):
            status = (self._state / _TOKENS_FILE).stat()
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        if seen == self._seen:
            return
        self._seen, self._known = seen, (self._owner,)
        try:
            self._known = (self._owner, *read_tokens(self._state))
        except RunError as error:
            _LOG.error("%s", error)


class Guard:
    """Answers only those who are known, and tells browsers to load nothing else."""

    # Without tokens this machine alone is answered: a page of another site,
    # which browsers let send requests here, is found out by its Host and Origin.

    def __init__(self, app: ASGIApp, tokens: Tokens | None) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before its body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        # FastAPI would split cookies, which nothing here uses, in quadratic time:
        # CVE-2024-7592 of Python before 3.11.10 and 3.12.6.
        scope["headers"] = [one for one in scope["headers"] if one[0] != b"cookie"]
        app = self._app
        try:
            scope.setdefault("state", {})["caller"] = self._caller(scope)
        except RequestError as error:
            app = answer(error.status, str(error), error.headers)
        await app(scope, receive, send_with_headers)

    def _caller(self, scope: Connection) -> Caller | None:
        """Return who asks; None is a stranger who asks for what is public."""
        headers = Headers(scope=scope)
        if self._tokens is None:
            if not _is_local(headers):
                found = "found a request for, or from a page of, another machine"
                raise RequestError(403, f"{found}; without a token this one alone may")
            caller: Caller | None = EVERYBODY
        else:
            caller = self._tokens.caller(headers.get("authorization", ""))
        if caller is None:
            if scope["path"] in PUBLIC_PATHS:
                return None
            found = "none"
            if "authorization" in headers:
                found = "one that is not known: mistyped, or revoked"
            raise RequestError(
                401,
                f"found {found}, expected the header `Authorization: Bearer TOKEN`; "
                "whoever runs the service makes tokens: knnper site token add "
                "CLIENT.yaml NAME",
            )
        if not introduce(scope, caller.name):
            busy = f"too many connections of {caller.name!r} are busy"
            raise RequestError(503, f"{busy}; use fewer")
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


class _Needs(HTTPBearer):
    def __init__(self, *scopes: Scope) -> None:
        told = "Made with `knnper site token add`; what it may is in its scopes."
        super().__init__(scheme_name="token", description=told, auto_error=False)
        self._scopes = scopes

    async def __call__(self, request: Request) -> Caller:  # type: ignore[override]
        caller: Caller = request.state.caller
        for scope in self._scopes:
            if scope not in caller.scopes:
                has = ", ".join(one for one in SCOPES if one in caller.scopes) or "none"
                challenge = 'Bearer realm="knnper", error="insufficient_scope", '
                raise RequestError(
                    403,
                    f"the token {caller.name!r} has the scopes {has}; this needs "
                    f"{scope!r}. Whoever runs the service makes such a token: knnper "
                    f"site token add CLIENT.yaml NAME --scope {scope}",
                    {"WWW-Authenticate": f'{challenge}scope="{scope}"'},
                )
        return caller


def needs(*scopes: Scope) -> params.Security:
    """Return the annotation of an endpoint's `Caller`, who must have these scopes."""
    needed: params.Security = Security(_Needs(*scopes), scopes=list(scopes))
    return needed

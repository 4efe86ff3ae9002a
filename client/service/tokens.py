"""Access tokens of a client's service: their scopes, and the files that keep them."""

import contextlib
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from knnper.audit_log import AuditLog
from knnper.client.state import StateFolder
from knnper.errors import RunError
from knnper.files import read_file, read_plain, write_atomically
from knnper.settings import is_name
from knnper.transport.credentials import SECRET, permission_problem, write_new

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
OWNER = "owner"  # name of the owner's token, which has all scopes
# Scopes that a service with private answers withholds from every caller, and scopes
# that it leaves to the owner: their answers depend on stored examples without noise.
WITHHELD: frozenset[Scope] = frozenset(("neighbors",))
FOR_OWNER: frozenset[Scope] = frozenset(("read", "add", "delete"))

_INCLUDED: Mapping[str, tuple[Scope, ...]] = {
    "probabilities": ("predict",),
    "neighbors": ("predict", "probabilities"),
}
_TOKENS_FILE = "tokens.json"
_MIN_LENGTH = 16
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Token:
    """A stored token: its hash is enough to recognise it, not to use it.

    A fast hash suffices, because a token has 256 random bits.
    """

    name: str
    scopes: tuple[Scope, ...]
    sha256: str
    made: float


@dataclass(frozen=True)
class Caller:
    """The sender of a request.

    Attributes
    ----------
    name
        Of its token.
    scopes
        All scopes that it may use.
    is_owner
        Whether it may see stored examples although answers are private.
    """

    name: str
    scopes: frozenset[Scope]
    is_owner: bool = False

    @classmethod
    def of(cls, token: Token) -> "Caller":
        """Return the caller that bears ``token``."""
        included = [scope for name in token.scopes for scope in _INCLUDED.get(name, ())]
        scopes = frozenset((*token.scopes, *included))
        return cls(token.name, scopes, token.name == OWNER)

    def with_private_answers(self) -> "Caller":
        """Return the caller without the scopes that private answers exclude."""
        excluded = WITHHELD if self.is_owner else WITHHELD | FOR_OWNER
        return replace(self, scopes=self.scopes - excluded)


_TOKENS = TypeAdapter(tuple[Token, ...])


def read_tokens(state: Path) -> tuple[Token, ...]:
    """Read the named tokens of a client's state folder, oldest first."""
    path = state / _TOKENS_FILE
    try:
        return _TOKENS.validate_json(read_plain(path))
    except FileNotFoundError:
        return ()
    except (OSError, ValidationError) as error:
        raise RunError(
            f"the tokens in {path} cannot be read: {error}; fix or remove the file; "
            "until then no named token is accepted"
        ) from error


def add_token(state: Path, name: str, scopes: Iterable[Scope]) -> str:
    """Make a token, which a running service accepts at once, and return its secret."""
    if not is_name(name) or name == OWNER:
        raise RunError(
            f"found the name {name!r}, expected letters, digits, '.', '_' and '-', "
            f"a letter or digit first, and not {OWNER!r}"
        )
    secret = secrets.token_urlsafe(32)
    with StateFolder(state).committing():
        tokens = read_tokens(state)
        if any(token.name == name for token in tokens):
            raise RunError(
                f"there is a token {name!r} already; choose another name, or run: "
                f"knnper site token revoke {name}"
            )
        ordered = tuple(scope for scope in SCOPES if scope in set(scopes))
        new = Token(name, ordered, _digest(secret), time.time())
        AuditLog.of(state).append("add_token", token=name, scopes=ordered)
        _write_tokens(state, (*tokens, new))
    return secret


def revoke_token(state: Path, name: str) -> None:
    """Remove a token, which a running service rejects from then on."""
    with StateFolder(state).committing():
        tokens = read_tokens(state)
        others = tuple(token for token in tokens if token.name != name)
        if len(others) == len(tokens):
            names = ", ".join(token.name for token in tokens) or "none"
            raise RunError(f"there is no token {name!r}, expected one of: {names}")
        AuditLog.of(state).append("revoke_token", token=name)
        _write_tokens(state, others)


def read_or_create_owner_token(path: Path) -> str:
    """Read the owner's token; create one that only its owner can read if missing."""
    try:
        if not path.exists():
            write_new(path, f"{secrets.token_urlsafe(32)}\n".encode(), SECRET)
        problem = permission_problem(path)
        token = read_file(path).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(
            f"{path} cannot be used: {error}; fix it, or remove it to get a new token"
        ) from error
    if problem is not None:
        raise RunError(problem)
    if len(token) < _MIN_LENGTH:
        raise RunError(
            f"the token in {path} has {len(token)} characters, expected {_MIN_LENGTH}; "
            "remove it to get a new one"
        )
    return token


class Tokens:
    """The tokens that a service accepts; follows changes of the tokens file."""

    def __init__(self, state: Path, owner: str) -> None:
        self._path = state / _TOKENS_FILE
        self._owner = Token(OWNER, tuple(SCOPES), _digest(owner), 0.0)
        self._version: object = None  # of the file that was read
        self._tokens = (self._owner, *read_tokens(state))

    def caller(self, header: str) -> Caller | None:
        """Return the bearer of the token in an ``Authorization`` header, if known."""
        self._follow_file()
        scheme, _, secret = header.partition(" ")
        digest = _digest(secret.strip())
        caller = None
        # All tokens are compared, each in constant time: the time of an answer does not
        # depend on how much of a token is right.
        for token in self._tokens:
            if hmac.compare_digest(token.sha256, digest):
                caller = Caller.of(token)
        return caller if scheme.lower() == "bearer" else None

    def _follow_file(self) -> None:
        version = None
        with contextlib.suppress(OSError):
            status = self._path.stat()
            version = (status.st_ino, status.st_size, status.st_mtime_ns)
        if version == self._version:
            return
        self._version = version
        self._tokens = (self._owner,)
        try:
            self._tokens = (self._owner, *read_tokens(self._path.parent))
        except RunError as error:
            _LOG.error("%s", error)


def _write_tokens(state: Path, tokens: tuple[Token, ...]) -> None:
    write_atomically(state / _TOKENS_FILE, _TOKENS.dump_json(tokens, indent=2))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()

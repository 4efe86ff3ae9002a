"""What clients may ask of Flower, and the answers to everything else.

Flower offers its fleet, runtime and control interfaces on one port, and the last one
takes code for every client from whoever reaches it. Nothing is let through unless it is
listed here letter by letter: a path is compared as it came over the wire, undecoded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from flwr.supercore.error import ApiErrorCode
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

HEALTH = "/health"
ACTIVATE = "/v1/fleet/activate-node"
DEACTIVATE = "/v1/fleet/deactivate-node"

_FLEET = "/v1/fleet/"
_FOR_REGISTERED_NODES = frozenset(
    _FLEET + name
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
# Without authentication, nodes register themselves.
_SELF_REGISTRATION = frozenset({f"{_FLEET}register-node", f"{_FLEET}unregister-node"})


@dataclass(frozen=True)
class Refusal:
    """An answer that the gateway gives itself.

    Attributes
    ----------
    status
        Of HTTP.
    code
        Flower's number of the nearest error of its own, which its commands print.
    message
        For the client's operator: what is wrong and how to mend it.
    """

    status: HTTPStatus
    code: int
    message: str

    def body(self) -> bytes:
        """Return the answer as Flower's clients read it: JSON."""
        return json.dumps({"code": int(self.code), "detail": self.message}).encode()


@dataclass(frozen=True)
class Rules:
    """Decides which requests are let through.

    Attributes
    ----------
    insecure
        Whether nodes register themselves.
    max_body
        Largest body, in bytes.
    """

    insecure: bool
    max_body: int

    def refusal(self, scope: Mapping[str, Any], length: str | None) -> Refusal | None:
        """Return why a request is refused; None to let it through.

        Parameters
        ----------
        scope
            Of the request, as in the ASGI specification.
        length
            Its header ``content-length``.
        """
        method, path = scope["method"], raw_path(scope)
        if not all(_is_plain(value) for _, value in scope["headers"]):
            message = "found a header that is not printable ASCII"
            return Refusal(HTTPStatus.BAD_REQUEST, _CODE_OF_REFUSAL, message)
        if path == HEALTH and method in ("GET", "HEAD"):
            return None
        if not self._is_open(method, path):
            return self._closed(path)
        if length is None or not length.isdecimal():
            message = "expected a header content-length"
            return Refusal(HTTPStatus.LENGTH_REQUIRED, _CODE_OF_REFUSAL, message)
        if int(length) > self.max_body:
            return self._too_large(int(length))
        return None

    def _is_open(self, method: str, path: str) -> bool:
        known = path in _FOR_REGISTERED_NODES
        return method == "POST" and (
            known or (self.insecure and path in _SELF_REGISTRATION)
        )

    def _closed(self, path: str) -> Refusal:
        if path in _SELF_REGISTRATION:
            # SuperNodes take 403 for the end of a run and would print nothing of this.
            return Refusal(
                HTTPStatus.PRECONDITION_FAILED,
                ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED,
                "This federation lets in registered clients only: start the client "
                "with its private key, and have its operator send you one if it has "
                "none (knnper federation add-client).",
            )
        return Refusal(
            HTTPStatus.FORBIDDEN,
            _CODE_OF_REFUSAL,
            "This is the clients' port of the federation: it takes what a client needs "
            "to take part, and neither runs nor registrations. Operators use the "
            "control port, on the server's own machine.",
        )

    def _too_large(self, length: int) -> Refusal:
        return Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            _CODE_OF_REFUSAL,
            f"The request has {length} bytes, and the federation takes at most "
            f"{self.max_body}; raise max_request_mb in the server's settings.",
        )


_CODE_OF_REFUSAL = ApiErrorCode.FORBIDDEN_ACTION


_FLOWERS_PATHS = frozenset(path for _, path in PROTOBUF_REQUEST_TYPES)


def kind_of_path(path: str) -> str:
    """Return ``path`` if Flower has it, else one word for all others."""
    return path if path in _FLOWERS_PATHS else "another path"


def is_of_the_fleet(path: str) -> bool:
    """Whether ``path`` is what clients ask, and Flower verifies signatures of."""
    return path in _FOR_REGISTERED_NODES


def _is_plain(value: bytes) -> bool:
    return all(32 <= byte < 127 or byte == 9 for byte in value)


def raw_path(scope: Mapping[str, Any]) -> str:
    """Return the path and query of a request as they came, undecoded."""
    path: str = scope["raw_path"].decode("latin-1")
    query: str = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path

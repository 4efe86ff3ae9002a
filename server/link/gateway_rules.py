"""The gateway's rules: permitted paths, valid keys, and the sender named in a body.

Flower offers its fleet, runtime and control interfaces on one port, and the control
interface accepts code for every client without authentication. So only listed paths are
forwarded, and a path is compared as it came over the wire, undecoded.
"""

import base64
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError, Message

from knnper.files import parse_json
from knnper.server.link.authorized import Registered
from knnper.transport import flower_protocol as flower
from knnper.transport.credentials import fingerprint

_LARGEST = 16_384  # bytes of a request with a node, a run and an object
_LARGEST_ANNOUNCEMENT = 1_000_000  # bytes; the tree of a reply of 10,000 arrays
_LARGEST_KEY = 1000  # characters of a public key's header


class GatewayRefusal(Exception):
    """An answer by the gateway itself, in the form of Flower's errors."""

    def __init__(
        self,
        status: int,  # SuperNodes end at 401, end the run at 403, retry at 502-504
        why: str,  # without variable parts: each reason is logged once a minute
        details: str = "",  # for the client's operator
        code: int = flower.FORBIDDEN,  # Flower's, which its commands print
    ) -> None:
        super().__init__(f"{why}: {details}" if details else why)
        self.status, self.why, self.code = HTTPStatus(status), why, code

    def body(self) -> bytes:
        """Return the body of the answer: JSON, as Flower's clients expect."""
        return flower.FlowerError(self.code, str(self)).as_json()


@dataclass
class RegisteredClients:
    """The registered clients: ``names`` and ``nodes`` by fingerprint of the key."""

    names: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)
    on_removed: Callable[[int], None] = lambda _: None  # called with the node id

    def learn(self, roster: Mapping[str, Registered]) -> None:
        """Replace the clients by those of ``roster``."""
        before = set(self.nodes.values())
        self.names = {client.key_sha256: client.name for client in roster.values()}
        self.nodes = {
            client.key_sha256: int(node_id) for node_id, client in roster.items()
        }
        for node_id in before - set(self.nodes.values()):
            self.on_removed(node_id)


@dataclass(frozen=True)
class AuthenticatedClient:
    """A client that proved the possession of its key.

    Attributes
    ----------
    key
        Fingerprint of the public key.
    node_id
        None if not known yet.
    signature
        The headers that sign the request.
    """

    key: str
    public_key: bytes
    name: str
    node_id: int | None
    signature: Mapping[str, str]


@dataclass(frozen=True)
class Rules:
    """Decides which requests are forwarded.

    Attributes
    ----------
    insecure
        Whether unregistered clients may connect.
    max_body
        Bytes of the largest object.
    """

    insecure: bool
    max_body: int
    clients: RegisteredClients

    def require_open(self, scope: Mapping[str, Any], length: str | None) -> None:
        """Refuse a request by its method, path and headers, before the body is read."""
        method, path = scope["method"], raw_path(scope)
        values = b"".join(value for _, value in scope["headers"])
        if not all(32 <= byte < 127 or byte == 9 for byte in values):
            raise GatewayRefusal(400, "found a header that is not printable ASCII")
        if path == flower.HEALTH and method in ("GET", "HEAD"):
            return
        if path in (flower.REGISTER, flower.UNREGISTER) and not self.insecure:
            raise GatewayRefusal(
                412,  # at 403, SuperNodes would end the run and print nothing
                "this federation lets in registered clients only",
                "start the client with its private key, and have its operator send you "
                "one if it has none (knnper fed add-client)",
                flower.KEY_NEEDED,
            )
        if method != "POST" or path not in flower.REQUESTS:
            raise GatewayRefusal(
                403,
                "This is the clients' port of the federation",
                "it takes what a client needs to take part, and neither runs nor "
                "registrations. Operators use the control port, on the server's own "
                "machine.",
            )
        if length is None or not length.isdecimal():
            raise GatewayRefusal(411, "expected a header content-length")

    def caller(self, path: str, headers: Mapping[str, str]) -> AuthenticatedClient:
        """Return the client that signed the headers, recently and with a valid key."""
        shown = _key_in(headers)
        if shown is None:
            without = "found no public key of Flower's kind"
            raise GatewayRefusal(401, "expected a signature", without)
        key, public_key, verifier = shown
        name = self.clients.names.get(key, "")
        ahead = _seconds_ahead(headers)
        if ahead is None or not -flower.AGO_S < ahead < flower.AHEAD_S:
            raise GatewayRefusal(401, *_clock_problem(name or key, ahead))
        timestamp = headers[flower.TIMESTAMP].encode()
        signature = _decoded(headers.get(flower.SIGNATURE, ""))
        if not name and not self.insecure and path != flower.ACTIVATE:
            raise _unknown_key(key, 401)
        if not flower.is_signature(verifier, timestamp, signature):
            whose = name or "a client"
            raise GatewayRefusal(
                401, f"The signature of {whose} is not that of its key", key
            )
        if not name and not self.insecure:
            # Flower's own answer to an unknown key.
            raise _unknown_key(key, 412)
        kinds = flower.PUBLIC_KEY, flower.SIGNATURE, flower.TIMESTAMP
        signed = {header: headers[header] for header in kinds if header in headers}
        node_id = self.clients.nodes.get(key)
        return AuthenticatedClient(
            key, public_key, name or f"node {node_id}", node_id, signed
        )

    def require_size(self, path: str, length: int) -> None:
        """Refuse a body that is too large for its path."""
        most = _LARGEST_ANNOUNCEMENT if path == flower.PUSH_MESSAGES else _LARGEST
        if path == flower.PUSH_OBJECT:
            most = self.max_body
        if length > most:
            limit = f"at most {most} (for objects: max_request_mb in server.yaml)"
            raise GatewayRefusal(
                413, "too large a request", f"found {length} bytes, {limit}"
            )

    def require_own(self, caller: AuthenticatedClient, request: Any) -> int:
        """Return the node id in a body; refuse the id of another client."""
        public_key: bytes | None = getattr(request, "public_key", None)
        if public_key is not None:
            if public_key != caller.public_key:
                raise GatewayRefusal(
                    401, "the body names another key than its signature"
                )
            return caller.node_id or 0
        named: Any = request if hasattr(request, "node_id") else request.node
        node_id = int(named.node_id)
        # Without authentication, only Flower knows the nodes of an earlier start.
        known = caller.node_id is not None or not self.insecure
        if known and node_id != caller.node_id:
            why = "the body names the node of another client"
            raise GatewayRefusal(401, why, f"found {node_id}")
        return node_id


def parsed(path: str, body: bytes | bytearray) -> Message:
    """Parse a body by the message type of its path."""
    request = flower.REQUESTS[path]()
    try:
        request.ParseFromString(bytes(body))
    except (DecodeError, RecursionError) as error:
        why = "the body is not what Flower sends"
        raise GatewayRefusal(400, why, code=flower.UNREADABLE) from error
    return request


def with_reason(body: bytes, reason: str) -> bytes:
    """Add ``reason`` to the details of Flower's JSON error ``body``."""
    try:
        return json.dumps({**parse_json(body), "extra": reason}).encode()
    except (ValueError, TypeError):
        return body


def key_of(headers: Mapping[str, str]) -> str:
    """Return the fingerprint of the key in the headers; empty without one."""
    shown = _key_in(headers)
    return "" if shown is None else shown[0]


def raw_path(scope: Mapping[str, Any]) -> str:
    """Return the path and query of a request, undecoded."""
    path: str = scope["raw_path"].decode("latin-1")
    query: str = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _key_in(
    headers: Mapping[str, str],
) -> tuple[str, bytes, ec.EllipticCurvePublicKey] | None:
    header = headers.get(flower.PUBLIC_KEY, "")
    return _read_key(header) if len(header) <= _LARGEST_KEY else None


@functools.lru_cache(maxsize=4096)
def _read_key(header: str) -> tuple[str, bytes, ec.EllipticCurvePublicKey] | None:
    pem = _decoded(header)
    key = flower.read_public_key(pem)
    return None if key is None else (fingerprint(key), pem, key)


def _decoded(value: str) -> bytes:
    """Decode a base64 header; return b"" if it is invalid."""
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        return b""


def _seconds_ahead(headers: Mapping[str, str]) -> float | None:
    try:
        signed = datetime.fromisoformat(headers.get(flower.TIMESTAMP, ""))
        return (signed - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return None


def _clock_problem(name: str, ahead: float | None) -> tuple[str, str]:
    if ahead is None:
        return "expected the time of the signature", f"{name} gave none"
    direction = "ahead of" if ahead > 0 else "behind"
    return (
        "The client's clock is not the server's",
        f"that of {name} is {abs(ahead):.0f} s {direction} it; set the clock (NTP).",
    )


def _unknown_key(key: str, status: int) -> GatewayRefusal:
    return GatewayRefusal(
        status,
        "The key is not registered with this federation, or no longer",
        f"{key}. Send the public key (.pub) to the federation's operator, who runs: "
        "knnper fed register FEDERATION NAME NAME.key.pub",
        flower.NOT_ACCEPTED,
    )

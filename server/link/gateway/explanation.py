"""Why Flower refused a client, in words for both sides."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
)
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    uses_nist_ec_curve,
    verify_signature,
)

from knnper.transport.credentials.node_keys import fingerprint
from server.link.gateway.allowed import ACTIVATE
from server.link.roster_file import Registered

_CLOCK_TOLERANCE = 5.0  # seconds; what Flower allows a client to be ahead
_LONGEST_AGO = 300.0  # seconds; what Flower allows a signature to be old


@dataclass
class Clients:
    """Who is registered, as the gateway knows it.

    Attributes
    ----------
    names
        Clients' names by their keys' fingerprints; replaced as a whole.
    """

    names: Mapping[str, str] = field(default_factory=dict)

    def learn(self, roster: Mapping[str, Registered]) -> None:
        """Take over the clients of ``roster``."""
        self.names = {one.key_sha256: one.name for one in roster.values()}


def explain(
    clients: Clients, path: str, headers: Mapping[str, str], status: int
) -> str | None:
    """Return what a refused client should be told; None if there is nothing to add.

    Parameters
    ----------
    clients
        Who is registered.
    path
        What was asked for.
    headers
        Of the request, with lower-case names.
    status
        Flower's answer.
    """
    key = key_of(headers)
    if key is None:
        return None
    name = clients.names.get(key)
    if status == HTTPStatus.UNAUTHORIZED:
        return _unauthorized(name, key, headers.get(TIMESTAMP_HEADER))
    if path == ACTIVATE and status == HTTPStatus.PRECONDITION_FAILED:
        return _not_activated(name, key)
    return None


def with_explanation(body: bytes, explanation: str) -> bytes:
    """Return Flower's JSON error ``body`` with ``explanation`` among its details."""
    try:
        error = json.loads(body)
        return json.dumps({**error, "extra": explanation}).encode()
    except (ValueError, TypeError):
        return body


def _not_activated(name: str | None, key: str) -> str:
    if name is None:
        return _unknown(key)
    return (
        f"{name} is connected already, or was until less than a minute ago: another "
        "process uses its key, or the last one was killed. Stop the other one; after "
        "a kill, try again in a minute."
    )


def _unauthorized(name: str | None, key: str, timestamp: str | None) -> str:
    ahead = _seconds_ahead(timestamp)
    if ahead is not None and not -_LONGEST_AGO < ahead < _CLOCK_TOLERANCE:
        direction = "ahead of" if ahead > 0 else "behind"
        return (
            f"The clock of {name or key} is {abs(ahead):.0f} s {direction} the "
            "server's; set the clock (NTP)."
        )
    if name is None:
        return _unknown(key)
    return f"The signature of {name} is not that of its key {key}."


def _unknown(key: str) -> str:
    return (
        f"The key {key} is not registered with this federation, or no longer. Send the "
        "public key (.pub) to the federation's operator, who runs: knnper federation "
        "register SERVER.yaml NAME NAME.key.pub"
    )


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the fingerprint of the key that a request names; None without one."""
    key = _public_key(headers)
    return None if key is None else fingerprint(key)


def proven_key_of(headers: Mapping[str, str]) -> str | None:
    """Return the same if the request is signed with that key, lately."""
    key, timestamp = _public_key(headers), headers.get(TIMESTAMP_HEADER, "")
    ahead = _seconds_ahead(timestamp)
    if key is None or ahead is None or not -_LONGEST_AGO < ahead < _CLOCK_TOLERANCE:
        return None
    signature = _decoded(headers.get(FLEET_HTTP_SIGNATURE_HEADER, ""))
    proven = verify_signature(key, timestamp.encode(), signature)
    return fingerprint(key) if proven else None


def _public_key(headers: Mapping[str, str]) -> ec.EllipticCurvePublicKey | None:
    try:
        pem = _decoded(headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""))
        key: object = bytes_to_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    if isinstance(key, ec.EllipticCurvePublicKey) and uses_nist_ec_curve(key):
        return key
    return None


def _decoded(value: str) -> bytes:
    """Return what a header holds in base64; nothing if it holds something else."""
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        return b""


def _seconds_ahead(timestamp: str | None) -> float | None:
    try:
        signed = datetime.fromisoformat(timestamp or "")
        return (signed - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return None

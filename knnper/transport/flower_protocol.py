"""Flower's HTTP protocol between servers and nodes, as bytes on the wire.

The messages are those of Flower's published ``.proto`` files, `flwr.proto`. Paths,
headers and numbers are copied here instead of imported from Flower's private modules;
`tests/transport/test_flower_protocol.py` compares them with Flower's.
"""

import base64
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

import httpx
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
)
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.run_pb2 import GetRunRequest
from google.protobuf.message import Message

from knnper.files import parse_json

# Environment variable; with 1, no private name of Flower is used.
PLAIN_FLOWER = "KNNPER_PLAIN_FLOWER"
PROTOBUF = "application/protobuf"
SERVER_APP = "flwr-serverapp"  # a kind of task, and the command that does it

# Headers with which a SuperNode signs a request.
PUBLIC_KEY, SIGNATURE, TIMESTAMP = "flwr-public-key", "flwr-signature", "flwr-timestamp"
AHEAD_S, AGO_S = 5, 300  # by how much the time of a signature may be off
HEALTH = "/health"
FLEET = "/v1/fleet/"
CONTROL = "/v1/control/"
# Paths of operators with which a client could control other clients.
ATTACKS = frozenset({f"{CONTROL}start-run", f"{CONTROL}register-node"})
ACTIVATE, DEACTIVATE = f"{FLEET}activate-node", f"{FLEET}deactivate-node"
REGISTER, UNREGISTER = f"{FLEET}register-node", f"{FLEET}unregister-node"
PUSH_MESSAGES, PUSH_OBJECT = f"{FLEET}push-messages", f"{FLEET}push-object"
PULL_MESSAGES, HEARTBEAT = f"{FLEET}pull-messages", f"{FLEET}send-node-heartbeat"
ACQUIRE_TASK = "/v1/runtime/acquire-task"
# Requests that a SuperNode may make, by path.
REQUESTS: Mapping[str, type[Message]] = MappingProxyType(
    {
        ACTIVATE: ActivateNodeRequest,
        DEACTIVATE: DeactivateNodeRequest,
        REGISTER: RegisterNodeFleetRequest,
        UNREGISTER: UnregisterNodeFleetRequest,
        PUSH_MESSAGES: PushMessagesRequest,
        PUSH_OBJECT: PushObjectRequest,
        HEARTBEAT: SendNodeHeartbeatRequest,
        PULL_MESSAGES: PullMessagesRequest,
        f"{FLEET}pull-object": PullObjectRequest,
        f"{FLEET}confirm-message-received": ConfirmMessageReceivedRequest,
        f"{FLEET}get-run": GetRunRequest,
        f"{FLEET}get-fab": GetFabRequest,
    }
)
# Numbers of errors in an answer, and in a reply.
FORBIDDEN, UNREADABLE = 10, 1003
KEY_NEEDED, BAD_HEARTBEAT, NOT_ACCEPTED = 2001, 2003, 2004
UNKNOWN_ERROR, APP_FAILED, MESSAGE_UNAVAILABLE = 0, 2, 3
SUPERLINK = 1  # its id among the nodes
TTL_TOLERANCE_S = 0.1
_NIST = (ec.SECP192R1, ec.SECP224R1, ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_SHA256_DIGITS = 64


@dataclass(frozen=True)
class FlowerError:
    """An error in an answer: Flower's number, its text and further detail."""

    code: int
    detail: str
    extra: str = ""

    def as_json(self) -> bytes:
        """Return the body of an answer."""
        return json.dumps({"code": self.code, "detail": self.detail}).encode()

    @staticmethod
    def of(body: str) -> "FlowerError":
        """Parse the error in an answer; number 0 with the body if it is none."""
        try:
            document = parse_json(body)
            extra = document.get("extra")
            return FlowerError(
                int(document["code"]), str(document["detail"]), extra or ""
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return FlowerError(0, body[:200])


def is_plain() -> bool:
    """Return whether only Flower's public interface is used, which is slower."""
    return os.environ.get(PLAIN_FLOWER, "") not in ("", "0")


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a key in the form that requests carry."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def read_public_key(pem: bytes) -> ec.EllipticCurvePublicKey | None:
    """Return a key on a NIST curve, as Flower requires; None for anything else."""
    try:
        key = load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _NIST):
        return key
    return None


def is_signature(key: ec.EllipticCurvePublicKey, text: bytes, signature: bytes) -> bool:
    """Return whether the owner of ``key`` signed ``text``."""
    try:
        key.verify(signature, text, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def signed_headers(key: ec.EllipticCurvePrivateKey) -> dict[str, str]:
    """Return headers that prove the node's identity to a server now."""
    now = datetime.now(UTC).isoformat()
    signature = key.sign(now.encode(), ec.ECDSA(hashes.SHA256()))
    return {
        PUBLIC_KEY: base64.b64encode(public_pem(key.public_key())).decode(),
        TIMESTAMP: now,
        SIGNATURE: base64.b64encode(signature).decode(),
    }


def http_client(
    address: str, ca: Path | None, *, trust_env: bool = True
) -> httpx.Client:
    """Return an HTTP client for a server; without ``ca`` it does not use TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # as lenient as Flower's
    if ca is not None:
        context.load_verify_locations(ca)
    url = f"{'http' if ca is None else 'https'}://{address}"
    return httpx.Client(base_url=url, verify=context, timeout=30, trust_env=trust_env)


def post(
    client: httpx.Client,
    path: str,
    request: Message,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> httpx.Response:
    """Post a request and return the response, whatever its status."""
    headers = {"content-type": PROTOBUF, "accept": PROTOBUF, **headers}
    return client.post(path, content=request.SerializeToString(), headers=headers)


def parts_of(tree: ObjectTree) -> Iterator[ObjectTree]:
    """Yield a tree's objects, children first."""
    for child in tree.children:
        yield from parts_of(child)
    yield tree


def is_object_id(text: str) -> bool:
    """Return whether ``text`` is a SHA-256 as Flower writes it."""
    try:
        return len(text) == _SHA256_DIGITS and int(text, 16) >= 0
    except ValueError:
        return False


def head_of(content: bytes) -> tuple[str, list[str], int]:
    """Return an object's kind, the ids of its children and its body's length."""
    kind, children, length = content[: content.index(b"\0")].decode().split(" ")
    return kind, children.split(",") if children else [], int(length)


def body_of(content: bytes) -> bytes:
    """Return the content of an object after its head."""
    return content[content.index(b"\0") + 1 :]


def leaf(kind: str, body: bytes) -> bytes:
    """Return an object without children."""
    return f"{kind}  {len(body)}\0".encode() + body

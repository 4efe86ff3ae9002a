"""A peer that sends a gateway the requests of a SuperNode, valid or not."""

import base64
import contextlib
import hashlib
import json
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
)
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from google.protobuf.message import Message as Proto

from knnper.transport.credentials import Address, read_node_key

PROTOBUF = {"content-type": "application/protobuf"}
FLEET = "/v1/fleet/"


def signed(key: EllipticCurvePrivateKey, age_s: float = 0.0) -> dict[str, str]:
    """Return the headers that prove ``key``."""
    when = datetime.fromtimestamp(time.time() - age_s, UTC).isoformat()
    signature = sign_message(key, when.encode())
    public = public_key_to_bytes(key.public_key())
    return {
        **PROTOBUF,
        FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(public).decode(),
        TIMESTAMP_HEADER: when,
        FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(signature).decode(),
    }


def deflated(kind: str, body: bytes, children: tuple[str, ...] = ()) -> bytes:
    """Return an object as Flower sends it."""
    return f"{kind} {','.join(children)} {len(body)}".encode() + b"\0" + body


def id_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Reply:
    """A reply and its objects, which need not be what they seem."""

    metadata: Metadata
    objects_inside: dict[str, bytes]
    tree_inside: ObjectTree
    claimed: Metadata | None = None

    @property
    def objects(self) -> dict[str, bytes]:
        """The message's own object comes last."""
        metadata = Metadata()
        metadata.CopyFrom(self.claimed or self.metadata)
        metadata.message_id = ""
        body = Message(metadata=metadata).SerializeToString(deterministic=True)
        message = deflated("Message", body, (self.tree_inside.object_id,))
        return {**self.objects_inside, id_of(message): message}

    @property
    def tree(self) -> ObjectTree:
        *_, message = self.objects
        return ObjectTree(object_id=message, children=[self.tree_inside])

    def request(self, node_id: int) -> PushMessagesRequest:
        metadata = Metadata()
        metadata.CopyFrom(self.metadata)
        metadata.message_id = self.tree.object_id
        message = Message(metadata=metadata)
        message.content.SetInParent()
        return PushMessagesRequest(
            node=Node(node_id=node_id),
            messages_list=[message],
            message_object_trees=[self.tree],
            clientapp_runtime_list=[0.1],
        )


def reply_to(message: Message, record: RecordDict | None = None) -> Reply:
    """Return an honest reply to what was received."""
    request, now, record = message.metadata, time.time(), record or RecordDict()
    metadata = Metadata(
        run_id=request.run_id,
        src_node_id=request.dst_node_id,
        dst_node_id=SUPERLINK_NODE_ID,
        reply_to_message_id=request.message_id,
        group_id=request.group_id,
        ttl=request.created_at + request.ttl - now - 1,
        message_type=request.message_type,
        created_at=now,
    )
    inside = get_all_nested_objects(record).items()
    contents = {name: object_.deflate() for name, object_ in inside}
    return Reply(metadata, contents, get_object_tree(record))


@dataclass
class Peer:
    """One key and a connection to the gateway."""

    key: EllipticCurvePrivateKey
    http: httpx.Client
    node_id: int = 0

    def post(
        self, name: str, body: Proto | bytes, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else body.SerializeToString()
        path = f"{FLEET}{name}"
        return self.http.post(
            path, content=content, headers=headers or signed(self.key)
        )

    @property
    def node(self) -> Node:
        return Node(node_id=self.node_id)

    def activate(self) -> None:
        public = public_key_to_bytes(self.key.public_key())
        request = ActivateNodeRequest(public_key=public, heartbeat_interval=30)
        answer = self.post("activate-node", request).raise_for_status()
        self.node_id = ActivateNodeResponse.FromString(answer.content).node_id

    def deactivate(self) -> None:
        self.post("deactivate-node", DeactivateNodeRequest(node_id=self.node_id))

    def receive(self, patience_s: float = 60.0) -> tuple[Message, ObjectTree]:
        """Return the next message with its tree; do not fetch its objects."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            answer = self.post("pull-messages", PullMessagesRequest(node=self.node))
            response = PullMessagesResponse.FromString(
                answer.raise_for_status().content
            )
            if response.messages_list:
                return response.messages_list[0], response.message_object_trees[0]
            time.sleep(0.1)
        raise AssertionError("no message came")

    def take(self, message: Message, tree: ObjectTree) -> None:
        """Fetch a message's objects and confirm that they arrived."""
        run_id = message.metadata.run_id
        for object_id in _all_of(tree):
            while not self._pulled(run_id, object_id).object_available:
                time.sleep(0.05)
        confirmed = ConfirmMessageReceivedRequest(
            node=self.node, run_id=run_id, message_object_id=tree.object_id
        )
        self.post("confirm-message-received", confirmed).raise_for_status()

    def _pulled(self, run_id: int, name: str) -> PullObjectResponse:
        request = PullObjectRequest(node=self.node, run_id=run_id, object_id=name)
        answer = self.post("pull-object", request).raise_for_status()
        response: PullObjectResponse = PullObjectResponse.FromString(answer.content)
        return response

    def announce(self, reply: Reply) -> httpx.Response:
        return self.post("push-messages", reply.request(self.node_id))

    def push(
        self, run_id: int, session: str, name: str, content: bytes
    ) -> httpx.Response:
        request = PushObjectRequest(
            node=self.node,
            run_id=run_id,
            object_id=name,
            object_content=content,
            session_id=session,
        )
        return self.post("push-object", request)

    def send(self, reply: Reply) -> list[httpx.Response]:
        """Announce a reply and push all of it; return the answers."""
        answers = [self.announce(reply)]
        if not answers[0].is_success:
            return answers
        response = PushMessagesResponse.FromString(answers[0].content)
        run_id, objects = reply.metadata.run_id, reply.objects
        return answers + [
            self.push(run_id, response.session_id, object_id, objects[object_id])
            for object_id in response.objects_to_push
        ]

    def answer(self, record: RecordDict | None = None) -> None:
        """Do honestly what a SuperNode does with one message."""
        message, tree = self.receive()
        self.take(message, tree)
        *_, last = self.send(reply_to(message, record))
        assert PushObjectResponse.FromString(last.raise_for_status().content).stored


def _all_of(tree: ObjectTree) -> Iterator[str]:
    for child in tree.children:
        yield from _all_of(child)
    yield tree.object_id


@contextlib.contextmanager
def peer(
    server: Address, ca: Path | None, key: EllipticCurvePrivateKey | Path
) -> Iterator[Peer]:
    verify = True if ca is None else ssl.create_default_context(cafile=ca)
    scheme = "http" if ca is None else "https"
    known = read_node_key(key) if isinstance(key, Path) else key
    with httpx.Client(
        base_url=f"{scheme}://{server}", verify=verify, timeout=60
    ) as http:
        yield Peer(known, http)


def connected(server: Address, ca: Path | None) -> socket.socket:
    """Return a bare connection, after the handshake."""
    plain = socket.create_connection((server.host, server.port), timeout=60)
    if ca is None:
        return plain
    context = ssl.create_default_context(cafile=ca)
    return context.wrap_socket(plain, server_hostname=server.host)


def head(path: str, length: int, headers: Mapping[str, str]) -> bytes:
    """Return the head of a request for ``path``."""
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def reason(answer: httpx.Response) -> str:
    """Return the reason in a refusal."""
    answer_body = json.loads(answer.content)
    return f"{answer_body.get('detail')} {answer_body.get('extra', '')}"


def seconds_until_closed(connection: socket.socket) -> float:
    """Read until the peer closes the connection; return the seconds it took."""
    began = time.monotonic()
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1000):
            pass
    return time.monotonic() - began

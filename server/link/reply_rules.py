"""Rules for a client's reply: its announcement, its metadata and its objects."""

import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from flwr.app import ConfigRecord, MetricRecord
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from google.protobuf.message import DecodeError

from knnper.server.link.gateway_rules import GatewayRefusal
from knnper.transport import flower_protocol as flower

Children = Mapping[str, tuple[str, ...]]

LARGEST_RECORD = 1_000_000  # bytes of an object that is no part of an array

_RECORDS: Mapping[str, Callable[[bytes], object]] = MappingProxyType(
    {"ConfigRecord": ConfigRecord.inflate, "MetricRecord": MetricRecord.inflate}
)
_UNREADABLE = (
    *(ValueError, TypeError, KeyError, AttributeError),
    *(DecodeError, RecursionError),
)


def validate_announcement(request: PushMessagesRequest) -> tuple[Metadata, Children]:
    """Validate the announcement of a reply; return its metadata and object tree."""
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        raise invalid_reply("expected one message with one tree")
    message, tree = request.messages_list[0], request.message_object_trees[0]
    if message.content.ByteSize():
        raise invalid_reply("expected the content among the objects")
    times = [*request.clientapp_runtime_list]
    if len(times) > 1 or not all(0 <= seconds < math.inf for seconds in times):
        raise invalid_reply("expected the client's seconds")
    children = _children(tree)
    if message.metadata.message_id != tree.object_id:
        raise invalid_reply("expected the message's id at the root of the tree")
    return message.metadata, children


def _children(tree: ObjectTree) -> Children:
    """Return each object's children, which must be the same wherever it occurs."""
    children_of: dict[str, tuple[str, ...]] = {}
    for part in flower.parts_of(tree):
        children = tuple(child.object_id for child in part.children)
        if not flower.is_object_id(part.object_id):
            raise invalid_reply("found an id that is no SHA-256")
        if len(set(children)) != len(children):
            raise invalid_reply("found an object twice below another")
        if children_of.setdefault(part.object_id, children) != children:
            raise invalid_reply("found an object with two kinds of children")
    return children_of


def require_matching_answer(reply: Metadata, question: Metadata) -> None:
    """Refuse a reply of another run, kind or round than the message, or too late."""
    ends = question.created_at + question.ttl + flower.TTL_TOLERANCE_S
    is_in_time = 0 < reply.ttl < math.inf and 0 < reply.created_at < math.inf
    if not is_in_time or reply.created_at + reply.ttl > ends:
        raise invalid_reply("found a time that is not that of an answer")
    if (
        reply.run_id != question.run_id
        or reply.dst_node_id != flower.SUPERLINK
        or reply.message_type != question.message_type
        or reply.group_id != question.group_id
    ):
        raise GatewayRefusal(
            400, "a reply of another run, kind or round than what it answers"
        )


def require_decodable(
    content: bytes, children: tuple[str, ...], announced: Metadata
) -> None:
    """Refuse an object that Flower or the run could not decode."""
    try:
        head = content[: content.index(b"\0", 0, LARGEST_RECORD) + 1]
        kind, named, length = flower.head_of(head)
        is_valid = length == len(content) - len(head)
        if kind == "ArrayChunk":
            is_valid &= not children
        elif len(content) > LARGEST_RECORD:
            most = f"expected at most {LARGEST_RECORD}, or an array"
            details = f"found {len(content)} bytes in a {kind[:20]}, {most}"
            raise GatewayRefusal(413, "a record is too large", details)
        else:
            is_valid &= _is_valid(kind, content, children, announced)
    except _UNREADABLE as error:
        raise invalid_reply(f"found an object that cannot be read: {error}") from error
    if not is_valid or len(named) != len(children) or set(named) != set(children):
        raise invalid_reply(f"found a {kind[:20]} that is not what was announced")


def _is_valid(
    kind: str, content: bytes, children: tuple[str, ...], announced: Metadata
) -> bool:
    body = flower.body_of(content)
    if kind == "Message":
        message, expected = Message.FromString(body), Metadata()
        expected.CopyFrom(announced)
        expected.message_id = ""
        num_children = 0 if message.HasField("error") else 1
        return message.metadata == expected and len(children) == num_children
    if kind in ("RecordDict", "ArrayRecord"):
        return set(json.loads(body).values()) == set(children)
    if kind == "Array":
        places = json.loads(body)["arraychunk_ids"]
        return isinstance(places, list) and all(
            type(place) is int and 0 <= place < len(children) for place in places
        )
    _RECORDS[kind](content)
    return not children


def invalid_reply(why: str) -> GatewayRefusal:
    """Make the refusal of a reply that no client of Flower's would send."""
    return GatewayRefusal(400, "the reply is not what Flower sends", why)

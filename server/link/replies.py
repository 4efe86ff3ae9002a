"""Validate client replies, and forward them to Flower only once complete.

Flower accepts a reply in parts: first its metadata and the tree of its objects, then
each object. It does not check the metadata and the tree, and a run that pulls the reply
waits until the last object has arrived. So the gateway collects the parts itself,
compares them with each other and with the message that they answer, and forwards
complete and valid replies with the signature of the client. Nothing of a refused reply
reaches Flower; the run gets an error as the reply instead, and does not wait.

Sent messages are noted from Flower's answers and kept in memory only. A restart ends
the SuperLink and, with it, the runs of these messages.
"""

import asyncio
import hashlib
import json
import math
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
from flwr.proto.error_pb2 import Error
from flwr.proto.fleet_pb2 import (
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree, PushObjectRequest

from knnper.server.link.gateway_rules import AuthenticatedClient, GatewayRefusal
from knnper.server.link.reply_rules import (
    LARGEST_RECORD,
    Children,
    invalid_reply,
    require_decodable,
    require_matching_answer,
    validate_announcement,
)
from knnper.transport import flower_protocol as flower
from knnper.transport.polling import LEAST_LIMIT_BYTES, MOST_TIMES_SENT

_STALLED_S = 180.0  # without another object; Flower waits as long
_KEPT_S = 120.0  # for a client that missed the last answer and repeats its request
_TIDY_S = 5.0
_AT_ONCE = 4  # replies forwarded at a time, with one object each in memory
_MB = 1e6
Warn = Callable[[str, str, str], None]


@dataclass
class _SentMessage:
    metadata: Metadata
    objects: dict[str, int]  # bytes by object id, once it was fetched
    # Flower's answer with the message; empty once its node has used it.
    unclaimed: bytes
    upload: "_Upload | None" = None
    answered_at: float = math.inf  # time.monotonic()

    @property
    def most(self) -> int:
        """Largest reply in bytes, as the run itself limits it."""
        return max(LEAST_LIMIT_BYTES, MOST_TIMES_SENT * sum(self.objects.values()))

    @property
    def expired(self) -> bool:
        """Whether Flower no longer waits, or nobody will ask for the answer again."""
        metadata = self.metadata
        return (
            time.time() > metadata.created_at + metadata.ttl
            or time.monotonic() > self.answered_at + _KEPT_S
        )


@dataclass
class _Upload:
    """A reply that is being received, in a temporary file without a name."""

    caller: AuthenticatedClient
    request: PushMessagesRequest
    children: Children
    file: IO[bytes]
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    received: int = 0
    heard: float = field(default_factory=time.monotonic)
    announced: bool = False  # to Flower
    passing_on: "asyncio.Task[None] | None" = None

    @property
    def root(self) -> str:
        return str(self.request.message_object_trees[0].object_id)

    @property
    def is_whole(self) -> bool:
        return len(self.places) == len(self.children)

    def write(self, name: str, content: bytes, start: int) -> None:
        """Store an object; refuse one that differs from its announcement."""
        if hashlib.sha256(content).hexdigest() != name:
            raise invalid_reply("an object does not match its id")
        require_decodable(
            content, self.children[name], self.request.messages_list[0].metadata
        )
        os.pwrite(self.file.fileno(), content, start)
        self.places[name] = start, len(content)

    def read(self, name: str) -> bytes:
        start, length = self.places[name]
        return os.pread(self.file.fileno(), length, start)

    def size_in_memory(self) -> int:
        """Return the bytes of all arrays, where one chunk may occur many times."""
        total = 0
        for name, (_, length) in self.places.items():
            if length > LARGEST_RECORD:
                continue
            content = self.read(name)
            if flower.head_of(content)[0] == "Array":
                times = Counter(json.loads(flower.body_of(content))["arraychunk_ids"])
                sizes = [self.places[child][1] for child in flower.head_of(content)[1]]
                total += sum(sizes[index] * count for index, count in times.items())
        return total


class Replies:
    """Receives replies, and forwards them."""

    def __init__(
        self, upstream: httpx.AsyncClient, folder: Path, quota: int | None, warn: Warn
    ) -> None:
        self._upstream, self._folder = upstream, folder
        self._quota, self._warn = quota, warn
        self._sent: dict[int, dict[str, _SentMessage]] = {}
        self._used: Counter[tuple[int, int]] = Counter()
        self._passing = asyncio.Semaphore(_AT_ONCE)

    def sent(self, node_id: int, answer: bytes) -> None:
        """Note the message in Flower's answer to a node."""
        response = PullMessagesResponse.FromString(answer)
        for message, tree in zip(
            response.messages_list, response.message_object_trees, strict=True
        ):
            objects = {part.object_id: 0 for part in flower.parts_of(tree)}
            of_node = self._sent.setdefault(node_id, {})
            of_node[message.metadata.message_id] = _SentMessage(
                message.metadata, objects, unclaimed=answer
            )

    def unclaimed(self, node_id: int) -> bytes | None:
        """Return an answer with a message that its node has not used, once.

        Flower hands out a message a single time. If the connection broke just then, the
        node would miss it, and the run would wait in vain.
        """
        for sent in self._sent.get(node_id, {}).values():
            if sent.unclaimed and not sent.expired:
                answer, sent.unclaimed = sent.unclaimed, b""
                return answer
        return None

    def require_run(self, node_id: int, run_id: int) -> None:
        """Refuse a request about a run that sent the node no message."""
        sent = list(self._of(node_id, run_id))
        if not sent:
            raise GatewayRefusal(400, "no message of this run was sent to this client")
        for message in sent:
            message.unclaimed = b""

    def require_object(
        self, node_id: int, run_id: int, name: str
    ) -> Callable[[int], None]:
        """Refuse an object that was not sent; return a function that notes its size."""
        messages = [
            message for message in self._of(node_id, run_id) if name in message.objects
        ]
        if not messages:
            why = "this object is of no message that was sent to this client"
            raise GatewayRefusal(400, why)
        for message in messages:
            message.unclaimed = b""

        def fetched(num_bytes: int) -> None:
            for message in messages:
                message.objects[name] = max(message.objects[name], num_bytes)

        return fetched

    def require_message(self, node_id: int, run_id: int, name: str) -> None:
        """Refuse the id of a message that was not sent."""
        sent = self._sent.get(node_id, {}).get(name)
        if sent is None or sent.metadata.run_id != run_id:
            raise GatewayRefusal(400, "this message was not sent to this client")
        sent.unclaimed = b""

    def announce(
        self, caller: AuthenticatedClient, request: PushMessagesRequest
    ) -> bytes:
        """Begin to receive a reply; return the answer that Flower would give."""
        metadata, children = validate_announcement(request)
        node_id = request.node.node_id
        sent = self._sent.get(node_id, {}).get(metadata.reply_to_message_id)
        if metadata.src_node_id != node_id:
            raise GatewayRefusal(400, "a reply in the name of another client")
        if sent is None:
            raise GatewayRefusal(
                400, "a reply to no message that was sent to this client"
            )
        require_matching_answer(metadata, sent.metadata)
        sent.unclaimed = b""
        upload = sent.upload
        if upload is not None and upload.root != metadata.message_id:
            raise GatewayRefusal(409, "a message that was answered already")
        if upload is None:
            try:
                file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            except OSError as error:
                raise _no_storage(error) from error
            sent.upload = upload = _Upload(caller, request, children, file)
        response = PushMessagesResponse(
            results={metadata.message_id: 0},
            objects_to_push=[child for child in children if child not in upload.places],
            session_id=upload.session,
        )
        return bytes(response.SerializeToString())

    async def store(
        self, caller: AuthenticatedClient, request: PushObjectRequest, num_bytes: int
    ) -> Callable[[], Awaitable[None]]:
        """Store an object; return a function that forwards the reply if complete."""
        node_id, run_id, name = request.node.node_id, request.run_id, request.object_id
        sent, upload = self._open(node_id, run_id, request.session_id, name)
        upload.caller, upload.heard = caller, time.monotonic()
        start, used = upload.received, (node_id, run_id)
        upload.received += num_bytes
        self._used[used] += num_bytes
        try:
            if not upload.is_whole:
                self._require_room(sent, upload, used)
            if name not in upload.places:
                content = request.object_content
                await asyncio.to_thread(upload.write, name, content, start)
        except GatewayRefusal as refusal:
            await self._send_error_reply(sent, upload, refusal)
            raise
        except (
            OSError,
            ValueError,
        ) as error:  # a full disk, or a file that was just closed
            raise _no_storage(error) from error

        async def passed_on() -> None:
            if upload.is_whole:
                await self._forward_once(sent, upload)

        return passed_on

    async def keep_tidy(self) -> None:
        """Forget expired messages and stalled replies, until cancelled."""
        while True:
            await asyncio.sleep(_TIDY_S)
            for of_node in list(self._sent.values()):
                for name, message in list(of_node.items()):
                    await self._tidy(of_node, name, message)

    def forget_run(self, run_id: int) -> None:
        """Forget the messages and replies of a finished run."""
        for of_node in self._sent.values():
            for name, item in list(of_node.items()):
                if item.metadata.run_id == run_id:
                    self._close(of_node.pop(name))
        self._sent = {
            node: messages for node, messages in self._sent.items() if messages
        }
        for used in [item for item in self._used if item[1] == run_id]:
            del self._used[used]

    def _of(self, node_id: int, run_id: int) -> Iterator[_SentMessage]:
        for message in self._sent.get(node_id, {}).values():
            if message.metadata.run_id == run_id:
                yield message

    def _open(
        self, node_id: int, run_id: int, session: str, name: str
    ) -> tuple[_SentMessage, _Upload]:
        for sent in self._of(node_id, run_id):
            upload = sent.upload
            if upload is not None and upload.session == session:
                if upload.file.closed and upload.passing_on is None:
                    raise GatewayRefusal(409, "an object of a reply that was refused")
                if name in upload.children:
                    return sent, upload
        raise GatewayRefusal(400, "an object of no reply that this client announced")

    def _require_room(
        self, sent: _SentMessage, upload: _Upload, used: tuple[int, int]
    ) -> None:
        if self._quota is not None and self._used[used] > self._quota:
            raise _over_quota(self._quota, "max_upload_mb in the server's settings")
        if upload.received > sent.most:
            most = f"{MOST_TIMES_SENT} times what it answers, or 64 MiB"
            raise _over_quota(sent.most, most)

    async def _forward_once(self, sent: _SentMessage, upload: _Upload) -> None:
        """Forward a complete reply, once; repeated requests wait for the same task."""
        if upload.passing_on is None:
            passing = self._forward(sent, upload)
            upload.passing_on = asyncio.create_task(passing)
        try:
            await asyncio.shield(upload.passing_on)
        except GatewayRefusal as refusal:
            if refusal.status >= 500:
                upload.passing_on = (
                    None  # The client retries, and the reply is forwarded again.
                )
            raise

    async def _forward(self, sent: _SentMessage, upload: _Upload) -> None:
        if sent.most < await asyncio.to_thread(upload.size_in_memory):
            refusal = _over_quota(sent.most, "one piece stands in many places")
            await self._send_error_reply(sent, upload, refusal)
            raise refusal
        try:
            async with self._passing:
                response = await self._announce(upload.request, upload.caller)
                if upload.root not in response.objects_to_push and not upload.announced:
                    raise GatewayRefusal(409, "Flower did not take this reply")
                upload.announced = True
                for name in response.objects_to_push:
                    content = await asyncio.to_thread(upload.read, name)
                    await self._push(upload, response.session_id, name, content)
        except GatewayRefusal as refusal:
            if refusal.status < 500:
                self._finish(sent, upload)
            raise
        self._finish(sent, upload)

    async def _announce(
        self, request: PushMessagesRequest, caller: AuthenticatedClient
    ) -> PushMessagesResponse:
        answer = await self._post(
            flower.PUSH_MESSAGES, request.SerializeToString(), caller
        )
        response: PushMessagesResponse = PushMessagesResponse.FromString(answer)
        return response

    async def _push(
        self, upload: _Upload, session: str, name: str, content: bytes
    ) -> None:
        request = upload.request
        body = PushObjectRequest(
            node=request.node,
            run_id=request.messages_list[0].metadata.run_id,
            object_id=name,
            object_content=content,
            session_id=session,
        ).SerializeToString()
        await self._post(flower.PUSH_OBJECT, body, upload.caller)

    async def _post(self, path: str, body: bytes, caller: AuthenticatedClient) -> bytes:
        headers = {**caller.signature, "content-type": flower.PROTOBUF}
        try:
            answer = await self._upstream.post(path, content=body, headers=headers)
        except httpx.HTTPError as error:
            raise unreachable(error) from error
        if answer.is_success:
            return answer.content
        refused = flower.FlowerError.of(answer.text)
        status = answer.status_code if answer.status_code < 500 else 503
        raise GatewayRefusal(status, refused.detail, refused.extra, refused.code)

    async def _send_error_reply(
        self, sent: _SentMessage, upload: _Upload, refusal: GatewayRefusal
    ) -> None:
        if upload.file.closed:
            return
        self._finish(sent, upload)
        why = f"the gateway refused this reply: {refusal}"
        request = upload.request
        message = Message(error=Error(code=flower.MESSAGE_UNAVAILABLE, reason=why))
        message.metadata.CopyFrom(request.messages_list[0].metadata)
        message.metadata.message_id = ""
        content = flower.leaf("Message", message.SerializeToString(deterministic=True))
        message.metadata.message_id = hashlib.sha256(content).hexdigest()
        excuse = PushMessagesRequest(
            node=request.node,
            messages_list=[message],
            message_object_trees=[ObjectTree(object_id=message.metadata.message_id)],
        )
        try:
            response = await self._announce(excuse, upload.caller)
            for name in response.objects_to_push:
                await self._push(upload, response.session_id, name, content)
        except GatewayRefusal as unheard:
            message_text = (
                f"the run did not receive the refusal of its reply: {unheard}"
            )
            self._warn(upload.caller.name, unheard.why, message_text)

    def _finish(self, sent: _SentMessage, upload: _Upload) -> None:
        sent.answered_at = time.monotonic()
        upload.file.close()

    def _close(self, sent: _SentMessage) -> None:
        upload = sent.upload
        if upload is not None and (
            upload.passing_on is None or upload.passing_on.done()
        ):
            upload.file.close()

    async def _tidy(
        self, of_node: dict[str, _SentMessage], name: str, sent: _SentMessage
    ) -> None:
        upload = sent.upload
        if sent.expired:
            self._close(of_node.pop(name))
        elif (
            upload is not None
            and not upload.file.closed
            and upload.passing_on is None
            and time.monotonic() > upload.heard + _STALLED_S
        ):
            why = GatewayRefusal(408, "a reply that does not continue")
            self._warn(upload.caller.name, why.why, f"refused {why}")
            await self._send_error_reply(sent, upload, why)


def unreachable(error: httpx.HTTPError) -> GatewayRefusal:
    """Return an answer after which SuperNodes retry."""
    cause = f"{type(error).__name__}: {error}".rstrip(": ")  # many errors have no text
    if isinstance(error, httpx.TimeoutException):
        return GatewayRefusal(504, "Flower's SuperLink did not answer in time", cause)
    return GatewayRefusal(
        503, "Flower's SuperLink cannot be reached at the moment", cause
    )


def _no_storage(error: Exception) -> GatewayRefusal:
    return GatewayRefusal(503, "a reply cannot be kept", str(error))


def _over_quota(limit: int, setting: str) -> GatewayRefusal:
    most = f"{limit / _MB:.0f} MB ({setting})"
    return GatewayRefusal(413, "the reply is larger than the quota", most)

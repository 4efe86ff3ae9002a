"""An ASGI proxy that forwards permitted requests of clients to Flower."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import httpx
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import (
    SendNodeHeartbeatRequest,
    SendNodeHeartbeatResponse,
)
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    PullObjectRequest,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.run_pb2 import GetRunRequest
from google.protobuf.message import Message

from knnper.server.link.arrivals import Arrivals
from knnper.server.link.exchange import FLOWER_HEADER_PREFIX, Exchange, Scope, Send
from knnper.server.link.gateway_rules import (
    AuthenticatedClient,
    GatewayRefusal,
    Rules,
    key_of,
    parsed,
    with_reason,
)
from knnper.server.link.notices import Notices, printable_ascii
from knnper.server.link.presence import Presence
from knnper.server.link.replies import Replies, unreachable
from knnper.server.link.request_limits import Meter, Receive, read_body
from knnper.transport import flower_protocol as flower
from knnper.transport.diagnosis import GATEWAY_HEADERS, own_versions, with_standing

_HEADERS_TO_FLOWER = frozenset({"content-type", "accept"})
_LONGEST_ERROR = 64 * 1024
_IS_CONNECTED = (
    "is connected already, or was until less than a minute ago: another process uses "
    "its key, or the last one was killed. Stop the other one; after a kill, try again "
    "in a minute."
)
_NEW_CLIENT_S = 3.0  # until the gateway knows a key that was just registered
_LOOK_S = 0.1
# Flower counts a node as offline after twice the pause that its heartbeat announces.
_ANNOUNCED_PAUSE_S = 30.0
_HEARTBEAT_EVERY_S = 27.0
# Connections of unknown or slow clients are closed.
_CLOSE_CONNECTION = (b"connection", b"close")
_VERSIONS = [
    (header.encode(), own_versions()[package].encode())
    for package, header in GATEWAY_HEADERS.items()
]


class _FlowerRefusedError(Exception):
    """Flower refused a request, and the client has received its answer."""


@dataclass(frozen=True)
class Gateway:
    """An ASGI application in front of Flower.

    Attributes
    ----------
    upstream
        HTTP client of Flower's control port.
    look
        Requests an update of the registered clients.
    """

    upstream: httpx.AsyncClient
    rules: Rules
    replies: Replies
    meter: Meter
    look: Callable[[], None]
    notices: Notices
    arrivals: Arrivals
    presence: Presence = field(init=False)
    # By node, when the gateway last sent a heartbeat for it.
    _heartbeat_at: dict[int, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "presence", Presence(self.rules.clients))
        # A held request of a revoked client is answered at once.
        self.rules.clients.on_removed = self.arrivals.forget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange, caller = Exchange(scope, receive, send), None
        try:
            self.rules.require_open(scope, exchange.headers.get("content-length"))
            if exchange.path == flower.HEALTH:
                async with self._forward(
                    exchange.method, flower.HEALTH, exchange.headers
                ) as response:
                    await exchange.stream(response, [*_VERSIONS, _CLOSE_CONNECTION])
                return
            caller = await self._caller(exchange)
            with self.meter.one_request(caller.key):
                await self._answer(exchange, caller)
        except GatewayRefusal as refusal:
            self._log(exchange, caller, refusal)
            headers = [*_VERSIONS] if exchange.path == flower.HEALTH else []
            if caller is None or refusal.status == HTTPStatus.GATEWAY_TIMEOUT:
                headers.append(_CLOSE_CONNECTION)
            await exchange.answer(refusal.status, refusal.body(), extra_headers=headers)

    async def _caller(self, exchange: Exchange) -> AuthenticatedClient:
        """Return the client that signed a request; wait for one just registered."""
        try:
            return self.rules.caller(exchange.path, exchange.headers)
        except GatewayRefusal as refusal:
            if refusal.status != HTTPStatus.PRECONDITION_FAILED:
                raise
        self.look()
        key, end = key_of(exchange.headers), time.monotonic() + _NEW_CLIENT_S
        while key not in self.rules.clients.names and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        return self.rules.caller(exchange.path, exchange.headers)

    async def _answer(self, exchange: Exchange, caller: AuthenticatedClient) -> None:
        length = int(exchange.headers["content-length"])
        self.rules.require_size(exchange.path, length)
        async with self.meter.room(exchange.host, caller.key, length):
            body = await read_body(exchange.receive, length)
            if exchange.path == flower.PUSH_OBJECT:
                request = await asyncio.to_thread(parsed, exchange.path, body)
            else:
                request = parsed(exchange.path, body)
            node_id = self.rules.require_own(caller, request)
            if isinstance(request, PushObjectRequest):
                self._require_node(caller)
                body.clear()
                passed_on = await self.replies.store(caller, request, length)
        if isinstance(request, PushObjectRequest):
            await passed_on()
            answer = PushObjectResponse(stored=True).SerializeToString()
            await exchange.answer(HTTPStatus.OK, answer, flower.PROTOBUF)
        elif not await self._respond(exchange, caller, node_id, request):
            return
        # A node may leave while its request for messages is held, so that one is noted
        # when Flower accepts it, and not with the answer.
        if exchange.path != flower.PULL_MESSAGES:
            self.presence.note(exchange.path, caller.key)

    async def _respond(
        self,
        exchange: Exchange,
        caller: AuthenticatedClient,
        node_id: int,
        request: Message,
    ) -> bool:
        """Answer a request; return whether it succeeded."""
        if isinstance(request, PushMessagesRequest):
            self._require_node(caller)
            answer = self.replies.announce(caller, request)
            await exchange.answer(HTTPStatus.OK, answer, flower.PROTOBUF)
            self.arrivals.note_activity(node_id)
            return True
        if isinstance(request, PullMessagesRequest):
            return await self._send_messages(exchange, caller, node_id, request)
        return await self._pass_on(exchange, caller, node_id, request)

    def _require_node(self, caller: AuthenticatedClient) -> None:
        """Ask a client to retry if its node is not known yet, as in insecure mode."""
        if caller.node_id is None:
            self.look()
            raise GatewayRefusal(
                HTTPStatus.SERVICE_UNAVAILABLE, "this node is not known yet"
            )

    async def _pass_on(
        self,
        exchange: Exchange,
        caller: AuthenticatedClient,
        node_id: int,
        request: Message,
    ) -> bool:
        """Forward a request and Flower's answer; return whether it succeeded."""
        fetched: Callable[[int], None] | None = None
        if isinstance(request, (GetRunRequest, GetFabRequest)):
            self.replies.require_run(node_id, request.run_id)
        elif isinstance(request, ConfirmMessageReceivedRequest):
            name = request.message_object_id
            self.replies.require_message(node_id, request.run_id, name)
        elif isinstance(request, PullObjectRequest):
            name = request.object_id
            fetched = self.replies.require_object(node_id, request.run_id, name)
        async with self._forward(
            "POST", exchange.path, exchange.headers, request
        ) as response:
            if response.is_error:
                await self._forward_refusal(exchange, caller, response)
                return False
            if isinstance(request, ActivateNodeRequest):
                await self._forward_activation(exchange, response)
                return True
            if fetched is not None:
                fetched(int(response.headers.get("content-length", 0)))
            await exchange.stream(response)
        if isinstance(request, DeactivateNodeRequest):
            self.arrivals.forget(request.node_id)
            self._heartbeat_at.pop(request.node_id, None)
        return True

    async def _forward_activation(
        self, exchange: Exchange, response: httpx.Response
    ) -> None:
        """Forward Flower's answer to a node that begins."""
        answer = await response.aread()
        node_id = ActivateNodeResponse.FromString(answer).node_id
        self.arrivals.note_activity(node_id)
        await exchange.answer(response.status_code, answer, flower.PROTOBUF)
        self.look()

    async def _send_messages(
        self,
        exchange: Exchange,
        caller: AuthenticatedClient,
        node_id: int,
        request: PullMessagesRequest,
    ) -> bool:
        """Answer once Flower has a message, or after a while; see `Arrivals`."""

        async def ask_flower() -> bytes:
            async with self._forward(
                "POST", exchange.path, exchange.headers, request
            ) as response:
                if response.is_error:
                    await self._forward_refusal(exchange, caller, response)
                    raise _FlowerRefusedError
                self.presence.note(exchange.path, caller.key)
                return await response.aread()

        await self._send_heartbeat(exchange, caller, request)
        answer = self.replies.unclaimed(node_id)
        if answer is None:
            try:
                answer = await self.arrivals.messages(
                    node_id, ask_flower, exchange.disconnected()
                )
            except _FlowerRefusedError:
                return False
            self.replies.sent(node_id, answer)
        await exchange.answer(HTTPStatus.OK, answer, flower.PROTOBUF)
        return True

    async def _send_heartbeat(
        self,
        exchange: Exchange,
        caller: AuthenticatedClient,
        request: PullMessagesRequest,
    ) -> None:
        """Send a heartbeat for a node if one is due: its request may be held long.

        This project's nodes send none of their own while a request is held.
        """
        node_id, now = request.node.node_id, time.monotonic()
        if now - self._heartbeat_at.get(node_id, -math.inf) < _HEARTBEAT_EVERY_S:
            return
        heartbeat = SendNodeHeartbeatRequest(
            node=request.node, heartbeat_interval=_ANNOUNCED_PAUSE_S
        )
        async with self._forward(
            "POST", flower.HEARTBEAT, exchange.headers, heartbeat
        ) as response:
            answer = await response.aread()
        if response.is_success and SendNodeHeartbeatResponse.FromString(answer).success:
            self._heartbeat_at[node_id] = now
            self.presence.note(exchange.path, caller.key)

    @contextlib.asynccontextmanager
    async def _forward(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        request: Message | None = None,
    ) -> AsyncIterator[httpx.Response]:
        passed_on = {
            name: value
            for name, value in headers.items()
            if name in _HEADERS_TO_FLOWER or name.startswith(FLOWER_HEADER_PREFIX)
        }
        # Only parsed fields are forwarded: unknown fields and headers do not reach
        # Flower.
        content = None if request is None else request.SerializeToString()
        build = self.upstream.build_request
        forwarded = build(method, path, headers=passed_on, content=content)
        try:
            response = await self.upstream.send(forwarded, stream=True)
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise unreachable(error) from error

    async def _forward_refusal(
        self, exchange: Exchange, caller: AuthenticatedClient, response: httpx.Response
    ) -> None:
        body = (await response.aread())[:_LONGEST_ERROR]
        path, status = exchange.path, response.status_code
        standing = self.presence.standing(path, caller.key, status)
        if standing is not None:
            await exchange.answer(status, with_standing(body, standing))
            return
        if path == flower.ACTIVATE and status == HTTPStatus.PRECONDITION_FAILED:
            body = with_reason(body, f"{caller.name} {_IS_CONNECTED}")
        message = f"Flower refused {path}: {body.decode(errors='replace')}"
        self.notices.warn(exchange.host, f"{caller.name}: {path}: {status}", message)
        await exchange.answer(status, body)

    def _log(
        self,
        exchange: Exchange,
        caller: AuthenticatedClient | None,
        refusal: GatewayRefusal,
    ) -> None:
        known = self.rules.clients.names.get(key_of(exchange.headers))
        sender = caller.name if caller else f"a sender with the key of {known}"
        if caller is None and known is None:
            sender = "a stranger"
        is_known = exchange.path in flower.REQUESTS or exchange.path in flower.ATTACKS
        kind = exchange.path if is_known else "another path"
        path = printable_ascii(exchange.path)
        did = "refused" if refusal.status < 500 else "cannot answer"
        self.notices.warn(
            exchange.host,
            f"{sender}: {kind}: {refusal.why}",
            f"{did} {exchange.method} '{path}' of {sender}: {refusal}",
        )

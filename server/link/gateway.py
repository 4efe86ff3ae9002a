"""An ASGI proxy that forwards permitted requests of clients to Flower."""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

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
from knnper.server.link.gateway_rules import (
    AuthenticatedClient,
    GatewayRefusal,
    RegisteredClients,
    Rules,
    key_of,
    parsed,
    raw_path,
    with_reason,
)
from knnper.server.link.notices import Notices, printable_ascii
from knnper.server.link.replies import Replies, unreachable
from knnper.transport import flower_protocol as flower
from knnper.transport.diagnosis import (
    GATEWAY_HEADERS,
    Standing,
    own_versions,
    with_standing,
)
from knnper.transport.sockets import origin_of
from knnper.transport.waiting import duration

logger = logging.getLogger(__name__)
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
# A body's next 100 kB, or its end, must arrive within 10 s. Flower drops a reply
# without progress for 180 s; an object of 5 MB takes that long at a third of this rate.
_WINDOW_S = 10.0
_WINDOW_BYTES = 100_000

_LONGEST_WAIT_S = 4.0  # for memory; then the client is asked to retry
_REQUESTS_OF_A_KEY = 16  # at a time; a SuperNode makes five
Scope = Mapping[str, Any]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
_PASSED_BACK = frozenset({"content-type", "content-length"})
_PASSED_ON = frozenset({"content-type", "accept"})
_FLOWERS = "flwr-"
_LONGEST_ERROR = 64 * 1024
_IS_CONNECTED = (
    "is connected already, or was until less than a minute ago: another process uses "
    "its key, or the last one was killed. Stop the other one; after a kill, try again "
    "in a minute."
)
_NEW_CLIENT_S = 3.0  # until the gateway knows a key that was just registered
_SILENT_S = 60.0  # after which Flower counts a node as offline
_USUAL_PAUSE_S = 30.0  # between two heartbeats, as Flower's nodes announce it
_PART_OF_PAUSE = 0.9  # after which Flower needs another heartbeat
_LOOK_S = 0.1
# Connections of unknown or slow clients are closed.
_THE_END = (b"connection", b"close")
_VERSIONS = [
    (header.encode(), own_versions()[package].encode())
    for package, header in GATEWAY_HEADERS.items()
]


@dataclass
class Meter:
    """Limits the bytes of bodies in memory: in all, by address, and by key."""

    in_all: int
    of_address: int
    of_key: int
    _held: Counter[str] = field(default_factory=Counter, init=False)
    _requests: Counter[str] = field(default_factory=Counter, init=False)
    _freed: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)

    @contextlib.contextmanager
    def one_request(self, key: str) -> Iterator[None]:
        """Count a request of ``key`` while it is answered; refuse too many."""
        if self._requests[key] >= _REQUESTS_OF_A_KEY:
            raise GatewayRefusal(
                503, f"{_REQUESTS_OF_A_KEY} requests at a time are enough"
            )
        with _counted(self._requests, key, 1):
            yield

    @contextlib.asynccontextmanager
    async def room(self, host: str, key: str, num_bytes: int) -> AsyncIterator[None]:
        """Reserve memory for a body, after waiting for it if necessary."""
        most = {
            "": self.in_all,
            f"address {origin_of(host)}": self.of_address,
            f"key {key}": self.of_key,
        }

        def fits() -> bool:
            return all(
                self._held[holder] + num_bytes <= limit
                for holder, limit in most.items()
            )

        async with self._freed:
            try:
                async with asyncio.timeout(_LONGEST_WAIT_S):
                    await self._freed.wait_for(fits)
            except TimeoutError as error:
                raise GatewayRefusal(
                    503, "there are too many bytes in flight"
                ) from error
        try:
            with contextlib.ExitStack() as held:
                for holder in most:
                    held.enter_context(_counted(self._held, holder, num_bytes))
                yield
        finally:
            async with self._freed:
                self._freed.notify_all()


@contextlib.contextmanager
def _counted(counter: Counter[str], holder: str, number: int) -> Iterator[None]:
    counter[holder] += number
    try:
        yield
    finally:
        counter[holder] -= number
        if not counter[holder]:
            del counter[holder]


async def read_body(receive: Receive, length: int) -> bytearray:
    """Read a body of ``length`` bytes; refuse one that arrives too slowly."""
    body, has_more = bytearray(), True
    mark, end = 0, time.monotonic() + _WINDOW_S
    while has_more:
        try:
            async with asyncio.timeout(end - time.monotonic()):
                event = await receive()
        except TimeoutError as error:
            received = f"found {len(body)} of {length} bytes"
            why = "The client sends its request too slowly"
            raise GatewayRefusal(504, why, received) from error
        if event["type"] == "http.disconnect":
            raise GatewayRefusal(
                503, "The client went away before it had sent its request"
            )
        body += event.get("body", b"")
        has_more = event.get("more_body", False)
        if len(body) - mark >= _WINDOW_BYTES:
            mark, end = len(body), time.monotonic() + _WINDOW_S
    return body


@dataclass
class Presence:
    """Logs which clients connect and leave; ``heard`` and ``left_at`` are by key."""

    clients: RegisteredClients
    heard: dict[str, float] = field(default_factory=dict)
    left_at: dict[str, float] = field(default_factory=dict)

    def note(self, path: str, key: str) -> None:
        """Note a successful request; log a client that connects or leaves."""
        known, now = self.clients.names, time.monotonic()
        if path == flower.DEACTIVATE:
            if self.heard.pop(key, None) is not None:
                self.left_at[key] = now
                logger.info("client %s has left", known.get(key))
        elif key in known:
            self._log_return(key, now)
            self.heard[key] = now
        if len(self.heard) > len(known):
            self.heard = {
                client: last for client, last in self.heard.items() if client in known
            }
        if len(self.left_at) > len(known):
            self.left_at = {
                key: last for key, last in self.left_at.items() if key in known
            }

    def _log_return(self, key: str, now: float) -> None:
        name, heard, left_at = (
            self.clients.names[key],
            self.heard.get(key),
            self.left_at,
        )
        if heard is None and key in left_at:
            away_s = now - left_at.pop(key)
            logger.info("client %s is back; it left %s ago", name, duration(away_s))
        elif heard is None:
            logger.info("client %s is connected", name)
        elif now - heard > _SILENT_S:
            away = duration(now - heard)
            logger.info("client %s is back; it was silent for %s", name, away)

    def standing(self, path: str, key: str, status: int) -> Standing | None:
        """Return a client's standing if its doctor asked for it; None otherwise."""
        if path != flower.ACTIVATE or status != HTTPStatus.BAD_REQUEST:
            return None
        heard = self.heard.get(key)
        idle_s = None if heard is None else round(time.monotonic() - heard, 1)
        return Standing(self.clients.names.get(key), idle_s)


class Exchange:
    """An HTTP request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.method, self.path = scope, scope["method"], raw_path(scope)
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        client = scope.get("client")
        self.host = "?" if client is None else str(client[0])
        self.receive, self._send = receive, send

    async def answer(
        self,
        status: int,
        body: bytes,
        kind: str = "application/json",
        extra_headers: Headers = (),
    ) -> None:
        """Send an answer with a body."""
        length = str(len(body)).encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", length)]
        await self._start(status, [*headers, *extra_headers])
        await self._send({"type": "http.response.body", "body": body})

    async def disconnected(self) -> None:
        """Wait until the client has disconnected; its request was read before."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def stream(
        self, response: httpx.Response, extra_headers: Headers = ()
    ) -> None:
        """Forward Flower's answer."""
        passed = {
            name.encode(): value.encode()
            for name, value in response.headers.items()
            if name in _PASSED_BACK or name.startswith(_FLOWERS)
        }
        await self._start(response.status_code, [*passed.items(), *extra_headers])
        body = {"type": "http.response.body"}
        try:
            async for piece in response.aiter_raw():
                await self._send({**body, "body": piece, "more_body": True})
        except httpx.HTTPError:
            # uvicorn closes the connection, and the client sees an incomplete answer.
            return
        await self._send({**body, "body": b""})

    async def _start(self, status: int, headers: Headers) -> None:
        start = {"type": "http.response.start", "status": int(status)}
        await self._send({**start, "headers": headers})


class Heartbeats:
    """Decides which heartbeats reach Flower.

    A node announces a pause of 30 s, and Flower counts it as online for twice as long.
    So a heartbeat every 27 s is enough: one of two that the node sends, or one of its
    requests for messages, which come at least every 20 s while it is idle.
    """

    def __init__(self) -> None:
        self._passed_on: dict[
            int, tuple[float, float]
        ] = {}  # by node: time, announced pause

    def passed_on(self, node_id: int, pause_s: float) -> None:
        """Note that Flower has accepted a heartbeat."""
        self._passed_on[node_id] = time.monotonic(), pause_s

    def forget(self, node_id: int) -> None:
        """Forget a node that has left, or that Flower refused."""
        self._passed_on.pop(node_id, None)

    def pause_s(self, node_id: int) -> float:
        """Return the pause between heartbeats that a node has announced."""
        _, pause_s = self._passed_on.get(node_id, (-math.inf, _USUAL_PAUSE_S))
        return pause_s

    def is_due(self, node_id: int, pause_s: float) -> bool:
        """Return whether Flower needs another heartbeat of a node."""
        last_at, known_s = self._passed_on.get(node_id, (-math.inf, pause_s))
        is_late = time.monotonic() - last_at >= _PART_OF_PAUSE * known_s
        return is_late or known_s != pause_s


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
    heartbeats: Heartbeats = field(default_factory=Heartbeats, init=False)
    presence: Presence = field(init=False)

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
                    await exchange.stream(response, [*_VERSIONS, _THE_END])
                return
            caller = await self._caller(exchange)
            with self.meter.one_request(caller.key):
                await self._answer(exchange, caller)
        except GatewayRefusal as refusal:
            self._log(exchange, caller, refusal)
            headers = [*_VERSIONS] if exchange.path == flower.HEALTH else []
            if caller is None or refusal.status == HTTPStatus.GATEWAY_TIMEOUT:
                headers.append(_THE_END)
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
        if isinstance(request, SendNodeHeartbeatRequest):
            return await self._answer_heartbeat(exchange, caller, request)
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
                await self._forward_activation(exchange, response, request)
                return True
            if fetched is not None:
                fetched(int(response.headers.get("content-length", 0)))
            await exchange.stream(response)
        if isinstance(request, DeactivateNodeRequest):
            self.arrivals.forget(request.node_id)
            self.heartbeats.forget(request.node_id)
        return True

    async def _forward_activation(
        self, exchange: Exchange, response: httpx.Response, request: ActivateNodeRequest
    ) -> None:
        """Forward Flower's answer to a node that begins."""
        answer = await response.aread()
        node_id = ActivateNodeResponse.FromString(answer).node_id
        self.arrivals.note_activity(node_id)
        self.heartbeats.passed_on(node_id, request.heartbeat_interval)
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
                return await response.aread()

        await self._send_heartbeat(exchange, request)
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
        self, exchange: Exchange, request: PullMessagesRequest
    ) -> None:
        """Send a heartbeat for a node, since its request may be held for long."""
        node_id = request.node.node_id
        pause_s = self.heartbeats.pause_s(node_id)
        if not self.heartbeats.is_due(node_id, pause_s):
            return
        heartbeat = SendNodeHeartbeatRequest(
            node=request.node, heartbeat_interval=pause_s
        )
        async with self._forward(
            "POST", flower.HEARTBEAT, exchange.headers, heartbeat
        ) as response:
            answer = await response.aread()
        self._note_heartbeat(heartbeat, response, answer)

    def _note_heartbeat(
        self,
        heartbeat: SendNodeHeartbeatRequest,
        response: httpx.Response,
        answer: bytes,
    ) -> None:
        """Note whether Flower accepted a heartbeat; if not, the next is due at once."""
        node_id = heartbeat.node.node_id
        self.heartbeats.forget(node_id)
        if response.is_success and SendNodeHeartbeatResponse.FromString(answer).success:
            self.heartbeats.passed_on(node_id, heartbeat.heartbeat_interval)

    async def _answer_heartbeat(
        self,
        exchange: Exchange,
        caller: AuthenticatedClient,
        request: SendNodeHeartbeatRequest,
    ) -> bool:
        """Answer a heartbeat; return whether it succeeded."""
        node_id = request.node.node_id
        if not self.heartbeats.is_due(node_id, request.heartbeat_interval):
            answer = SendNodeHeartbeatResponse(success=True).SerializeToString()
            await exchange.answer(HTTPStatus.OK, answer, flower.PROTOBUF)
            return True
        async with self._forward(
            "POST", exchange.path, exchange.headers, request
        ) as response:
            if response.is_error:
                await self._forward_refusal(exchange, caller, response)
                return False
            answer = await response.aread()
        self._note_heartbeat(request, response, answer)
        await exchange.answer(HTTPStatus.OK, answer, flower.PROTOBUF)
        return True

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
            if name in _PASSED_ON or name.startswith(_FLOWERS)
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

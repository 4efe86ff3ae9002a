"""Connection limits of a web server that serves hostile peers.

uvicorn counts a connection only after its TLS handshake, lets a client send nothing or
half a header for any time, and does not know to which client a connection belongs. This
server counts each connection from its acceptance: first among unknown peers, and among
identified ones once the application has identified the client (`introduce`). Both
groups have a limit. If one is full, the peer with the most connections loses one, so
that no peer can lock out the others. The address does not matter, since all connections
behind a proxy share one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass

import uvicorn
from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from knnper.errors import RunError
from knnper.transport.credentials import Address

_IPV6_PREFIX = 64  # bits; the usual size of one household's or machine's network
_BACKLOG = 2048  # connections waiting to be accepted; the kernel may allow fewer
_PAUSE_S = 1.0  # wait when the machine cannot accept another connection
_GOODBYE_S = 1.0  # wait for the peer's end of TLS
_INTRODUCE = "knnper.introduce"
_LEAST_FIELD_BYTES = 4  # a colon, a space and the end of the line
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SocketLimits:
    """Limits on the number of connections and on their duration."""

    # Connections of unknown peers, and of identified ones (`known`). Above a limit the
    # peer with the most connections loses its longest idle one, or else its oldest.
    strangers: int = 256
    strangers_per_address: int = 256  # IPv4 address, or IPv6 network of 64 bits
    known: int = 256
    header_s: float = 10.0  # TLS handshake and first header; any later header
    # First line and all fields of a request's header and trailer. An unfinished header
    # may exceed it by one read of the socket.
    header_bytes: int = 8_192
    idle_s: float = 30.0  # between requests
    unread_s: float = 30.0  # until the peer reads more of an answer or ends its body
    body_bytes_per_s: float = 20_000.0  # smallest speed of a body
    body_grace_s: float = 10.0  # seconds by which a body may be late


def introduce(scope: Scope, name: str) -> bool:
    """Assign a request's connection to the client ``name``; return whether it fits."""
    tell: Callable[[str], bool] | None = scope.get("extensions", {}).get(_INTRODUCE)
    return tell is None or tell(name)


async def read_pieces(receive: Receive, limits: SocketLimits) -> AsyncIterator[bytes]:
    """Yield a request's body as it arrives.

    Raises `TimeoutError` if it arrives too slowly, `ConnectionError` if the peer
    disconnects.
    """
    began, size, more_body = time.monotonic(), 0, True
    while more_body:
        due = began + limits.body_grace_s + size / limits.body_bytes_per_s
        # Data that has arrived already is accepted, however late it is.
        async with asyncio.timeout(max(due - time.monotonic(), 0)):
            event = await receive()
        if event["type"] == "http.disconnect":
            raise ConnectionError("the peer went away")
        piece: bytes = event.get("body", b"")
        size += len(piece)
        yield piece
        more_body = event.get("more_body", False)


def listen(
    host: str,
    port: int,
    hint: str = "another program or server may use it: choose another address",
) -> socket.socket:
    """Return a listening socket; ``hint`` is the advice if the address is not free."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        place, why = Address(host, port), error.strerror or error
        raise RunError(f"cannot listen at {place} ({why}); {hint}") from error
    # Connections inherit the option. Without it, Nagle's algorithm delays the body of
    # an answer, since head and body are two writes.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class Server(uvicorn.Server):
    """uvicorn with its own acceptance of connections, under `SocketLimits`."""

    def __init__(
        self,
        config: uvicorn.Config,
        limits: SocketLimits,
        on_ended: Callable[[str, str], None] = lambda _address, _why: None,
        logger: logging.Logger = _LOG,
    ) -> None:
        config.http, config.timeout_keep_alive = Connection, limits.idle_s  # type: ignore[assignment]
        config.limit_concurrency = None
        super().__init__(config)
        if not config.loaded:
            config.load()
        self.limits, self.logger, self._on_ended = limits, logger, on_ended
        self.strangers = _Room(limits.strangers, limits.strangers_per_address)
        self.known = _Room(limits.known, limits.known)
        self._accepting: set[asyncio.Task[None]] = set()
        self._visiting: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections by `_accept_from` instead of the event loop's server."""
        await super().startup([])
        for listener in sockets or ():
            _begin(self._accept_from(listener), self._accepting)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, finish pending requests, close."""
        await _stop(self._accepting)
        await super().shutdown(sockets)
        await _stop(self._visiting)

    def introduce(self, visit: Visit, name: str) -> bool:
        """Move a connection to those of ``name``; return whether there is room."""
        if visit.room is None:  # it has ended
            return True
        is_new = visit.room is not self.known or visit.party != name
        if is_new and (excess := self.known.in_excess(name)) is not None:
            if excess.party == name and not excess.is_idle:
                return False
            self._end(excess, "others need its place")
        visit.room.remove(visit)
        self.known.add(visit, name)
        return True

    async def _accept_from(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                self._on_ended("nobody", f"no connection can be accepted: {error}")
                await asyncio.sleep(_PAUSE_S)
                continue
            self.admit(accepted, address[0])

    def admit(self, accepted: socket.socket, address: str) -> None:
        """Add a connection; if there is no room, close the least needed one."""
        party = origin_of(address)
        if (excess := self.strangers.in_excess(party)) is not None:
            self._end(excess, "it was not identified before others arrived")
        visit = Visit(address)

        def close_unused(_: asyncio.Task[None]) -> None:
            if not visit.has_begun:  # cancelled before it could take the socket
                accepted.close()

        self.strangers.add(visit, party)
        visit.task = _begin(self._stay(visit, accepted), self._visiting)
        visit.task.add_done_callback(close_unused)

    def _end(self, visit: Visit, why: str) -> None:
        if visit.room is not None:
            visit.room.remove(visit)
        if visit.task is not None:
            visit.task.cancel()
        self._on_ended(visit.address, why)

    async def _stay(self, visit: Visit, accepted: socket.socket) -> None:
        tls, transport, visit.has_begun = self.config.ssl, None, True
        loop = asyncio.get_running_loop()
        try:
            # Failed handshakes are not logged: unknown peers could fill the log.
            with contextlib.suppress(OSError):
                transport, _ = await loop.connect_accepted_socket(
                    lambda: Connection(self, visit),
                    accepted,
                    ssl=tls,
                    ssl_handshake_timeout=None if tls is None else self.limits.header_s,
                    ssl_shutdown_timeout=None if tls is None else _GOODBYE_S,
                )
                await visit.lost.wait()
        finally:
            if transport is not None:
                transport.abort()
            if visit.room is not None:
                visit.room.remove(visit)


def _begin(
    work: Coroutine[None, None, None], among: set[asyncio.Task[None]]
) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    among.add(task)
    task.add_done_callback(among.discard)
    return task


async def _stop(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Visit:
    """One connection from its acceptance on, with its peer and its room."""

    def __init__(self, address: str) -> None:
        self.address, self.began, self.lost = address, time.monotonic(), asyncio.Event()
        self.room: _Room | None = None
        self.party, self.has_begun = "", False
        self.protocol: Connection | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request of the connection is being answered."""
        return self.protocol is None or self.protocol.is_idle


class _Room:
    """A limited number of connections by peer, each peer's oldest first."""

    def __init__(self, size: int, per_party: int) -> None:
        self._size, self._per_party, self._count = size, per_party, 0
        self._parties: dict[str, dict[Visit, None]] = {}

    def add(self, visit: Visit, party: str) -> None:
        self._parties.setdefault(party, {})[visit] = None
        self._count += 1
        visit.room, visit.party = self, party

    def remove(self, visit: Visit) -> None:
        visits = self._parties[visit.party]
        del visits[visit]
        if not visits:
            del self._parties[visit.party]
        self._count -= 1
        visit.room = None

    def in_excess(self, party: str) -> Visit | None:
        visits = self._parties.get(party, {})
        if len(visits) >= self._per_party:
            return _least_needed(visits)
        if self._count < self._size:
            return None
        most = max(self._parties.values(), key=len)
        return _least_needed(visits if len(visits) == len(most) else most)


def _least_needed(visits: dict[Visit, None]) -> Visit:
    return next((visit for visit in visits if visit.is_idle), next(iter(visits)))


class Connection(HttpToolsProtocol):
    """A connection with time limits on headers, bodies and reading of answers."""

    def __init__(self, server: Server, visit: Visit) -> None:
        limits, loop = server.limits, asyncio.get_running_loop()
        super().__init__(server.config, server.server_state, {}, loop)
        self.logger, self._limits = server.logger, limits
        self._introduce = functools.partial(server.introduce, visit)
        self._visit, visit.protocol = visit, self
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._num_field_bytes = 0  # of the current request's fields so far
        self._num_unfinished_bytes = 0  # received since the current header began
        self._is_in_header = self._is_in_body = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Start the timer of the first header, less the time that TLS has taken."""
        super().connection_made(transport)
        past = time.monotonic() - self._visit.began
        self._start("header", max(self._limits.header_s - past, 0))

    def data_received(self, data: bytes) -> None:
        """Process received data; start the timers of unfinished headers and bodies."""
        was_in_header = self._is_in_header
        super().data_received(data)
        if self.transport.is_closing():
            return
        if was_in_header and self._is_in_header:
            self._num_unfinished_bytes += len(data)
            if self._num_unfinished_bytes > self._limits.header_bytes:
                self._refuse_header()
                return
        if self.is_idle and self._is_in_body:  # answered before the body ended
            self._start("rest", self._limits.unread_s)
        elif self.is_idle:
            self._start("header", self._limits.header_s)

    def on_message_begin(self) -> None:
        """Begin a header; reject a second request before the first is answered."""
        if self.pipeline:
            raise ValueError("a request before earlier requests were answered")
        self._is_in_header = True
        self._num_field_bytes = self._num_unfinished_bytes = 0
        super().on_message_begin()
        self.scope["extensions"] = {_INTRODUCE: self._introduce}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        """Process a part of the path."""
        self._count_field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Process a field of the header or of the trailer."""
        self._count_field(len(name) + len(value))
        super().on_header(name, value)

    def _count_field(self, num_bytes: int) -> None:
        self._num_field_bytes += num_bytes + _LEAST_FIELD_BYTES
        if self._num_field_bytes > self._limits.header_bytes:
            # The parser stops at this error and calls `send_400_response`.
            raise ValueError("a header that is too large")

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request or one with too large a header, and close."""
        if self._num_field_bytes > self._limits.header_bytes:
            self._refuse_header()
        else:
            super().send_400_response(msg)

    def _refuse_header(self) -> None:
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    def on_headers_complete(self) -> None:
        """Start answering the request."""
        self._stop("header")
        self._is_in_header, self._is_in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Wait for the next request."""
        self._stop("rest")
        self._is_in_body = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Start the timer for the peer to read."""
        super().pause_writing()
        self._start("unread", self._limits.unread_s)

    def resume_writing(self) -> None:
        """Stop the timer: the peer has read."""
        self._stop("unread")
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers and release the connection's place."""
        for name in tuple(self._timers):
            self._stop(name)
        super().connection_lost(exc)
        self._visit.lost.set()

    def _start(self, name: str, seconds: float) -> None:
        """Schedule the end of the connection, unless this timer is running already."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


def origin_of(host: str) -> str:
    """Return the IPv4 address, or the IPv6 network: one host owns a whole /64."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))

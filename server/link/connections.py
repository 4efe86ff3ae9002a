"""A web server that limits the number of connections and the time that each takes.

uvicorn counts a connection only after its TLS handshake, and lets a client send nothing
or half a header for any time. This server counts each connection from its acceptance,
in all and by address, and closes those that are too slow.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from knnper.transport.sockets import origin_of

_PAUSE_S = 1.0  # wait when the machine cannot accept another connection
_GOODBYE_S = 1.0  # wait for the peer's end of TLS
_LEAST_FIELD_BYTES = 4  # a colon, a space and the end of the line
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the number of connections and on their duration.

    Attributes
    ----------
    in_all, per_address
        Connections at a time; an address is an IPv4 address, or an IPv6 network of 64
        bits.
    header_s
        Seconds for the TLS handshake and the first header together, and for any later
        header.
    header_bytes
        First line and all fields of a request's header and trailer. An unfinished
        header may exceed it by one read of the socket.
    idle_s
        Seconds between requests. The default is longer than SuperNodes keep an idle
        connection, so that they close it.
    unread_s
        Seconds until the peer reads more of an answer, or ends a body that is not read.
    """

    in_all: int = 2000
    per_address: int = 200
    header_s: float = 7.0
    header_bytes: int = 8_192
    idle_s: float = 75.0
    unread_s: float = 10.0


class ConnectionServer(uvicorn.Server):
    """uvicorn with its own acceptance of connections, under `ConnectionLimits`.

    Parameters
    ----------
    warn
        Called with an address and the reason when a connection is not accepted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        limits: ConnectionLimits,
        warn: Callable[[str, str], None],
        logger: logging.Logger = _LOG,
    ) -> None:
        config.timeout_keep_alive = limits.idle_s  # type: ignore[assignment]
        config.limit_concurrency = None
        super().__init__(config)
        if not config.loaded:
            config.load()
        self.limits, self.logger, self._warn = limits, logger, warn
        self._accepting: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._num_of_origin: Counter[str] = Counter()

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections by `_accept_from` instead of the event loop's server."""
        await super().startup([])
        for listener in sockets or ():
            _begin(self._accept_from(listener), self._accepting)

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, finish pending requests, close."""
        await _stop(self._accepting)
        await super().shutdown(sockets)
        await _stop(self._connections)

    async def _accept_from(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                self._warn("nobody", f"no connection can be accepted: {error}")
                await asyncio.sleep(_PAUSE_S)
                continue
            self._admit(accepted, address[0])

    def _admit(self, accepted: socket.socket, address: str) -> None:
        """Serve a connection, or close it if there are too many.

        Existing connections are never closed for a new one: they may be clients'.
        """
        origin, limits = origin_of(address), self.limits
        if (
            len(self._connections) >= limits.in_all
            or self._num_of_origin[origin] >= limits.per_address
        ):
            accepted.close()
            self._warn(
                address,
                f"turned away: there are {limits.in_all} connections already, or "
                f"{limits.per_address} of its address (max_connections_per_address in "
                "the server's settings)",
            )
            return

        def forget(_: asyncio.Task[None]) -> None:
            accepted.close()  # it is open if the task was cancelled before it began
            self._num_of_origin[origin] -= 1
            if not self._num_of_origin[origin]:
                del self._num_of_origin[origin]

        self._num_of_origin[origin] += 1
        serving = _begin(self._serve_connection(accepted), self._connections)
        serving.add_done_callback(forget)

    async def _serve_connection(self, accepted: socket.socket) -> None:
        tls, accepted_at = self.config.ssl, time.monotonic()
        transport: asyncio.Transport | None = None
        lost = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            # Failed handshakes are not logged: unknown peers could fill the log.
            with contextlib.suppress(OSError):
                transport, _ = await loop.connect_accepted_socket(
                    lambda: HttpConnection(self, accepted_at, lost),
                    accepted,
                    ssl=tls,
                    ssl_handshake_timeout=None if tls is None else self.limits.header_s,
                    ssl_shutdown_timeout=None if tls is None else _GOODBYE_S,
                )
                await lost.wait()
        finally:
            if transport is not None:
                transport.abort()


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


class HttpConnection(HttpToolsProtocol):
    """A connection with time limits on headers, bodies and reading of answers.

    Parameters
    ----------
    accepted_at
        Time of its acceptance, by `time.monotonic`.
    lost
        Set once the connection has ended.
    """

    def __init__(
        self, server: ConnectionServer, accepted_at: float, lost: asyncio.Event
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server.config, server.server_state, {}, loop)
        self.logger, self._limits = server.logger, server.limits
        self._accepted_at, self._lost = accepted_at, lost
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
        past = time.monotonic() - self._accepted_at
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
        self._lost.set()

    def _start(self, name: str, seconds: float) -> None:
        """Schedule the end of the connection, unless this timer is running already."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

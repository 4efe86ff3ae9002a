"""One connection: uvicorn's protocol, for peers that may mean no good."""

import asyncio
import logging
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from server.link.gateway.entrance import OnLost

_UNREAD_SECONDS = 60.0  # until the peer has taken in more of an answer
_REST_SECONDS = 60.0  # for the rest of a body that was answered before it was there


class Timer:
    """Calls something unless it is stopped in time.

    Parameters
    ----------
    loop
        Where time passes.
    seconds
        How long it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop, self._seconds = loop, seconds
        self._handle: asyncio.TimerHandle | None = None

    def start(self, on_end: Callable[[], None]) -> None:
        """Start, unless it runs."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, on_end)

    def stop(self) -> None:
        """Stop, if it runs."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(HttpToolsProtocol):
    """Ends when a request's header, or the reading of an answer, takes too long.

    Between requests, uvicorn ends it after its own time. Bodies have theirs in
    `server.link.gateway.application`.

    Parameters
    ----------
    config, server_state
        Of uvicorn's server.
    header_s
        Seconds for the whole header of a request, from the connection's beginning or
        from the header's first byte on.
    logger
        Is told of what strangers send.
    on_lost
        Called when the connection is lost.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        header_s: float,
        logger: logging.Logger,
        on_lost: OnLost,
    ) -> None:
        super().__init__(config, server_state, {}, asyncio.get_running_loop())
        self.logger = logger
        self._on_lost = on_lost
        self._header_timer = Timer(self.loop, header_s)
        self._reading_timer = Timer(self.loop, _UNREAD_SECONDS)
        self._rest_timer = Timer(self.loop, _REST_SECONDS)
        self._is_in_body = False

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._header_timer.start(self.transport.abort)

    def data_received(self, data: bytes) -> None:
        """Take in a piece; a header that it began has to end in time."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            timer = self._rest_timer if self._is_in_body else self._header_timer
            timer.start(self.transport.abort)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        self._header_timer.stop()
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Wait for the next request."""
        self._rest_timer.stop()
        self._is_in_body = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Wait for the peer to read."""
        super().pause_writing()
        self._reading_timer.start(self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the peer has read."""
        self._reading_timer.stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave nothing behind."""
        for timer in (self._header_timer, self._reading_timer, self._rest_timer):
            timer.stop()
        super().connection_lost(exc)
        self._on_lost()

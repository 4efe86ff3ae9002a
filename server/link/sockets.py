"""The gateway's socket: who is let in, TLS, and peers that take their time.

uvicorn speaks HTTP. It counts a connection only once its TLS handshake is done, and
never asks whose it is; it waits for a header, and for a reader, without end; it takes
headers of any size, and any number of requests before it has answered one. These are
what stands here.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import uvicorn

from knnper.server.link.gateway import Gateway, Notices, said_once_a_minute
from knnper.server.settings import TlsFiles
from knnper.transport.sockets import TimedConnection, origin_of

# Longer than SuperNodes keep an idle connection, so that they are the ones to end it.
_IDLE_SECONDS = 75
_LAST_ANSWERS_SECONDS = 5
_GOODBYE_SECONDS = 0.5
_PAUSE_SECONDS = 1.0
_UNREAD_SECONDS = 15.0  # until the peer has taken in more of an answer
_REST_SECONDS = 10.0  # for the rest of a body that was answered before it was there
_LARGEST_HEAD = 65_536  # bytes

_ADVICE = MappingProxyType(
    {
        "HTTP_REQUEST": "the client speaks no TLS; its settings lack `tls`",
        "WRONG_VERSION_NUMBER": "the client speaks no TLS, or another version of it",
        "TLSV1_ALERT_UNKNOWN_CA": "the client trusts another authority; copy this "
        "federation's ca.crt to it",
        "SSLV3_ALERT_BAD_CERTIFICATE": "the client does not accept the server's "
        "certificate",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED": "to the client's clock, the server's "
        "certificate has expired; renew it: knnper fed renew",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client does not accept the server's "
        "certificate",
    }
)


@dataclass(frozen=True)
class Limits:
    """What strangers may take up.

    Attributes
    ----------
    per_address
        Connections at a time from one IPv4 address or IPv6 network of 64 bits.
    in_all
        Connections at a time.
    first_words_s
        Seconds for a TLS handshake, and again for the whole header of a request.
    """

    per_address: int = 200
    in_all: int = 2000
    first_words_s: float = 7.0


class Listener(uvicorn.Server):
    """Serves the gateway until `should_exit` is set; leaves signals to others.

    Parameters
    ----------
    gateway
        Answers.
    tls
        The server's certificate; None without TLS.
    limits
        What strangers may take up.
    """

    def __init__(
        self, gateway: Gateway, tls: TlsFiles | None, limits: Limits | None = None
    ) -> None:
        super().__init__(_config(gateway, tls))
        self._tls, self._notices = tls, gateway.notices
        self._limits = limits or Limits()
        self._logger = said_once_a_minute(logging.getLogger("uvicorn.error"))
        self._accepting: list[asyncio.Task[None]] = []
        self._inside: set[asyncio.Task[None]] = set()
        self._held: Counter[str] = Counter()
        self.config.load()
        if self.config.ssl is not None:
            self.config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
            self.config.ssl.sslobject_class = _reporting_tls(gateway.notices)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing: the supervisor decides when to stop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Let connections in, instead of having the event loop do so."""
        self.servers = []
        accepting = map(self._accept_from, sockets or ())
        self._accepting = [asyncio.create_task(one) for one in accepting]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let nobody in any more, answer what was asked, end."""
        await _cancelled(self._accepting)
        cutting = asyncio.create_task(self._cut_idle())
        await super().shutdown(sockets)
        await _cancelled([cutting, *self._inside])

    async def serve_until_cancelled(self, listening: socket.socket) -> None:
        """Serve; on cancellation, answer what was asked so far and end."""
        serving = asyncio.create_task(self.serve([listening]))
        try:
            await asyncio.shield(serving)
        finally:
            self.should_exit = True
            await serving

    def renew(self) -> None:
        """Read certificate and key again, for connections from now on.

        Raises
        ------
        OSError
            If they cannot be used; the present ones stay in use.
        """
        if self.config.ssl is None or self._tls is None:
            return
        pair = (self._tls.certificate, self._tls.key)
        # A failure would leave the context in use without a key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*pair)
        self.config.ssl.load_cert_chain(*pair)

    async def _cut_idle(self) -> None:
        """Cut connections whose peers, with nothing to come, do not say goodbye.

        An idle client does not look at its connection until it uses it again.
        """
        while True:
            await asyncio.sleep(_GOODBYE_SECONDS)
            for one in list(self.server_state.connections):
                transport = one.transport
                if transport.is_closing() and not transport.get_write_buffer_size():
                    transport.abort()

    async def _accept_from(self, listening: socket.socket) -> None:
        """Let connections in, so many at a time in all and of one address."""
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                self._notices.warn("no connection", "accept", str(error))
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            origin = origin_of(address[0])
            excess = self._excess(origin)
            if excess is not None:
                self._notices.warn(address[0], excess, f"turned away: {excess}")
                accepted.close()
                continue
            self._held[origin] += 1
            task = asyncio.create_task(self._stay(accepted, origin))
            self._inside.add(task)
            task.add_done_callback(self._inside.discard)

    def _excess(self, origin: str) -> str | None:
        if self._held[origin] >= self._limits.per_address:
            return (
                f"it has {self._limits.per_address} connections already "
                "(max_connections_per_address in the server's settings)"
            )
        if self._held.total() >= self._limits.in_all:
            return f"there are {self._limits.in_all} connections already"
        return None

    async def _stay(self, accepted: socket.socket, origin: str) -> None:
        """Serve one connection until it is lost; failed handshakes end at once."""
        lost, tls = asyncio.Event(), self.config.ssl
        first_words_s = self._limits.first_words_s
        handshake_s, goodbye_s = (
            (None, None) if tls is None else (first_words_s, _GOODBYE_SECONDS)
        )
        try:
            # Why a handshake failed is in the notices already.
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: _Connection(self, self._logger, first_words_s, lost.set),
                    accepted,
                    ssl=tls,
                    ssl_handshake_timeout=handshake_s,
                    ssl_shutdown_timeout=goodbye_s,
                )
                await lost.wait()
        finally:
            self._held[origin] -= 1
            if not self._held[origin]:
                del self._held[origin]


class _Connection(TimedConnection):
    """One request after the other; the times of bodies are the gateway's."""

    def __init__(
        self,
        server: uvicorn.Server,
        logger: logging.Logger,
        first_words_s: float,
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(
            server,
            logger,
            first_s=first_words_s,
            header_s=first_words_s,
            rest_s=_REST_SECONDS,
            unread_s=_UNREAD_SECONDS,
            header_bytes=_LARGEST_HEAD,
        )
        self._on_lost = on_lost

    def on_message_begin(self) -> None:
        # One may come while the end of the last answer is on its way.
        if self.pipeline:
            raise ValueError("a request before the last ones were answered")
        super().on_message_begin()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()


def _reporting_tls(notices: Notices) -> type[ssl.SSLObject]:
    """Return a TLS object that says in ``notices`` why a handshake failed."""

    class ReportingTls(ssl.SSLObject):
        """The server's side of one connection; it does not know whose."""

        def do_handshake(self) -> Any:
            try:
                return super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                reason = error.reason or str(error)
                advice = _ADVICE.get(reason, "see `knnper site doctor` on the client")
                notices.warn("a TLS handshake failed", reason, f"{reason} ({advice})")
                raise

    return ReportingTls


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)


def _config(gateway: Gateway, tls: TlsFiles | None) -> uvicorn.Config:
    return uvicorn.Config(
        gateway,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
        http=_Connection,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_LAST_ANSWERS_SECONDS,
    )

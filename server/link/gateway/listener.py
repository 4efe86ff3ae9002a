"""The gateway's socket, with TLS."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Generator
from pathlib import Path

import httpx
import uvicorn

from knnper.config.address import Address
from knnper.config.errors import RunError
from server.link.gateway.application import Gateway
from server.link.gateway.connection import Connection
from server.link.gateway.entrance import Entrance, EntranceLimits, OnLost
from server.link.gateway.handshakes import reporting_tls
from server.link.gateway.notices import said_once_a_minute
from server.settings import TlsFiles

# Longer than SuperNodes keep an idle connection, so that they are the ones to end it.
_IDLE_SECONDS = 75
_LAST_ANSWERS_SECONDS = 5
_GOODBYE_SECONDS = 0.5
_BACKLOG = 2048  # connections that wait to be accepted; the kernel may take fewer
# Flower ends idle connections after 5 s; one that is older is not used again.
_UPSTREAM_IDLE_SECONDS = 2.0
_UPSTREAM_TIMEOUT = httpx.Timeout(60.0, connect=5.0)


def upstream_client(control: Address, ca: Path | None) -> httpx.AsyncClient:
    """Return the client with which the gateway reaches Flower's own port."""
    verify = True if ca is None else ssl.create_default_context(cafile=ca)
    return httpx.AsyncClient(
        base_url=f"{'http' if ca is None else 'https'}://{control}",
        verify=verify,
        timeout=_UPSTREAM_TIMEOUT,
        limits=httpx.Limits(
            max_connections=None, keepalive_expiry=_UPSTREAM_IDLE_SECONDS
        ),
        # Not by way of a proxy that the environment names.
        trust_env=False,
    )


def bind(address: Address) -> socket.socket:
    """Return a socket that listens at ``address``.

    Raises
    ------
    RunError
        If the address is taken or not this machine's.
    """
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        place = (address.host, address.port)
        listening = socket.create_server(place, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise RunError(
            f"cannot listen at {address} ({error.strerror or error}); another program "
            "or another server may use it: choose another address"
        ) from error
    # Connections inherit it: an answer's head and body are two writes.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


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
        self,
        gateway: Gateway,
        tls: TlsFiles | None,
        limits: EntranceLimits | None = None,
    ) -> None:
        self._tls = tls
        self._limits = limits or EntranceLimits()
        super().__init__(_config(gateway, tls))
        self.config.load()
        if self.config.ssl is not None:
            self.config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
            reporting = reporting_tls(gateway.notices)
            self.config.ssl.sslobject_class = reporting
        self._logger = said_once_a_minute(logging.getLogger("uvicorn.error"))
        self._entrance = Entrance(
            self._limits, gateway.notices, self.config.ssl, self._connection
        )
        self._accepting: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing: the supervisor decides when to stop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Let connections in, instead of having the event loop do so."""
        self.servers = []
        accepting = map(self._entrance.accept_from, sockets or ())
        self._accepting = [asyncio.create_task(one) for one in accepting]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let nobody in any more, answer what was asked, end."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        cutting = asyncio.create_task(self._cut_idle())
        await super().shutdown(sockets)
        cutting.cancel()
        await self._entrance.close()

    async def serve_until_cancelled(self, listening: socket.socket) -> None:
        """Serve; on cancellation, answer what was asked so far and end."""
        serving = asyncio.create_task(self.serve([listening]))
        try:
            await asyncio.shield(serving)
        finally:
            self.should_exit = True
            await serving

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

    def _connection(self, on_lost: OnLost) -> asyncio.Protocol:
        header_s = self._limits.first_words_s
        return Connection(
            self.config, self.server_state, header_s, self._logger, on_lost
        )


def _config(gateway: Gateway, tls: TlsFiles | None) -> uvicorn.Config:
    return uvicorn.Config(
        gateway,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
        http=Connection,
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

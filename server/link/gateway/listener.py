"""The gateway's socket, with TLS."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Generator
from pathlib import Path

import httpx
import uvicorn

from knnper.config.address import Address
from knnper.config.errors import RunError
from server.link.gateway.application import Gateway
from server.link.gateway.handshakes import reporting_tls
from server.settings import TlsFiles

# Longer than SuperNodes keep an idle connection, so that they are the ones to end it.
_IDLE_SECONDS = 75
_LAST_ANSWERS_SECONDS = 5
_MOST_CONNECTIONS = 2000
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
        listening = socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise RunError(
            f"cannot listen at {address} ({error.strerror or error}); another program "
            "or another server may use it: choose another address"
        ) from error
    # Connections inherit it: an answer's head and body are two writes.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class Listener(uvicorn.Server):
    """Serves the gateway until `should_exit` is set; leaves signals to others."""

    def __init__(self, gateway: Gateway, tls: TlsFiles | None) -> None:
        self._tls = tls
        super().__init__(_config(gateway, tls))
        self.config.load()
        if self.config.ssl is not None:
            self.config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
            reporting = reporting_tls(gateway.notices)
            self.config.ssl.sslobject_class = reporting

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing: the supervisor decides when to stop."""
        yield

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


def _config(gateway: Gateway, tls: TlsFiles | None) -> uvicorn.Config:
    return uvicorn.Config(
        gateway,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_LAST_ANSWERS_SECONDS,
    )

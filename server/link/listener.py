"""The web server of the gateway: certificate, limits of connections, shutdown."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Generator
from typing import Any

import uvicorn

from knnper.server.link.connections import ConnectionLimits, ConnectionServer
from knnper.server.link.gateway import Gateway
from knnper.server.link.notices import Notices, limit_repeats
from knnper.server.settings import TlsFiles

_LAST_ANSWERS_SECONDS = 5


class Listener(ConnectionServer):
    """Serves the gateway until `should_exit` is set; does not handle signals."""

    def __init__(
        self, gateway: Gateway, tls: TlsFiles | None, limits: ConnectionLimits
    ) -> None:
        config = uvicorn.Config(
            gateway,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_ANSWERS_SECONDS,
        )
        notices = gateway.notices
        super().__init__(
            config,
            limits,
            lambda address, why: notices.warn(address, why.partition(":")[0], why),
            limit_repeats(logging.getLogger("uvicorn.error")),
        )
        self._tls = tls
        self._arrivals = gateway.arrivals
        if self.config.ssl is not None:
            self.config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
            self.config.ssl.sslobject_class = _reporting_tls(notices)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing: `knnper.server.link.server` handles signals."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no further connections, answer pending requests, and end."""
        self._arrivals.close()
        await super().shutdown(sockets)

    async def serve_until_cancelled(self, listening: socket.socket) -> None:
        """Serve; on cancellation, answer pending requests and end."""
        serving = asyncio.create_task(self.serve([listening]))
        try:
            await asyncio.shield(serving)
        finally:
            self.should_exit = True
            await serving

    def renew(self) -> None:
        """Reload certificate and key, for new connections."""
        if self.config.ssl is None or self._tls is None:
            return
        pair = (self._tls.certificate, self._tls.key)
        # Tried first: a failure would leave the context in use without a key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*pair)
        self.config.ssl.load_cert_chain(*pair)


def _reporting_tls(notices: Notices) -> type[ssl.SSLObject]:
    """Return a TLS class that logs failed handshakes to ``notices``."""

    class ReportingTls(ssl.SSLObject):
        """The server's side of a connection, without its address."""

        def do_handshake(self) -> Any:
            try:
                return super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                reason = error.reason or str(error)
                advice = "see `knnper site doctor` on the client"
                notices.warn("a TLS handshake failed", reason, f"{reason} ({advice})")
                raise

    return ReportingTls

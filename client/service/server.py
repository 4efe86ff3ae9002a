"""The service on a socket, until it is told to stop."""

import ipaddress
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from knnper.config.errors import RunError

_STOPPING_S = 30
_MAX_CONNECTIONS = 256
_IDLE_S = 30


@dataclass(frozen=True)
class Binding:
    """Where the service listens.

    Attributes
    ----------
    host, port
        Port 0 is any free one.
    certificate, key
        PEM files for TLS; without them it is plain HTTP.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None

    @property
    def scheme(self) -> str:
        """``https`` or ``http``."""
        return "http" if self.certificate is None else "https"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine for sure."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(app: ASGIApp, binding: Binding, on_listening: Callable[[str], None]) -> None:
    """Answer requests until SIGTERM or SIGINT; what has begun is finished first.

    Parameters
    ----------
    app
        What answers.
    binding
        Where to listen.
    on_listening
        Is told the address, as in ``http://127.0.0.1:8080``.

    Raises
    ------
    RunError
        If the address cannot be listened at, or the TLS files are of no use.
    """
    config = server_config(app, binding)
    listener = _listen(binding)
    with listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        on_listening(f"{binding.scheme}://{shown}:{port}")
        # Once stopped, uvicorn raises the signal again, for whoever had it before.
        before = signal.signal(signal.SIGTERM, _ignore)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            signal.signal(signal.SIGTERM, before)


def server_config(app: ASGIApp, binding: Binding) -> uvicorn.Config:
    """Return how the application is served.

    Raises
    ------
    RunError
        If the TLS files are of no use.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_STOPPING_S,
        ssl_certfile=binding.certificate,
        ssl_keyfile=binding.key,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise RunError(
            f"TLS cannot be used with {binding.certificate} and {binding.key}: {error}"
            "; expected a certificate and its key, as PEM files that can be read"
        ) from error
    return config


def _listen(binding: Binding) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in binding.host else socket.AF_INET
        return socket.create_server(
            (binding.host, binding.port), family=family, backlog=_MAX_CONNECTIONS
        )
    except OSError as error:
        raise RunError(
            f"cannot listen at {binding.host}, port {binding.port}: {error}; choose "
            "another `service.port` or `service.host`, or stop what listens there"
        ) from error


def _ignore(signal_number: int, frame: FrameType | None) -> None:
    """Do nothing: the service has stopped, which is what was asked for."""

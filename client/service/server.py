"""The service on a socket, until it is told to stop."""

import ipaddress
import logging
import signal
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from knnper.config.errors import RunError
from knnper.transport.sockets import Server, SocketLimits, listen

_STOPPING_S = 30
_BETWEEN_NOTICES_S = 60

_LOG = logging.getLogger(__name__)


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


def serve(
    app: ASGIApp,
    binding: Binding,
    on_listening: Callable[[str], None],
    limits: SocketLimits | None = None,
) -> None:
    """Answer requests until SIGTERM or SIGINT; what has begun is finished first.

    Parameters
    ----------
    app
        What answers.
    binding
        Where to listen.
    on_listening
        Is told the address, as in ``http://127.0.0.1:8080``.
    limits
        What connections may take up.

    Raises
    ------
    RunError
        If the address cannot be listened at, or the TLS files are of no use.
    """
    server = make_server(app, binding, limits)
    with listen(
        binding.host,
        binding.port,
        "choose another `service.port` or `service.host`, or stop what listens there",
    ) as listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        on_listening(f"{binding.scheme}://{shown}:{port}")
        # Once stopped, uvicorn raises the signal again, for whoever had it before.
        before = signal.signal(signal.SIGTERM, _ignore)
        try:
            server.run(sockets=[listener])
        finally:
            signal.signal(signal.SIGTERM, before)


def make_server(
    app: ASGIApp, binding: Binding, limits: SocketLimits | None = None
) -> Server:
    """Return what serves the application on sockets that listen.

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
        timeout_graceful_shutdown=_STOPPING_S,
        ssl_certfile=binding.certificate,
        ssl_keyfile=binding.key,
    )
    try:
        return Server(config, limits or SocketLimits(), _Notices().ended)
    except (OSError, ssl.SSLError) as error:
        raise RunError(
            f"TLS cannot be used with {binding.certificate} and {binding.key}: {error}"
            "; expected a certificate and its key, as PEM files that can be read"
        ) from error


class _Notices:
    """Says once a minute how many connections were ended, and why."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()
        self._next = 0.0

    def ended(self, address: str, why: str) -> None:
        self._ended[why] += 1
        if time.monotonic() > self._next:
            for reason, count in self._ended.items():
                _LOG.warning(
                    "connections ended: %d, the last of %s: %s", count, address, reason
                )
            self._ended.clear()
            self._next = time.monotonic() + _BETWEEN_NOTICES_S


def _ignore(signal_number: int, frame: FrameType | None) -> None:
    """Do nothing: the service has stopped, which is what was asked for."""

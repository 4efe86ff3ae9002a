"""The web server of the service: uvicorn, on a socket of its own."""

import signal
import ssl
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from knnper.client.service.errors import error_response
from knnper.client.settings import ServiceSettings
from knnper.errors import RunError
from knnper.transport.credentials import Address
from knnper.transport.sockets import listen

MAX_HEADER_BYTES = 8192  # of a request's first line and all fields
_MAX_UNFINISHED_BYTES = 65_536
_STOPPING_S = 30  # for requests that have begun
_IDLE_S = 30  # that a connection may be kept between requests


def serve(
    app: ASGIApp, binding: ServiceSettings, on_listening: Callable[[str], None]
) -> None:
    """Answer requests until SIGTERM or SIGINT; requests that have begun are finished.

    ``on_listening`` is called with the service's URL.
    """
    server = make_server(app, binding)
    with listen(
        binding.host,
        binding.port,
        "choose another `service.port` or `service.host`, or stop the other program",
    ) as listener:
        host, port = listener.getsockname()[:2]
        scheme = "http" if binding.tls is None else "https"
        on_listening(f"{scheme}://{Address(host, port)}")
        # Once stopped, uvicorn raises the signal again for the handler before its own,
        # which would end this process before it has closed the store.
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            server.run(sockets=[listener])
        finally:
            signal.signal(signal.SIGTERM, before)


class HeaderLimit:
    """Middleware that rejects long headers (431), before anything parses them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or reject it."""
        app = self._app
        if scope["type"] == "http":
            size = len(scope["raw_path"]) + len(scope["query_string"])
            size += sum(len(name) + len(value) for name, value in scope["headers"])
            if size > MAX_HEADER_BYTES:
                app = error_response(
                    431,
                    f"found a header of {size} bytes, expected at most "
                    f"{MAX_HEADER_BYTES}",
                )
        await app(scope, receive, send)


def make_server(app: ASGIApp, binding: ServiceSettings) -> uvicorn.Server:
    """Configure uvicorn for the application."""
    tls = binding.tls
    certificate, key = (tls.certificate, tls.key) if tls else (None, None)
    config = uvicorn.Config(
        HeaderLimit(app),
        # It bounds an unfinished header, which httptools does not. Above h11's default
        # of 16 kB, so that `HeaderLimit` answers with its own status.
        http="h11",
        h11_max_incomplete_event_size=_MAX_UNFINISHED_BYTES,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_STOPPING_S,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    try:
        config.load()  # reads the certificate
    except (OSError, ssl.SSLError) as error:
        raise RunError(
            f"TLS cannot be used with {certificate} and {key}: {error}; "
            "expected a certificate and its key, as PEM files that can be read"
        ) from error
    return uvicorn.Server(config)

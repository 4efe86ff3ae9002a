"""A server on loopback that answers what it is told to, with TLS or without."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from knnper.client.doctor import client_checks
from knnper.client.settings import read_client
from knnper.transport.credentials import CertifiedKey
from knnper.transport.diagnosis import GATEWAY_HEADERS, Finding, Verdict, own_versions

OWN_VERSIONS = {GATEWAY_HEADERS[name]: own for name, own in own_versions().items()}


@dataclass
class Script:
    """What the server says."""

    headers: Mapping[str, str] = field(default_factory=lambda: OWN_VERSIONS)
    answers: Mapping[str, tuple[int, str]] = field(
        default_factory=lambda: {"/health": (200, "")}
    )
    ahead_s: float = 0.0
    bodies: list[bytes] = field(default_factory=list)


@contextlib.contextmanager
def answering(script: Script, files: tuple[Path, Path] | None) -> Iterator[str]:
    """Give the address of a server; ``files`` are its certificate and key."""
    server = _Server(("127.0.0.1", 0), _handler(script))
    if files is not None:
        server.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.context.load_cert_chain(*files)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def saying(words: bytes) -> Iterator[str]:
    """Give the address of other software, which says ``words`` and hangs up."""

    def talk() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=talk)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def written(folder: Path, identity: CertifiedKey, name: str) -> tuple[Path, Path]:
    """Write certificate and key if they are not there; return where."""
    files = folder / f"{name}.crt", folder / f"{name}.key"
    if not files[0].exists():
        identity.write(*files)
    return files


class _Server(ThreadingHTTPServer):
    context: ssl.SSLContext | None = None

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        if self.context is not None:
            # Handshakes, which tests make fail, are left to the connection's thread.
            connection = self.context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet of handshakes that fail."""


def _handler(script: Script) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            script.bodies.append(self.rfile.read(length))
            self._answer()

        def date_time_string(self, timestamp: float | None = None) -> str:
            now = datetime.now(UTC) + timedelta(seconds=script.ahead_s)
            return format_datetime(now, usegmt=True)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Keep quiet."""

        def _answer(self) -> None:
            status, body = script.answers.get(self.path, (404, ""))
            self.send_response(status)
            for name, value in script.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

    return Handler


TRUST = "tls: {ca: ca.crt}\nkey: site-a.key"


def client(folder: Path, server: str = "127.0.0.1:1", tls: bool = False) -> Path:
    """Return the file of a client in ``folder``."""
    path = folder / "client.yaml"
    trust = TRUST if tls else "insecure: true"
    data = "data: {name: image_folder, path: data}"
    path.write_text(f"name: site-a\nserver: {server}\n{trust}\n{data}\n")
    return path


def look(file: Path, subject: str, *changes: str) -> Finding:
    """Return what the check of a client finds."""
    checks = client_checks(read_client(file, changes))
    return {check.subject: check.look for check in checks}[subject]()


def assert_finding(
    finding: Finding, verdict: Verdict, found: str = "", mend: str = ""
) -> None:
    """Require a verdict, what is found and how it is mended."""
    assert finding.verdict is verdict, finding
    assert found in finding.found
    assert mend in finding.fix

#!/opt/knnper/bin/python
"""The images' health check: exit status 0 if the container's program is healthy.

A server is healthy if its gateway answers, a node if it joined the federation and the
gateway answers it, a service if it answers.
"""

import http
import http.client
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

TIMEOUT_S = 5.0


class UnhealthyError(Exception):
    """The program is not healthy; the message has the reason."""


def address_of(
    role: str, settings: Mapping[str, Any], folder: Path
) -> tuple[str, int, str | None]:
    """Return host, port and the trusted certificate of the address to check."""
    ca = (settings.get("tls") or {}).get("ca")
    if role == "server":
        port = str(settings.get("listen", "0.0.0.0:8443")).rpartition(":")[2]
        return "127.0.0.1", int(port), ca
    if role == "node":
        if not (folder / settings.get("state", "state") / "node.json").exists():
            raise UnhealthyError("not in the federation yet")
        host, _, port = str(settings["server"]).rpartition(":")
        return host.strip("[]"), int(port), ca
    service = settings.get("service") or {}
    certificate = (service.get("tls") or {}).get("certificate")
    return "127.0.0.1", service.get("port", 8080), certificate


def require_health(host: str, port: int, trusted: Path | None) -> None:
    """Request ``/health``, with TLS if there is a trusted certificate."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    if trusted is not None:
        context = ssl.create_default_context(cafile=str(trusted))
        # A certificate need not name the loopback address that is used inside.
        context.check_hostname = False
        connection = http.client.HTTPSConnection(
            host, port, timeout=TIMEOUT_S, context=context
        )
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    finally:
        connection.close()
    if status != http.HTTPStatus.OK:
        raise UnhealthyError(
            f"HTTP status {status} of {host}:{port}/health, expected 200"
        )


def main(role: str, file: str) -> int:
    """Check ``role`` with the settings in ``file``; return the exit status."""
    path = Path(file).absolute()
    try:
        settings = yaml.safe_load(path.read_text("utf-8"))
        host, port, trusted = address_of(role, settings, path.parent)
        require_health(host, port, None if trusted is None else path.parent / trusted)
    except (UnhealthyError, OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"{role}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

#!/opt/knnper/bin/python
"""Exits with 0 if what runs in this container is well, else says why not.

A server is well if its gateway answers, a node if it joined the federation and the
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


class UnwellError(Exception):
    """What runs here is not well; the message says why."""


def place_of(
    role: str, settings: Mapping[str, Any], folder: Path
) -> tuple[str, int, str | None]:
    """Return whom to ask: host, port, and the authority that it is trusted by."""
    ca = (settings.get("tls") or {}).get("ca")
    if role == "server":
        port = str(settings.get("listen", "0.0.0.0:8443")).rpartition(":")[2]
        return "127.0.0.1", int(port), ca
    if role == "node":
        if not (folder / settings.get("state", "state") / "node.json").exists():
            raise UnwellError("not in the federation yet")
        host, _, port = str(settings["server"]).rpartition(":")
        return host.strip("[]"), int(port), ca
    service = settings.get("service") or {}
    certificate = (service.get("tls") or {}).get("certificate")
    return "127.0.0.1", service.get("port", 8080), certificate


def ask(host: str, port: int, authority: Path | None) -> None:
    """Require that something answers at a place."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    if authority is not None:
        context = ssl.create_default_context(cafile=str(authority))
        # A certificate need not name the address that is asked from inside.
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
        raise UnwellError(f"http status {status} of {host}:{port}/health, expected 200")


def main(role: str, file: str) -> int:
    """Return the exit status of the check of ``role`` with the settings in ``file``."""
    path = Path(file).absolute()
    try:
        settings = yaml.safe_load(path.read_text("utf-8"))
        host, port, authority = place_of(role, settings, path.parent)
        ask(host, port, None if authority is None else path.parent / authority)
    except (UnwellError, OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"{role}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

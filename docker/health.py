#!/opt/knnper/bin/python
"""Exits with 0 if what runs in this container is well, else says why not.

A server is well if its gateway answers, a node if it joined the federation and the
gateway answers it, a service if it answers.
"""

import http.client
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

TIMEOUT_S = 5.0
OK = 200


class UnwellError(Exception):
    """What runs here is not well; the message says why."""


def check_server(settings: Mapping[str, Any], folder: Path) -> None:
    """Ask the gateway of this container."""
    port = _port(settings.get("listen", "0.0.0.0:8443"))
    _ask("127.0.0.1", port, _trust(settings, folder))


def check_node(settings: Mapping[str, Any], folder: Path) -> None:
    """Ask the gateway as the node reaches it."""
    if not (folder / settings.get("state", "state") / "node.json").exists():
        raise UnwellError("not in the federation yet")
    host = str(settings["server"]).rpartition(":")[0].strip("[]")
    _ask(host, _port(settings["server"]), _trust(settings, folder))


def check_service(settings: Mapping[str, Any], folder: Path) -> None:
    """Ask the service of this container."""
    service = settings.get("service", {})
    tls = service.get("tls")
    context = None if tls is None else _trusting(folder / tls["certificate"])
    _ask("127.0.0.1", service.get("port", 8080), context)


CHECKS = {"server": check_server, "node": check_node, "service": check_service}


def main(role: str, file: str) -> int:
    """Return the exit status of the check of ``role`` with the settings in ``file``."""
    path = Path(file)
    try:
        CHECKS[role](yaml.safe_load(path.read_text("utf-8")), path.absolute().parent)
    except (UnwellError, OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"{role}: {error}\n")
        return 1
    return 0


def _port(address: str) -> int:
    return int(str(address).rpartition(":")[2])


def _trust(settings: Mapping[str, Any], folder: Path) -> ssl.SSLContext | None:
    tls = settings.get("tls")
    return None if tls is None else _trusting(folder / tls["ca"])


def _trusting(authority: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority))
    # A certificate need not name the address that is asked from inside.
    context.check_hostname = False
    return context


def _ask(host: str, port: int, context: ssl.SSLContext | None) -> None:
    connection = (
        http.client.HTTPConnection(host, port, TIMEOUT_S)
        if context is None
        else http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
    )
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    finally:
        connection.close()
    if status != OK:
        raise UnwellError(f"http status {status} of {host}:{port}/health, expected 200")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

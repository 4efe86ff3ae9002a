"""The server's two ports, free or its own, and its processes."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from knnper.config.address import Address
from knnper.config.errors import RunError
from knnper.transport.diagnosis.finding import Finding, fine, problem, warning
from knnper.transport.diagnosis.network import (
    NotHttpError,
    connected,
    encrypted,
    get,
)
from knnper.transport.diagnosis.versions import told_versions
from server.link.gateway.listener import bind
from server.link.layout import LOCK
from server.link.processes import Note
from server.settings import ServerSettings

_HEALTH = "/health"
_OK = 200
_SILENT_S = 30.0
_UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Ports:
    """Where a server listens.

    Attributes
    ----------
    settings
        Of the server.
    """

    settings: ServerSettings

    def server(self) -> Finding:
        """Look whether the server runs."""
        if not is_running(self.settings.state):
            return warning("does not run", "start it: knnper server SERVER.yaml")
        return fine(f"runs, in {self.settings.state}")

    def gateway(self) -> Finding:
        """Look who has the port that clients reach."""
        return self._port(self.settings.listen_address, "listen", is_gateway=True)

    def control(self) -> Finding:
        """Look who has the port that is for the operator."""
        return self._port(self.settings.control_address, "control", is_gateway=False)

    def processes(self) -> Finding:
        """Look whether all that a running server needs is there."""
        state = self.settings.state
        found = Note.read(state)
        if found is None:
            return problem(
                f"the server runs, and {state} says nothing of its processes",
                "start it again: it may be of an earlier version",
            )
        (note, age_s), log = found, state / "superlink.log"
        if not note.lives():
            return problem(
                f"Flower's SuperLink, process {note.superlink}, is gone",
                f"the server starts it again within seconds; {log} says why it ended",
            )
        if age_s > _SILENT_S:
            return problem(
                f"no run that is submitted begins: Flower's SuperLink, process "
                f"{note.superlink}, did not answer the server for {age_s:.0f} s",
                f"look into {log}; end that process, and the server starts it again",
            )
        if note.starts > 1:
            return warning(
                f"Flower's SuperLink was started {note.starts} times",
                f"{log} and the server's log say why it ended; runs that were under "
                "way have failed: submit them again with --resume",
            )
        return fine(f"Flower's SuperLink is process {note.superlink}, and starts runs")

    def _port(self, address: Address, setting: str, *, is_gateway: bool) -> Finding:
        if not is_running(self.settings.state):
            return _free(address, setting)
        where = Address(_UNSPECIFIED.get(address.host, address.host), address.port)
        opened = connected if self.settings.insecure else encrypted
        try:
            with opened(where) as connection:
                answer = get(connection, where, _HEALTH)
        except (NotHttpError, OSError) as error:
            return problem(
                f"the server runs, and {where} does not answer ({error})",
                f"start it again if `{setting}` was changed since; else look into its "
                f"log and {self.settings.state / 'superlink.log'}",
            )
        if bool(told_versions(answer.headers)) != is_gateway:
            return _taken(address, setting)
        if answer.status != _OK:
            return problem(
                f"Flower's SuperLink does not answer (HTTP status {answer.status})",
                f"look into {self.settings.state / 'superlink.log'}",
            )
        return fine(f"the server answers at {where}")


def is_running(state: Path) -> bool:
    """Return whether a server holds the folder ``state``; it notices nothing."""
    try:
        descriptor = os.open(state / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _free(address: Address, setting: str) -> Finding:
    try:
        bind(address).close()
    except RunError:
        return _taken(address, setting)
    return fine(f"{address} is free")


def _taken(address: Address, setting: str) -> Finding:
    return problem(
        f"other software has {address}, or it is no address of this machine",
        f"end that program (ss -ltnp shows it), or set `{setting}` to another address",
        "this server's own port",
    )

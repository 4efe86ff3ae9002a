"""Checks, findings and probes of the doctor, at a server and at a site."""

import contextlib
import functools
import importlib.metadata
import json
import shutil
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from enum import StrEnum
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from knnper.errors import KnnPerError
from knnper.files import parse_json
from knnper.transport.credentials import Address


class Verdict(StrEnum):
    """Outcome of a check, from best to worst."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The outcome of a check: what was found, what was expected, how to fix it."""

    verdict: Verdict
    found: str
    expected: str = ""
    fix: str = ""


def fine(found: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding(Verdict.OK, found)


def skipped(why: str) -> Finding:
    """Return the finding of a check that does not apply."""
    return Finding(Verdict.SKIPPED, why)


def warning(found: str, fix: str, expected: str = "") -> Finding:
    """Return the finding of something that works and should be improved."""
    return Finding(Verdict.WARNING, found, expected, fix)


def problem(found: str, fix: str, expected: str = "") -> Finding:
    """Return the finding of a check that failed."""
    return Finding(Verdict.PROBLEM, found, expected, fix)


def from_message(verdict: Verdict, message: str, expected: str = "") -> Finding:
    """Split a message of the form ``what was found; how to fix it``."""
    found, _, fix = message.partition("; ")
    return Finding(verdict, found, expected, fix)


@dataclass(frozen=True)
class Check:
    """A check of one subject.

    ``needs`` names the subjects without which the check does not apply.
    """

    subject: str
    look: Callable[[], Finding]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Examined:
    """A subject and its finding."""

    subject: str
    finding: Finding

    def as_document(self) -> dict[str, str]:
        """Return the finding as plain values."""
        return {"subject": self.subject, **asdict(self.finding)}


def examine(checks: Iterable[Check]) -> list[Examined]:
    """Run the checks in order; skip those that need one that failed."""
    examined: list[Examined] = []
    bad: set[str] = set()
    for check in checks:
        missing = ", ".join(need for need in check.needs if need in bad)
        try:
            finding = (
                skipped(f"applies once this passes: {missing}")
                if missing
                else check.look()
            )
        except (KnnPerError, OSError) as error:
            finding = from_message(Verdict.PROBLEM, str(error))
        if finding.verdict in (Verdict.PROBLEM, Verdict.SKIPPED):
            bad.add(check.subject)
        examined.append(Examined(check.subject, finding))
    return examined


def is_well(examined: Iterable[Examined]) -> bool:
    """Return whether no check failed; warnings do not count."""
    return all(one.finding.verdict is not Verdict.PROBLEM for one in examined)


_MEGABYTE = 1_000_000
_TOO_LITTLE_MB = 100
_LITTLE_MB = 1000


def folder_finding(folder: Path, setting: str) -> Finding:
    """Check that ``folder`` can be written or made, and has room on its disk."""
    # The folder, or the one above it that is there.
    place = next(one for one in (folder, *folder.parents) if one.exists())
    if not place.is_dir():
        fix = f"move it away, or set `{setting}` to another folder"
        return problem(f"{place} is a file", fix, "a folder")
    try:
        # It has no name, and is gone at once.
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        fix = f"let this user write there (chown), or set `{setting}` to another folder"
        return problem(f"{place} cannot be written ({error.strerror})", fix)
    free_mb = shutil.disk_usage(place).free // _MEGABYTE
    found = f"{folder} can be written, {free_mb:,} MB are free"
    advice = "make room on this disk, or move the folder to another one"
    if free_mb < _TOO_LITTLE_MB:
        return problem(found, advice, f"at least {_TOO_LITTLE_MB} MB")
    if free_mb < _LITTLE_MB:
        return warning(found, advice, f"at least {_LITTLE_MB:,} MB")
    return fine(found if folder == place else f"{found}; it is yet to be made")


TIMEOUT_S = 5.0
_LONGEST_BODY = 64 * 1024
_LONGEST_BANNER = 60


@dataclass(frozen=True)
class Answer:
    """An answer to an HTTP request."""

    status: int
    headers: Mapping[str, str]
    asked: datetime
    answered: datetime

    def seconds_ahead(self) -> float | None:
        """Return how much this clock is ahead of the server's, if that is told."""
        # The server tells whole seconds.
        try:
            told = parsedate_to_datetime(self.headers["date"])
        except (KeyError, ValueError):
            return None
        here = self.asked + (self.answered - self.asked) / 2
        return (here - told - timedelta(seconds=0.5)).total_seconds()


class NotHttpError(KnnPerError):
    """Whoever answers does not speak HTTP; the text is what it said instead."""


def connected(address: Address) -> socket.socket:
    """Return a connection to ``address``."""
    return socket.create_connection((address.host, address.port), TIMEOUT_S)


@contextlib.contextmanager
def encrypted(
    address: Address, context: ssl.SSLContext | None = None
) -> Iterator[ssl.SSLSocket]:
    """Yield a connection with TLS."""
    if context is None:  # whoever answers is trusted
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        connected(address) as plain,
        context.wrap_socket(plain, server_hostname=address.host) as secured,
    ):
        yield secured


def get(connection: socket.socket, address: Address, path: str) -> Answer:
    """Ask for ``path`` over a connection to ``address``."""
    asked = datetime.now(UTC)
    request = f"GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n"
    connection.sendall(request.encode("ascii"))
    response = HTTPResponse(connection)
    try:
        response.begin()
        answered = datetime.now(UTC)
        response.read(_LONGEST_BODY)
    except HTTPException as error:
        raise NotHttpError(str(error)[:_LONGEST_BANNER].strip()) from error
    finally:
        response.close()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, asked, answered)


def speaks_tls(address: Address) -> bool:
    """Return whether there is a server with TLS, whoever it is."""
    try:
        with encrypted(address):
            return True
    except OSError:
        return False


def plain_answer(address: Address, path: str) -> Answer | None:
    """Return the answer without TLS; None if that is not spoken."""
    try:
        with connected(address) as connection:
            return get(connection, address, path)
    except (NotHttpError, OSError):
        return None


IMPOSSIBLE_PAUSE_S = 0.0  # what `ActivateNode` is asked for; Flower takes 10 s and more
_KEY = "standing"


@dataclass(frozen=True)
class Standing:
    """A client in the gateway's eyes."""

    name: str | None
    idle_s: float | None


def with_standing(body: bytes, standing: Standing) -> bytes:
    """Return Flower's JSON error ``body`` with the client's standing beside it."""
    try:
        error = parse_json(body)
        told = {"name": standing.name, "idle_s": standing.idle_s}
        return json.dumps({**error, _KEY: told}).encode()
    except (ValueError, TypeError):
        return body


def standing_in(body: str) -> Standing | None:
    """Return the standing in an answer; None of a server that tells none."""
    try:
        told = parse_json(body)[_KEY]
        return Standing(told["name"], told["idle_s"])
    except (ValueError, TypeError, KeyError):
        return None


# By package, the header in which the gateway tells its version with ``/health``.
GATEWAY_HEADERS: Mapping[str, str] = {
    "knnper": "knnper-version",
    "flwr": "knnper-flwr-version",
}


@functools.cache
def own_versions() -> Mapping[str, str]:
    """Return the installed versions, by package."""
    return {package: importlib.metadata.version(package) for package in GATEWAY_HEADERS}


def told_versions(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the versions in a gateway's answer; empty of any other server."""
    return {
        package: headers[name]
        for package, name in GATEWAY_HEADERS.items()
        if name in headers
    }


def version_finding(own: Mapping[str, str], theirs: Mapping[str, str]) -> Finding:
    """Return whether the two sides' versions go together."""
    shown, others = (", ".join(map(" ".join, one.items())) for one in (own, theirs))
    if not theirs:
        return fine(f"{shown}; the server does not tell its own")
    if own == theirs:
        return fine(f"{shown}, on both sides")
    advice = "install the same versions on both sides"
    found = f"{shown} here, {others} on the server"
    minor = [own[one].split(".")[:2] == theirs[one].split(".")[:2] for one in theirs]
    if not all(minor):
        return problem(found, advice, "the same minor version of each")
    return warning(found, advice, "the same versions")

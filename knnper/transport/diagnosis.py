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

TIMEOUT_S = 5.0
IMPOSSIBLE_PAUSE_S = 0.0  # what `ActivateNode` is asked for; Flower takes 10 s and more
# By package, the header in which the gateway sends its version with ``/health``.
GATEWAY_HEADERS: Mapping[str, str] = {
    "knnper": "knnper-version",
    "flwr": "knnper-flwr-version",
}
_MEGABYTE = 1_000_000
_TOO_LITTLE_MB = 100
_LITTLE_MB = 1000
_LONGEST_BODY = 64 * 1024
_LONGEST_BANNER = 60
_STANDING = "standing"  # key in an error's document


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
    return all(entry.finding.verdict is not Verdict.PROBLEM for entry in examined)


def folder_finding(folder: Path, setting: str) -> Finding:
    """Check that ``folder`` can be written or made, and has room on its disk."""
    # The folder, or the nearest folder above it that exists.
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not place.is_dir():
        fix = f"move it away, or set `{setting}` to another folder"
        return problem(f"{place} is a file", fix, "a folder")
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        fix = f"let this user write there (chown), or set `{setting}` to another folder"
        return problem(f"{place} cannot be written ({error.strerror})", fix)
    free_mb = shutil.disk_usage(place).free // _MEGABYTE
    summary = f"{folder} can be written, {free_mb:,} MB are free"
    advice = "make room on this disk, or move the folder to another one"
    if free_mb < _TOO_LITTLE_MB:
        return problem(summary, advice, f"at least {_TOO_LITTLE_MB} MB")
    if free_mb < _LITTLE_MB:
        return warning(summary, advice, f"at least {_LITTLE_MB:,} MB")
    return fine(summary if folder == place else f"{summary}; it is yet to be made")


@dataclass(frozen=True)
class HttpAnswer:
    """An answer to an HTTP request; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    sent_at: datetime
    answered_at: datetime

    def seconds_ahead(self) -> float | None:
        """Return how far this clock is ahead of the server's; None without a date."""
        try:
            server_time = parsedate_to_datetime(self.headers["date"])
        except (KeyError, ValueError):
            return None
        own_time = self.sent_at + (self.answered_at - self.sent_at) / 2
        # The header has whole seconds, rounded down.
        return (own_time - server_time - timedelta(seconds=0.5)).total_seconds()


class NotHttpError(KnnPerError):
    """The peer does not speak HTTP; the text is the begin of its answer."""


def connected(address: Address) -> socket.socket:
    """Return a connection to ``address``."""
    return socket.create_connection((address.host, address.port), TIMEOUT_S)


@contextlib.contextmanager
def encrypted(
    address: Address, context: ssl.SSLContext | None = None
) -> Iterator[ssl.SSLSocket]:
    """Yield a connection with TLS."""
    if context is None:  # any peer is trusted
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        connected(address) as plain,
        context.wrap_socket(plain, server_hostname=address.host) as secured,
    ):
        yield secured


def get(connection: socket.socket, address: Address, path: str) -> HttpAnswer:
    """Request ``path`` over a connection to ``address``."""
    sent_at = datetime.now(UTC)
    request = f"GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n"
    connection.sendall(request.encode("ascii"))
    response = HTTPResponse(connection)
    try:
        response.begin()
        answered_at = datetime.now(UTC)
        response.read(_LONGEST_BODY)
    except HTTPException as error:
        raise NotHttpError(str(error)[:_LONGEST_BANNER].strip()) from error
    finally:
        response.close()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return HttpAnswer(response.status, headers, sent_at, answered_at)


def speaks_tls(address: Address) -> bool:
    """Return whether any server with TLS answers at ``address``."""
    try:
        with encrypted(address):
            return True
    except OSError:
        return False


def plain_answer(address: Address, path: str) -> HttpAnswer | None:
    """Return the answer without TLS; None if the peer does not speak HTTP."""
    try:
        with connected(address) as connection:
            return get(connection, address, path)
    except (NotHttpError, OSError):
        return None


@dataclass(frozen=True)
class Standing:
    """A client's registered name, and the seconds since its last request."""

    name: str | None
    idle_s: float | None


def with_standing(body: bytes, standing: Standing) -> bytes:
    """Return Flower's JSON error ``body`` with the client's standing beside it."""
    try:
        error = parse_json(body)
        return json.dumps({**error, _STANDING: asdict(standing)}).encode()
    except (ValueError, TypeError):
        return body


def standing_in(body: str) -> Standing | None:
    """Return the standing in an answer; None if the server sent none."""
    try:
        standing = parse_json(body)[_STANDING]
        return Standing(standing["name"], standing["idle_s"])
    except (ValueError, TypeError, KeyError):
        return None


@functools.cache
def own_versions() -> Mapping[str, str]:
    """Return the installed versions, by package."""
    return {package: importlib.metadata.version(package) for package in GATEWAY_HEADERS}


def gateway_versions(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the versions in a gateway's answer; empty of any other server."""
    return {
        package: headers[name]
        for package, name in GATEWAY_HEADERS.items()
        if name in headers
    }


def version_finding(client: Mapping[str, str], server: Mapping[str, str]) -> Finding:
    """Compare the versions of both sides, by package; ``server`` may be empty."""
    of_client, of_server = (
        ", ".join(map(" ".join, versions.items())) for versions in (client, server)
    )
    if not server:
        return fine(f"{of_client}; the server does not send its own")
    if client == server:
        return fine(f"{of_client}, on both sides")
    advice = "install the same versions on both sides"
    summary = f"{of_client} here, {of_server} on the server"
    if any(
        client[package].split(".")[:2] != server[package].split(".")[:2]
        for package in server
    ):
        return problem(summary, advice, "the same minor version of each")
    return warning(summary, advice, "the same versions")

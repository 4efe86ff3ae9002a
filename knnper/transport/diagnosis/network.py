"""What answers at an address, asked in ways that disturb nobody."""

import contextlib
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse

from knnper.config.address import Address
from knnper.config.errors import KnnPerError

TIMEOUT_S = 5.0
_LONGEST_BODY = 64 * 1024
_LONGEST_BANNER = 60


@dataclass(frozen=True)
class Answer:
    """An answer to an HTTP request.

    Attributes
    ----------
    status
        Of HTTP.
    headers
        With lower-case names.
    asked, answered
        When, by this machine's clock.
    """

    status: int
    headers: Mapping[str, str]
    asked: datetime
    answered: datetime

    def seconds_ahead(self) -> float | None:
        """Return how much this machine's clock is ahead of the server's.

        The server tells whole seconds, so that it is right by half a second and half
        the time that the answer took. None if the server does not tell.
        """
        try:
            told = parsedate_to_datetime(self.headers["date"])
        except (KeyError, ValueError):
            return None
        here = self.asked + (self.answered - self.asked) / 2
        return (here - told - timedelta(seconds=0.5)).total_seconds()


class NotHttpError(KnnPerError):
    """Whoever answers does not speak HTTP; the text is what it said instead."""


@contextlib.contextmanager
def connected(address: Address) -> Iterator[socket.socket]:
    """Yield a connection to ``address``.

    Raises
    ------
    OSError
        If there is none within five seconds.
    """
    place = (address.host, address.port)
    with socket.create_connection(place, TIMEOUT_S) as connection:
        yield connection


@contextlib.contextmanager
def encrypted(
    address: Address, context: ssl.SSLContext | None = None
) -> Iterator[ssl.SSLSocket]:
    """Yield a connection with TLS.

    Parameters
    ----------
    address
        Whose.
    context
        Whom to trust; None is everybody, who then is told no secret.

    Raises
    ------
    OSError
        Also an `ssl.SSLError`, if there is no TLS or no trust.
    """
    context = context or _trusting_everybody()
    with (
        connected(address) as plain,
        context.wrap_socket(plain, server_hostname=address.host) as secured,
    ):
        yield secured


def get(connection: socket.socket, address: Address, path: str) -> Answer:
    """Ask for ``path`` over a connection to ``address``.

    Raises
    ------
    NotHttpError
        If the answer is none of HTTP's.
    OSError
        If none comes.
    """
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


def _trusting_everybody() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context

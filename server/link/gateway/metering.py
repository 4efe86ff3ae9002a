"""How much of everything: bytes in flight, the pace of bodies, lines in the log."""

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.link.gateway.rules import Refusal

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Mapping[str, Any]]]

_WINDOW_S = 10.0
_WINDOW_BYTES = 100_000
"""A body's next 100 kB, or its rest, arrive within 10 s: Flower gives a reply up that
does not get on for 180 s, which is an object of 5 MB at three times that pace."""

_LONGEST_WAIT_S = 4.0  # for other bodies to be done; then the client tries again
_REQUESTS_OF_A_KEY = 16  # at a time; a SuperNode has five
_IPV6_PREFIX = 64  # bits; what one household or machine is given

_QUIET_SECONDS = 60.0
_MOST_REMEMBERED = 1000
_LONGEST = 1000  # characters
_LONGEST_PART = 200


@dataclass
class Meter:
    """Bytes of bodies that are held at a time: in all, of an address, of a key.

    Attributes
    ----------
    in_all, of_address, of_key
        Most of them.
    """

    in_all: int
    of_address: int
    of_key: int
    _held: Counter[str] = field(default_factory=Counter, init=False)
    _requests: Counter[str] = field(default_factory=Counter, init=False)
    _freed: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)

    @contextlib.contextmanager
    def one_request(self, key: str) -> Iterator[None]:
        """Count a request of ``key`` while it is answered."""
        if self._requests[key] >= _REQUESTS_OF_A_KEY:
            raise Refusal(503, f"{_REQUESTS_OF_A_KEY} requests at a time are enough")
        with _counted(self._requests, key, 1):
            yield

    @contextlib.asynccontextmanager
    async def room(self, host: str, key: str, num_bytes: int) -> AsyncIterator[None]:
        """Wait for room for a body, and keep it."""
        most = {
            "": self.in_all,
            f"address {origin_of(host)}": self.of_address,
            f"key {key}": self.of_key,
        }

        def fits() -> bool:
            return all(
                self._held[one] + num_bytes <= limit for one, limit in most.items()
            )

        async with self._freed:
            try:
                async with asyncio.timeout(_LONGEST_WAIT_S):
                    await self._freed.wait_for(fits)
            except TimeoutError as error:
                raise Refusal(503, "there are too many bytes in flight") from error
        try:
            with contextlib.ExitStack() as held:
                for one in most:
                    held.enter_context(_counted(self._held, one, num_bytes))
                yield
        finally:
            async with self._freed:
                self._freed.notify_all()


@contextlib.contextmanager
def _counted(counter: Counter[str], one: str, number: int) -> Iterator[None]:
    counter[one] += number
    try:
        yield
    finally:
        counter[one] -= number
        if not counter[one]:
            del counter[one]


async def read_body(receive: Receive, length: int) -> bytearray:
    """Return a body of ``length`` bytes that comes fast enough."""
    body, more = bytearray(), True
    mark, end = 0, time.monotonic() + _WINDOW_S
    while more:
        try:
            async with asyncio.timeout(end - time.monotonic()):
                event = await receive()
        except TimeoutError as error:
            raise Refusal(
                504,
                "The client sends its request too slowly",
                f"found {len(body)} of {length} bytes",
            ) from error
        if event["type"] == "http.disconnect":
            raise Refusal(503, "The client went away before it had sent its request")
        body += event.get("body", b"")
        more = event.get("more_body", False)
        if len(body) - mark >= _WINDOW_BYTES:
            mark, end = len(body), time.monotonic() + _WINDOW_S
    return body


def origin_of(host: str) -> str:
    """Return whose address it is: networks of IPv6 have addresses without end."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))


class Notices:
    """Says one thing of one host once a minute at most, and all things 1000 times.

    Strangers may cause lines in the log as often as they like.
    """

    def __init__(self) -> None:
        self.said: dict[tuple[str, str], float] = {}

    def warn(self, host: str, kind: str, message: str) -> None:
        """Write ``message`` about ``host`` to the log, unless its like was just said.

        Parameters
        ----------
        host
            Whom it is about.
        kind
            What counts as the same. Strangers must not be able to make up new ones.
        message
            Is cut after 1000 characters; what is not printable is escaped.
        """
        if self.is_news(host, kind):
            logger.warning("%s: %s", host, plain(message, _LONGEST))

    def is_news(self, host: str, kind: str) -> bool:
        """Whether that was not said within a minute; from now on it was."""
        now = time.monotonic()
        if now - self.said.get((host, kind), -_QUIET_SECONDS) < _QUIET_SECONDS:
            return False
        if len(self.said) >= _MOST_REMEMBERED:
            self.said = {
                key: last
                for key, last in self.said.items()
                if now - last < _QUIET_SECONDS
            }
        if len(self.said) >= _MOST_REMEMBERED:
            return False
        self.said[host, kind] = now
        return True


def plain(text: str, longest: int = _LONGEST_PART) -> str:
    """Return ``text`` as one line of printable ASCII, cut after ``longest`` of it."""
    cut = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(
        char if " " <= char <= "~" else char.encode("unicode_escape").decode()
        for char in cut
    )


def said_once_a_minute(noisy: logging.Logger) -> logging.Logger:
    """Return a logger that says to ``noisy`` the same once a minute at most.

    What is filled into a text does not make it another one.
    """
    notices = Notices()
    quiet = logging.Logger(noisy.name)
    quiet.parent = noisy
    quiet.addFilter(lambda record: notices.is_news("", str(record.msg)))
    return quiet

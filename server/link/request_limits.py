"""Limits on the bodies of clients' requests: memory, number at a time, and speed."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from knnper.server.link.gateway_rules import GatewayRefusal
from knnper.transport.sockets import origin_of

Receive = Callable[[], Awaitable[Mapping[str, Any]]]

# A body's next 100 kB, or its end, must arrive within 10 s. Flower drops a reply
# without progress for 180 s; an object of 5 MB takes that long at a third of this rate.
_WINDOW_S = 10.0
_WINDOW_BYTES = 100_000
_LONGEST_WAIT_S = 4.0  # for memory; then the client is asked to retry
_REQUESTS_OF_A_KEY = 16  # at a time; a SuperNode makes five


@dataclass
class Meter:
    """Limits the bytes of bodies in memory: in all, by address, and by key."""

    in_all: int
    of_address: int
    of_key: int
    _held: Counter[str] = field(default_factory=Counter, init=False)
    _requests: Counter[str] = field(default_factory=Counter, init=False)
    _freed: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)

    @contextlib.contextmanager
    def one_request(self, key: str) -> Iterator[None]:
        """Count a request of ``key`` while it is answered; refuse too many."""
        if self._requests[key] >= _REQUESTS_OF_A_KEY:
            raise GatewayRefusal(
                503, f"{_REQUESTS_OF_A_KEY} requests at a time are enough"
            )
        with _counted(self._requests, key, 1):
            yield

    @contextlib.asynccontextmanager
    async def room(self, host: str, key: str, num_bytes: int) -> AsyncIterator[None]:
        """Reserve memory for a body, after waiting for it if necessary."""
        most = {
            "": self.in_all,
            f"address {origin_of(host)}": self.of_address,
            f"key {key}": self.of_key,
        }

        def fits() -> bool:
            return all(
                self._held[holder] + num_bytes <= limit
                for holder, limit in most.items()
            )

        async with self._freed:
            try:
                async with asyncio.timeout(_LONGEST_WAIT_S):
                    await self._freed.wait_for(fits)
            except TimeoutError as error:
                raise GatewayRefusal(
                    503, "there are too many bytes in flight"
                ) from error
        try:
            with contextlib.ExitStack() as held:
                for holder in most:
                    held.enter_context(_counted(self._held, holder, num_bytes))
                yield
        finally:
            async with self._freed:
                self._freed.notify_all()


@contextlib.contextmanager
def _counted(counter: Counter[str], holder: str, number: int) -> Iterator[None]:
    counter[holder] += number
    try:
        yield
    finally:
        counter[holder] -= number
        if not counter[holder]:
            del counter[holder]


async def read_body(receive: Receive, length: int) -> bytearray:
    """Read a body of ``length`` bytes; refuse one that arrives too slowly."""
    body, has_more = bytearray(), True
    mark, end = 0, time.monotonic() + _WINDOW_S
    while has_more:
        try:
            async with asyncio.timeout(end - time.monotonic()):
                event = await receive()
        except TimeoutError as error:
            received = f"found {len(body)} of {length} bytes"
            why = "The client sends its request too slowly"
            raise GatewayRefusal(504, why, received) from error
        if event["type"] == "http.disconnect":
            raise GatewayRefusal(
                503, "The client went away before it had sent its request"
            )
        body += event.get("body", b"")
        has_more = event.get("more_body", False)
        if len(body) - mark >= _WINDOW_BYTES:
            mark, end = len(body), time.monotonic() + _WINDOW_S
    return body

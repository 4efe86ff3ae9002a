"""Lets connections in: so many at a time in all, so many from one address."""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from server.link.gateway.notices import Notices

OnLost = Callable[[], None]

_IPV6_PREFIX = 64  # bits; what one household or machine is given
_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class EntranceLimits:
    """What strangers may take up.

    Attributes
    ----------
    per_address
        Connections at a time from one IPv4 address or IPv6 network of 64 bits.
    in_all
        Connections at a time.
    first_words_s
        Seconds for a TLS handshake, and again for the whole header of a request.
    """

    per_address: int = 200
    in_all: int = 2000
    first_words_s: float = 10.0


class Entrance:
    """Accepts connections and closes those that are too many at once.

    uvicorn counts a connection only once its TLS handshake is done, and never asks
    whose it is.

    Parameters
    ----------
    limits
        What is too many.
    notices
        Is told of those who are turned away.
    tls
        For handshakes; None without TLS.
    new_connection
        Returns the protocol of a connection; takes what is called when it is lost.
    """

    def __init__(
        self,
        limits: EntranceLimits,
        notices: Notices,
        tls: ssl.SSLContext | None,
        new_connection: Callable[[OnLost], asyncio.Protocol],
    ) -> None:
        self._limits = limits
        self._notices = notices
        self._tls = tls
        self._new_connection = new_connection
        self._held: Counter[str] = Counter()
        self._inside: set[asyncio.Task[None]] = set()

    async def accept_from(self, listening: socket.socket) -> None:
        """Let connections in until cancelled."""
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                self._notices.warn("no connection", "accept", str(error))
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            self._admit(accepted, address[0])

    async def close(self) -> None:
        """End what is left of handshakes."""
        for task in self._inside:
            task.cancel()
        await asyncio.gather(*self._inside, return_exceptions=True)

    def _admit(self, accepted: socket.socket, host: str) -> None:
        origin = _origin(host)
        excess = self._excess(origin)
        if excess is not None:
            self._notices.warn(host, excess, f"turned away: {excess}")
            accepted.close()
            return
        self._held[origin] += 1
        task = asyncio.create_task(self._stay(accepted, origin))
        self._inside.add(task)
        task.add_done_callback(self._inside.discard)

    def _excess(self, origin: str) -> str | None:
        if self._held[origin] >= self._limits.per_address:
            return (
                f"it has {self._limits.per_address} connections already "
                "(max_connections_per_address in the server's settings)"
            )
        if self._held.total() >= self._limits.in_all:
            return f"there are {self._limits.in_all} connections already"
        return None

    async def _stay(self, accepted: socket.socket, origin: str) -> None:
        """Serve one connection until it is lost; failed handshakes end at once."""
        lost = asyncio.Event()
        handshake_s = None if self._tls is None else self._limits.first_words_s
        try:
            # Why a handshake failed is in the notices already.
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._new_connection(lost.set),
                    accepted,
                    ssl=self._tls,
                    ssl_handshake_timeout=handshake_s,
                )
                await lost.wait()
        finally:
            self._held[origin] -= 1
            if not self._held[origin]:
                del self._held[origin]


def _origin(host: str) -> str:
    """Return whose connection it is: networks of IPv6 have addresses without end."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))

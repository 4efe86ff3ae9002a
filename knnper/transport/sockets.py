"""Listening sockets, and the origin of a connection."""

import ipaddress
import socket

from knnper.errors import RunError
from knnper.transport.credentials import Address

_IPV6_PREFIX = 64  # bits; the usual size of one household's or machine's network
_BACKLOG = 2048  # connections waiting to be accepted; the kernel may allow fewer


def listen(
    host: str,
    port: int,
    hint: str = "another program or server may use it: choose another address",
) -> socket.socket:
    """Return a listening socket; ``hint`` is the advice if the address is not free."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        place, why = Address(host, port), error.strerror or error
        raise RunError(f"cannot listen at {place} ({why}); {hint}") from error
    # Connections inherit the option. Without it, Nagle's algorithm delays the body of
    # an answer, since head and body are two writes.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def origin_of(host: str) -> str:
    """Return the IPv4 address, or the IPv6 network: one host owns a whole /64."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))

"""Network addresses as settings hold them: ``HOST:PORT``."""

import ipaddress
from dataclasses import dataclass

_LAST_PORT = 65535


@dataclass(frozen=True)
class Address:
    """Where something listens.

    Attributes
    ----------
    host
        A DNS name or an IP address; IPv6 without brackets.
    port
        From 1 to 65535.
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """Return ``HOST:PORT`` as an `Address`; IPv6 is written as in ``[::1]:8443``.

    Raises
    ------
    ValueError
        If it is none; the text says what was expected.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 1 <= int(port) <= _LAST_PORT:
        raise ValueError(_complaint(text))
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if not bare or bracketed != (":" in bare) or any(c in bare for c in "/@[] "):
        raise ValueError(_complaint(text))
    return Address(bare, int(port))


def _complaint(text: str) -> str:
    return (
        f"found {text!r}, expected HOST:PORT with a port from 1 to {_LAST_PORT}, as in "
        "federation.example.org:8443 or [::1]:8443"
    )

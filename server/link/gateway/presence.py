"""What a client may know of itself: its name here, and whether a node has its key.

Flower tells neither to a client, and `knnper doctor` asks for both; see
`knnper.transport.diagnosis.standing`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from knnper.transport.diagnosis.standing import Standing
from server.link.gateway.allowed import ACTIVATE, DEACTIVATE, is_of_the_fleet
from server.link.gateway.explanation import Clients, key_of, proven_key_of


@dataclass
class Presence:
    """When each registered client was last heard of, by requests that Flower took.

    Attributes
    ----------
    clients
        Who is registered.
    heard
        When, by the fingerprint of the client's key.
    """

    clients: Clients
    heard: dict[str, float] = field(default_factory=dict)

    def note(self, path: str, headers: Mapping[str, str]) -> None:
        """Take note of a request that succeeded.

        Flower verifies the signature of what is asked of the fleet, and of nothing
        else: anybody can write a client's public key above a question for its health.
        """
        key = key_of(headers) if is_of_the_fleet(path) else None
        if key is None or key not in self.clients.names:
            return
        if path == DEACTIVATE:
            self.heard.pop(key, None)
        else:
            self.heard[key] = time.monotonic()
        if len(self.heard) > len(self.clients.names):
            self._forget_who_left()

    def standing(
        self, path: str, headers: Mapping[str, str], status: int
    ) -> Standing | None:
        """Return what to tell a client that asked in the way of the doctor's.

        Flower refuses what it cannot read with this status as well, before it looks at
        the signature.
        """
        if path != ACTIVATE or status != HTTPStatus.BAD_REQUEST:
            return None
        key = proven_key_of(headers)
        if key is None:
            return None
        heard = self.heard.get(key)
        idle_s = None if heard is None else round(time.monotonic() - heard, 1)
        return Standing(self.clients.names.get(key), idle_s)

    def _forget_who_left(self) -> None:
        known = self.clients.names
        self.heard = {key: last for key, last in self.heard.items() if key in known}

"""What a client may know of itself: its name here, and whether a node has its key.

Flower tells neither to a client, and `knnper doctor` asks for both; see
`knnper.transport.diagnosis.standing`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

from knnper.transport.diagnosis.standing import Standing
from server.link.gateway.allowed import ACTIVATE, DEACTIVATE
from server.link.gateway.explanation import Clients, key_of


@dataclass
class Presence:
    """When each key was last heard of, by requests that Flower took.

    Attributes
    ----------
    clients
        Who is registered.
    """

    clients: Clients
    _heard: dict[str, float] = field(default_factory=dict)

    def note(self, path: str, headers: Mapping[str, str]) -> None:
        """Take note of a request that succeeded, so that its signature is right."""
        key = headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER)
        if key is None:
            return
        if path == DEACTIVATE:
            self._heard.pop(key, None)
        else:
            self._heard[key] = time.monotonic()

    def standing(
        self, path: str, headers: Mapping[str, str], status: int
    ) -> Standing | None:
        """Return what to tell a client that asked in the way of the doctor's.

        Flower gives this status only once it has verified signature and registration.
        """
        key = headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER)
        if key is None or path != ACTIVATE or status != HTTPStatus.BAD_REQUEST:
            return None
        heard = self._heard.get(key)
        idle_s = None if heard is None else round(time.monotonic() - heard, 1)
        return Standing(self.clients.names.get(key_of(headers) or ""), idle_s)

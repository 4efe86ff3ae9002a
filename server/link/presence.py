"""Which clients are connected, for the log and for the clients' own diagnosis."""

import logging
import math
import time
from dataclasses import dataclass, field
from http import HTTPStatus

from knnper.server.link.gateway_rules import RegisteredClients
from knnper.transport import flower_protocol as flower
from knnper.transport.diagnosis import Standing

_SILENT_S = 60.0  # after which Flower counts a node as offline

logger = logging.getLogger(__name__)


@dataclass
class Presence:
    """Logs which clients connect and leave; ``heard`` is the last request by key."""

    clients: RegisteredClients
    heard: dict[str, float] = field(default_factory=dict)

    def note(self, path: str, key: str) -> None:
        """Note a successful request; log a client that connects or leaves."""
        name, now = self.clients.names.get(key), time.monotonic()
        if path == flower.DEACTIVATE:
            if self.heard.pop(key, None) is not None:
                logger.info("client %s has left", name)
        elif name is not None:
            if now - self.heard.get(key, -math.inf) > _SILENT_S:
                logger.info("client %s is connected", name)
            self.heard[key] = now

    def standing(self, path: str, key: str, status: int) -> Standing | None:
        """Return a client's standing if its doctor asked for it; None otherwise."""
        if path != flower.ACTIVATE or status != HTTPStatus.BAD_REQUEST:
            return None
        heard = self.heard.get(key)
        idle_s = None if heard is None else round(time.monotonic() - heard, 1)
        return Standing(self.clients.names.get(key), idle_s)

"""The log of a client's node: its set-up, and lines about waiting."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import flwr

from knnper.errors import write_harmlessly
from knnper.transport.messages import Purpose
from knnper.transport.waiting import FIRST_REMINDER_S, Reminder, duration

_UNREACHABLE_AFTER_S = 5.0  # a single request may fail for many reasons
_SITUATIONS: Mapping[str, str] = MappingProxyType(
    {
        Purpose.INTRODUCE: "a run asked who this client is, and begins or continues "
        "once the clients that it needs have answered",
        Purpose.TRAIN: "the update of round {round} is sent, and the server waits for "
        "the other clients, or has left this one out of the next round",
        Purpose.VALIDATE: "the evaluation of round {round} is sent, and the server "
        "waits for the other clients",
        Purpose.PERSONALIZE: "the trained model has arrived; another run may follow",
        Purpose.SECURE: "keys or shares of secure aggregation in round {round} are "
        "sent, and the server waits for the other clients",
        Purpose.REFUSE: "the server has refused this client, see above",
    }
)
_FLOWER = Path(flwr.__file__).parent
_LOG = logging.getLogger(__name__)


def log_to_stderr(*, verbose: bool = False) -> None:
    """Set up the logging of a process of a client."""
    write_harmlessly("%(asctime)s %(levelname)s %(message)s")
    for chatty in ("httpx", "faiss"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logger = logging.getLogger("flwr")
    logger.setLevel(logging.INFO)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addFilter(lambda record: bool(record.getMessage().strip()))
    # The ClientApp uses the same logger; only Flower's own lines are routine.
    logger.addFilter(
        lambda record: (
            verbose
            or record.levelno > logging.INFO
            or not Path(record.pathname).is_relative_to(_FLOWER)
        )
    )


class WaitLog:
    """Logs what a node waits for: the server, other clients, or work."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._situation = "no run has asked this client for anything yet"
        self._num_received = 0
        self._idle, self._unreachable = Reminder(), Reminder()
        self._unreachable_since: float | None = None
        self._has_logged_unreachable = False

    def received(self, message_type: str, group: str) -> None:
        """Note a message that arrived; ``group`` is the round."""
        situation = _SITUATIONS.get(
            message_type, "a message of type {type} is answered"
        )
        self._situation = situation.format(round=group, type=message_type)
        self._num_received += 1

    def idle(self, seconds: float) -> None:
        """Log why there is nothing to do: after a minute, then at growing intervals."""
        state = f"{self._num_received}"
        if seconds >= FIRST_REMINDER_S and self._idle.is_due(state):
            _LOG.info("waiting for work, %s: %s", duration(seconds), self._situation)

    def unreachable(self, reason: str) -> None:
        """Note that the server does not answer; logged once that lasts."""
        now = time.monotonic()
        if self._unreachable_since is None:
            self._unreachable_since = now
        seconds = now - self._unreachable_since
        if seconds < _UNREACHABLE_AFTER_S:
            return
        if not self._unreachable.is_due(f"{self._unreachable_since}"):
            return
        self._has_logged_unreachable = True
        _LOG.warning(
            "waiting for the server: %s has not answered for %s (%s); trying again "
            "until it does, logged again in %s",
            self._server,
            duration(seconds),
            reason,
            duration(self._unreachable.interval_s),
        )

    def reachable(self) -> None:
        """Note that the server answers."""
        if self._has_logged_unreachable and self._unreachable_since is not None:
            seconds = time.monotonic() - self._unreachable_since
            _LOG.info("the server answers again, after %s", duration(seconds))
        self._unreachable_since = None
        self._has_logged_unreachable = False

"""Lines in the log that a stranger may cause as often as it likes."""

import logging
import time

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 60.0
_MOST_REMEMBERED = 1000


class Notices:
    """Says the same of the same host once a minute at most."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], float] = {}

    def warn(self, host: str, message: str) -> None:
        """Write ``message`` about ``host`` to the log, unless it was just said."""
        now = time.monotonic()
        last = self._said.get((host, message))
        if last is not None and now - last < _QUIET_SECONDS:
            return
        if len(self._said) >= _MOST_REMEMBERED:
            self._said.clear()
        self._said[host, message] = now
        logger.warning("%s: %s", host, message)

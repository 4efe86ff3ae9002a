"""Warnings about clients and strangers, limited so that they cannot fill the log."""

import logging
import time

_QUIET_S = 60.0
_MOST_REMEMBERED = 1000
_LONGEST = 1000  # characters
_LONGEST_PART = 200

logger = logging.getLogger(__name__)


class Notices:
    """Limits warnings: one a minute for each host and kind, 1000 a minute in all."""

    def __init__(self) -> None:
        self.logged_at: dict[tuple[str, str], float] = {}

    def warn(self, host: str, kind: str, message: str) -> None:
        """Log ``message`` about ``host``, unless one of this kind was just logged."""
        if self.is_news(host, kind):
            logger.warning("%s: %s", host, printable_ascii(message, _LONGEST))

    def is_news(self, host: str, kind: str) -> bool:
        """Return whether this kind was not logged in the last minute, and note it."""
        now = time.monotonic()
        if now - self.logged_at.get((host, kind), -_QUIET_S) < _QUIET_S:
            return False
        if len(self.logged_at) >= _MOST_REMEMBERED:
            self.logged_at = {
                notice: logged_at
                for notice, logged_at in self.logged_at.items()
                if now - logged_at < _QUIET_S
            }
        if len(self.logged_at) >= _MOST_REMEMBERED:
            return False
        self.logged_at[host, kind] = now
        return True


def printable_ascii(text: str, longest: int = _LONGEST_PART) -> str:
    """Return at most ``longest`` characters as one line of printable ASCII."""
    cut = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(
        char if " " <= char <= "~" else char.encode("unicode_escape").decode()
        for char in cut
    )


def limit_repeats(noisy: logging.Logger) -> logging.Logger:
    """Return a logger for ``noisy`` that repeats a message once a minute at most."""
    notices = Notices()
    quiet = logging.Logger(noisy.name)
    quiet.parent = noisy
    quiet.addFilter(lambda record: notices.is_news("", str(record.msg)))
    return quiet

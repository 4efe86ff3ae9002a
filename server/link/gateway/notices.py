"""Lines in the log that a stranger may cause as often as it likes."""

import logging
import time

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 60.0
_MOST_REMEMBERED = 1000
_LONGEST = 1000  # characters
_LONGEST_PART = 200


class Notices:
    """Says one thing of one host once a minute at most, and all things 1000 times.

    Attributes
    ----------
    said
        When each thing was said last, by host and kind.
    """

    def __init__(self) -> None:
        self.said: dict[tuple[str, str], float] = {}

    def warn(self, host: str, kind: str, message: str) -> None:
        """Write ``message`` about ``host`` to the log, unless its like was just said.

        Parameters
        ----------
        host
            Whom it is about.
        kind
            What counts as the same. Strangers must not be able to make up new ones.
        message
            Is cut after 1000 characters; what is not printable is escaped.
        """
        if self.is_news(host, kind):
            logger.warning("%s: %s", host, plain(message, _LONGEST))

    def is_news(self, host: str, kind: str) -> bool:
        """Whether that was not said within a minute; from now on it was."""
        now = time.monotonic()
        if now - self.said.get((host, kind), -_QUIET_SECONDS) < _QUIET_SECONDS:
            return False
        if len(self.said) >= _MOST_REMEMBERED:
            self.said = {
                key: last
                for key, last in self.said.items()
                if now - last < _QUIET_SECONDS
            }
        if len(self.said) >= _MOST_REMEMBERED:
            return False
        self.said[host, kind] = now
        return True


def plain(text: str, longest: int = _LONGEST_PART) -> str:
    """Return ``text`` as one line of printable ASCII, cut after ``longest`` of it."""
    cut = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(
        char if " " <= char <= "~" else char.encode("unicode_escape").decode()
        for char in cut
    )


def said_once_a_minute(noisy: logging.Logger) -> logging.Logger:
    """Return a logger that says to ``noisy`` the same once a minute at most.

    What is filled into a text does not make it another one.
    """
    notices = Notices()
    quiet = logging.Logger(noisy.name)
    quiet.parent = noisy
    quiet.addFilter(lambda record: notices.is_news("", str(record.msg)))
    return quiet

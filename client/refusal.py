"""Refusals of the server: their meaning, and retries with back-off."""

import logging
import time

from knnper.errors import RunError, printable
from knnper.transport import flower_protocol as flower
from knnper.transport.waiting import Reminder, duration

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 10.0
_LOG = logging.getLogger(__name__)


class Refusal(RunError):
    """The server cannot be reached or does not accept the client.

    ``lasting``: trying again does not help.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class NotAcceptedError(Refusal):
    """Flower's one answer to two causes: an unknown key, and one that is online."""

    def __init__(self, key: str = "", doctor: str = "knnper site doctor") -> None:
        which = f" ({key})" if key else ""
        super().__init__(
            f"the server does not accept this client's key{which}: either it is not "
            "registered there (send the public key to the operator, who adds it), or a "
            "node with this key is online (one that crashed counts as online for a "
            f"minute). Which of the two: {doctor}"
        )


def refusal_of(code: int, message: str) -> Refusal:
    """Translate Flower's error code to a refusal with advice."""
    if code == flower.NOT_ACCEPTED:
        return NotAcceptedError()
    if code == flower.KEY_NEEDED:
        return Refusal(
            "the server takes only clients with a key; give `tls` and `key` instead of "
            "`insecure: true`",
            lasting=True,
        )
    reason = printable(" ".join(message.split()))
    return Refusal(f"the server did not take this client: {reason}")


def refusal_of_signature() -> Refusal:
    """Return the refusal of a signature."""
    return Refusal(
        "the server refuses this client's signature: the key was removed there, or the "
        "clocks of the two machines differ by more than ten seconds; compare `date`"
    )


class RetryPolicy:
    """Retries with back-off; logs each distinct reason once, then at growing intervals.

    Parameters
    ----------
    patience_s
        Seconds after which to give up; None retries for ever.
    """

    def __init__(self, patience_s: float | None) -> None:
        self._end = None if patience_s is None else time.monotonic() + patience_s
        self._retry_s = _FIRST_RETRY_S
        self._reminder = Reminder()

    def wait(self, refusal: Refusal) -> None:
        """Log a refusal and wait for the next attempt, or raise it to give up."""
        is_over = self._end is not None and time.monotonic() + self._retry_s > self._end
        if is_over or (refusal.lasting and self._end is not None):
            raise refusal
        if self._reminder.is_due(str(refusal)):
            _LOG.warning(
                "%s. Tried again every %.0f s at least; logged again in %s",
                refusal,
                _LONGEST_RETRY_S,
                duration(self._reminder.interval_s),
            )
        time.sleep(self._retry_s)
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)

"""How often and how long a node tries again, and how often it says why."""

import logging
import time

from client.node.refusal import Refusal

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 10.0
_FIRST_REMINDER_S = 60.0
_LONGEST_REMINDER_S = 3600.0


class Patience:
    """Bears with refusals: says each kind at once, and repeats it ever more seldom.

    Parameters
    ----------
    lasts_s
        For how long it is tried; None is for ever.
    """

    def __init__(self, lasts_s: float | None) -> None:
        self._end = None if lasts_s is None else time.monotonic() + lasts_s
        self._retry_s = _FIRST_RETRY_S
        self._said = ""
        self._remind_at = 0.0
        self._reminder_s = _FIRST_REMINDER_S

    def bear(self, refusal: Refusal) -> None:
        """Say what is wrong and wait, or give up.

        Raises
        ------
        Refusal
            The same, if no time is left or trying again is of no use.
        """
        is_over = self._end is not None and time.monotonic() + self._retry_s > self._end
        if is_over or (refusal.lasting and self._end is not None):
            raise refusal
        self._say(str(refusal))
        time.sleep(self._retry_s)
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)

    def _say(self, reason: str) -> None:
        now = time.monotonic()
        if reason != self._said:
            self._reminder_s = _FIRST_REMINDER_S
        elif now < self._remind_at:
            return
        log.warning(
            "%s. Tried again every %.0f s at least; said again in %.0f min",
            reason,
            _LONGEST_RETRY_S,
            self._reminder_s / 60,
        )
        self._said, self._remind_at = reason, now + self._reminder_s
        self._reminder_s = min(2 * self._reminder_s, _LONGEST_REMINDER_S)

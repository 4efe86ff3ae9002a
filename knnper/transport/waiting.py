"""Durations in words, and when to log a lasting state again."""

import time

FIRST_REMINDER_S, LONGEST_REMINDER_S = 60.0, 3600.0
_DAY_S, _HOUR_S, _MINUTE_S = 86_400.0, 3600.0, 60.0


def duration(seconds: float) -> str:
    """Return a duration in the largest unit that fits at least twice.

    >>> duration(7.4), duration(119), duration(120), duration(3 * 86_400)
    ('7 s', '119 s', '2 min', '3 days')
    """
    for unit_s, name in ((_DAY_S, "days"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds // unit_s:.0f} {name}"
    return f"{seconds:.0f} s"


class Reminder:
    """Decides when to log a lasting state again: after intervals that double."""

    def __init__(self) -> None:
        self._state: str | None = None
        self._due_at = 0.0
        self._next_s = FIRST_REMINDER_S
        self.interval_s = FIRST_REMINDER_S  # from the last line to the next

    def is_due(self, state: str) -> bool:
        """Return whether to log ``state`` now: when it is new, and at intervals."""
        now = time.monotonic()
        if state != self._state:
            self._state, self._next_s = state, FIRST_REMINDER_S
        elif now < self._due_at:
            return False
        self.interval_s = self._next_s
        self._due_at = now + self.interval_s
        self._next_s = min(2 * self._next_s, LONGEST_REMINDER_S)
        return True

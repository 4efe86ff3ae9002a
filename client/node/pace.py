"""How long a node waits before it asks again."""

import time

SHORTEST_S = 0.05
LONGEST_S = 1.0
PART_OF_IDLE_TIME = 0.05
REPLY_S = 0.01


class Pace:
    """Waits that grow with the time in which nothing came.

    Asking costs the server some milliseconds, so that a node without work asks once a
    second; in the middle of a run it asks at once, and a round is made longer by a
    twentieth of what the node has waited for it.
    """

    def __init__(self) -> None:
        self._last_work = time.monotonic()

    def wait_for_message(self) -> None:
        """Wait until it is time to ask for a message again."""
        idle = time.monotonic() - self._last_work
        time.sleep(min(max(idle * PART_OF_IDLE_TIME, SHORTEST_S), LONGEST_S))

    def wait_for_reply(self) -> None:
        """Wait a moment for work that is being done on this machine."""
        time.sleep(REPLY_S)
        self._last_work = time.monotonic()

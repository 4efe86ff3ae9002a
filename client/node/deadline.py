"""Work that ends with its process when it takes too long.

A thread cannot be ended from outside, a process can. A client plays each message in a
process of its own, so that one that hangs does not block those that come later.
"""

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

log = logging.getLogger(__name__)

DEADLINE_PASSED = 124
"""Exit status of a process whose deadline passed, as of timeout(1)."""

_GRACE_S = 1.0


@dataclass(frozen=True)
class Deadline:
    """When the server stops waiting for the reply to a message.

    Attributes
    ----------
    at
        On the clock of `time.monotonic`; infinity if it waits for ever.
    """

    at: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Return the deadline of a message that arrives now; 0 seconds are none."""
        return cls(time.monotonic() + seconds) if seconds else cls()

    def ends(self, job: str) -> contextlib.AbstractContextManager[None]:
        """End this process when the block goes on after the deadline.

        Parameters
        ----------
        job
            What the block does, for the log.
        """
        if math.isinf(self.at):
            return contextlib.nullcontext()
        return process_ends_after(self.at - time.monotonic(), job)


@contextlib.contextmanager
def process_ends_after(seconds: float, job: str) -> Iterator[None]:
    """End this process when the block takes longer; call it in the main thread.

    Parameters
    ----------
    seconds
        What is left until the deadline.
    job
        What the block does, for the log.
    """
    timer = threading.Timer(max(seconds, 0.0), _end_process, (seconds, job))
    timer.daemon = True
    # The kernel's timer is for code that never lets Python's threads run.
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.0) + _GRACE_S)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _end_process(seconds: float, job: str) -> None:
    log.error("%s was not done within %.3g s; its process ends", job, seconds)
    logging.shutdown()
    os._exit(DEADLINE_PASSED)

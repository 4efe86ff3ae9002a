"""Deadlines of messages: the process that works on a message ends with it.

A thread cannot be ended from outside, a process can; and every message has a process of
its own.
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

DEADLINE_PASSED = 124  # exit status, as of timeout(1)
_GRACE_S = 1.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deadline:
    """The time at which the server stops waiting for the reply to a message."""

    at: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Return the deadline of a message that arrives now; 0 seconds mean none."""
        return cls(time.monotonic() + seconds) if seconds else cls()

    def ends(self, job: str) -> contextlib.AbstractContextManager[None]:
        """End this process if the block lasts longer than the deadline."""
        if math.isinf(self.at):
            return contextlib.nullcontext()
        return process_ends_after(self.at - time.monotonic(), job)


@contextlib.contextmanager
def process_ends_after(seconds: float, job: str) -> Iterator[None]:
    """End this process if the block takes longer; call it in the main thread."""
    timer = threading.Timer(max(seconds, 0.0), _end_process, (seconds, job))
    timer.daemon = True
    # The kernel's timer ends code that never lets Python's threads run.
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
    _LOG.error("%s was not done within %.3g s; its process ends", job, seconds)
    logging.shutdown()
    os._exit(DEADLINE_PASSED)

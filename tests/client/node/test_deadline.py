import signal
import subprocess
import sys
import time

import pytest

from client.node.deadline import DEADLINE_PASSED, process_ends_after

SLEEPS = """
import logging, time
from client.node.deadline import process_ends_after
logging.basicConfig()
with process_ends_after({seconds}, "training a client"):
    time.sleep(30)
"""


@pytest.mark.parametrize("seconds", [0.2, -1])
def test_the_process_ends_and_says_why(seconds: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SLEEPS.format(seconds=seconds)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == DEADLINE_PASSED
    assert f"training a client was not done within {seconds:.3g} s" in done.stderr


def test_what_is_done_in_time_lives_on() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with process_ends_after(0.1, "a short job"):
        pass
    time.sleep(0.2)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before

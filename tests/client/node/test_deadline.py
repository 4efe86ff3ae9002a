import contextlib
import signal
import subprocess
import sys
import time

import pytest

from knnper.client import flower_node as deadline
from knnper.client.flower_node import DEADLINE_PASSED, Deadline, process_ends_after

SLEEPS = """
import logging, time
from knnper.client.flower_node import process_ends_after
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


def test_what_is_left_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    granted = list[float]()

    def note(seconds: float, job: str) -> contextlib.AbstractContextManager[None]:
        granted.append(seconds)
        return contextlib.nullcontext()

    monkeypatch.setattr(deadline, "process_ends_after", note)
    whole = Deadline.after(10)
    with whole.ends("reading the data"):
        time.sleep(0.05)
    with whole.ends("training"):
        pass
    reading, training = granted
    assert 9.5 < training <= reading - 0.05 < 10


def test_no_deadline_ends_nothing() -> None:
    with Deadline.after(0).ends("a job"):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_one_deadline_is_for_all_parts() -> None:
    parts = (
        "import time\n"
        "from knnper.client.flower_node import Deadline\n"
        "whole = Deadline.after(0.4)\n"
        "with whole.ends('reading'):\n    time.sleep(0.25)\n"
        "with whole.ends('training'):\n    time.sleep(0.3)\n"
    )
    done = subprocess.run([sys.executable, "-c", parts], timeout=20, check=False)
    assert done.returncode == DEADLINE_PASSED

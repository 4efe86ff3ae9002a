import contextlib
import signal
import subprocess
import sys
import time

import pytest

from knnper.client import flower_node as deadline
from knnper.client.flower_node import DEADLINE_PASSED, Deadline, process_ends_after

HEAD = """
import logging, time
from knnper.client.flower_node import Deadline, process_ends_after
logging.basicConfig()
"""
SLEEPS = "with process_ends_after({}, 'the job'):\n    time.sleep(30)\n"
PARTS = """
whole = Deadline.after(0.4)
with whole.ends('reading'):
    time.sleep(0.25)
with whole.ends('the job'):
    time.sleep(0.3)
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [(SLEEPS.format(0.2), "0.2 s"), (SLEEPS.format(-1), "-1 s"), (PARTS, "")],
)
def test_the_process_ends_and_says_why(code: str, said: str) -> None:
    command = [sys.executable, "-c", HEAD + code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == DEADLINE_PASSED
    assert f"the job was not done within {said}" in done.stderr


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

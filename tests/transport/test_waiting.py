import itertools
import os
import time

import pytest

from knnper.transport import polling
from knnper.transport.waiting import Reminder, duration


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.4, "0 s"),
        (119.9, "120 s"),
        (120, "2 min"),
        (3600, "60 min"),
        (7200, "2 h"),
        (47 * 3600, "47 h"),
        (48 * 3600, "2 days"),
    ],
)
def test_duration_names_the_largest_unit(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_a_state_is_repeated_at_intervals_that_double_up_to_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reminder, due_at = Reminder(), []
    while now < 5 * 3600:
        if reminder.is_due("down"):
            due_at.append(now)
        now += 10
    pauses = [b - a for a, b in itertools.pairwise(due_at)]
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert reminder.is_due("up")
    assert reminder.is_due("down")
    assert not reminder.is_due("down")


def test_announcements_reach_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    polling.announce(1, 2)  # without a server of ours, to nobody
    reading, writing = os.pipe()
    monkeypatch.setenv(polling.ANNOUNCEMENTS_VARIABLE, str(writing))
    polling.announce()
    polling.announce(7, 2**64 - 1)
    os.close(writing)
    polling.announce(8)  # the server has ended
    assert os.read(reading, 1000) == b"\n7\n18446744073709551615\n"
    os.close(reading)

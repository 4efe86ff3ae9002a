import itertools
import logging
import time

import pytest

from knnper.client.flower_node import NotAcceptedError, Refusal
from knnper.client.node import Patience


class Clock:
    """A clock on which a sleep takes no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def test_the_same_reason_is_said_ever_more_seldom(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    patience, said_at = Patience(None), []
    while clock.now < 1000:
        before, now = len(caplog.records), clock.now
        patience.bear(NotAcceptedError())
        said_at += [round(now)] * (len(caplog.records) - before)
    pauses = [after - one for one, after in itertools.pairwise(said_at)]
    assert said_at[0] == 0
    assert [round(pause / 60) for pause in pauses] == [1, 2, 4, 8]


def test_another_reason_is_said_at_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    patience = Patience(None)
    for reason in ("nothing answers", "nothing answers", "not registered"):
        patience.bear(Refusal(reason))
    said = [record.getMessage().partition(". ")[0] for record in caplog.records]
    assert said == ["nothing answers", "not registered"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_it_ends_with_the_reason(clock: Clock) -> None:
    patience, refusal = Patience(20), Refusal("nothing answers")
    while clock.now < 15:
        patience.bear(refusal)
    with pytest.raises(Refusal, match="nothing answers"):
        patience.bear(refusal)
    assert clock.now <= 20
    now = clock.now
    with pytest.raises(Refusal, match="of no use"):
        Patience(20).bear(Refusal("of no use", lasting=True))
    assert clock.now == now, "trying again would not mend it"

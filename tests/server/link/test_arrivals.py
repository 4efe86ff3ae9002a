"""When a node's request for messages is passed on to Flower."""

import asyncio
import itertools
import os
import selectors
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from knnper.client.node import PollPause
from knnper.server.link import arrivals
from knnper.server.link.arrivals import Arrivals

NODE = 7


class FastLoop(asyncio.SelectorEventLoop):
    """An event loop on a clock that is put forward instead of waiting."""

    def __init__(self) -> None:
        super().__init__(_ReadyFiles(self))
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _ReadyFiles(selectors.DefaultSelector):
    def __init__(self, loop: FastLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events:
            assert timeout is not None, "nothing would ever happen again"
            self._loop.now += timeout
        return events


@dataclass
class Flower:
    """Stands for Flower: hands out each message once."""

    messages: list[bytes] = field(default_factory=list)
    asked_at: list[float] = field(default_factory=list)

    async def answer(self) -> bytes:
        self.asked_at.append(time.monotonic())
        return self.messages.pop(0) if self.messages else b""


@dataclass
class Case:
    """Arrivals with Flower behind, and the pipe of a ServerApp."""

    loop: FastLoop
    arrivals: Arrivals = field(default_factory=Arrivals)
    flower: Flower = field(default_factory=Flower)
    app: int = -1

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def start_app(self) -> None:
        reading, self.app = os.pipe()
        self.loop.call_soon(self.arrivals.follow, reading)
        self.run(asyncio.sleep(0))

    def end_app(self) -> None:
        os.close(self.app)
        self.app = -1
        self.run(asyncio.sleep(0.01))

    def send(self, message: bytes, node: int = NODE) -> None:
        """Have the ServerApp send a message and announce it."""
        self.flower.messages.append(message)
        os.write(self.app, f"{node}\n".encode())

    async def request(self, node: int = NODE, gone_after_s: float = 1e6) -> bytes:
        leaves = asyncio.sleep(gone_after_s)
        return await self.arrivals.messages(node, self.flower.answer, leaves)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    loop = FastLoop()
    monkeypatch.setattr(time, "monotonic", loop.time)
    monkeypatch.setattr(time, "sleep", loop.sleep)
    opened = Case(loop)
    yield opened
    if opened.app >= 0:
        os.close(opened.app)
    loop.close()


def idle_for(case: Case, seconds: float) -> None:
    case.arrivals.note_activity(NODE)
    case.loop.now += seconds


def test_flower_is_not_asked_while_no_run_is_under_way(case: Case) -> None:
    idle_for(case, 3600)
    began = time.monotonic()
    assert case.run(case.request()) == b""
    assert time.monotonic() - began == pytest.approx(arrivals.LONGEST_HOLD_S)
    assert case.flower.asked_at == []


def test_a_message_is_handed_over_as_soon_as_it_is_announced(case: Case) -> None:
    case.start_app()
    os.write(case.app, b"\n")
    idle_for(case, 3600)

    async def work() -> tuple[bytes, float]:
        waiting = asyncio.ensure_future(case.request())
        await asyncio.sleep(5)
        case.send(b"to another", NODE + 1)
        case.flower.messages.clear()
        await asyncio.sleep(5)
        sent_at = time.monotonic()
        case.send(b"train")
        return await waiting, time.monotonic() - sent_at

    message, after_s = case.run(work())
    assert message == b"train"
    assert after_s < 0.1
    # Once when the request came, to begin with, and once for the announcement.
    assert len(case.flower.asked_at) == 2


def test_each_announced_message_is_fetched_with_one_request(case: Case) -> None:
    case.start_app()
    case.send(b"first")
    case.send(b"second")
    case.run(asyncio.sleep(0.01))
    assert [case.run(case.request()) for _ in range(3)] == [b"first", b"second", b""]
    assert len(case.flower.asked_at) == 2


def test_an_announcement_during_the_answer_is_not_lost(case: Case) -> None:
    case.start_app()
    os.write(case.app, b"\n")
    idle_for(case, 3600)

    async def answer_slowly() -> bytes:
        answer = await case.flower.answer()
        if not answer and not case.flower.messages:
            case.send(b"just too late")
            await asyncio.sleep(1)
        return answer

    async def work() -> bytes:
        never = asyncio.Event().wait()
        return await case.arrivals.messages(NODE, answer_slowly, never)

    assert case.run(work()) == b"just too late"


def test_a_later_request_ends_the_one_that_is_held(case: Case) -> None:
    case.start_app()
    os.write(case.app, b"\n")
    idle_for(case, 3600)

    async def work() -> tuple[bytes, bytes]:
        first = asyncio.ensure_future(case.request())
        await asyncio.sleep(1)
        second = asyncio.ensure_future(case.request())
        await asyncio.sleep(0.01)
        assert first.done()
        case.send(b"train")
        return await first, await second

    assert case.run(work()) == (b"", b"train")


def test_no_message_is_taken_for_a_departed_node(case: Case) -> None:
    case.start_app()
    os.write(case.app, b"\n")
    idle_for(case, 3600)

    async def work() -> bytes:
        waiting = asyncio.ensure_future(case.request(gone_after_s=1))
        await asyncio.sleep(2)
        case.flower.asked_at.clear()
        case.send(b"train")
        await asyncio.sleep(0.01)
        return await waiting

    assert case.run(work()) == b""
    assert case.flower.asked_at == []
    assert case.run(case.request()) == b"train"


@pytest.mark.parametrize("end", ["close", "forget"])
def test_nothing_is_held_any_longer(case: Case, end: str) -> None:
    idle_for(case, 3600)

    async def work() -> float:
        began = time.monotonic()
        waiting = asyncio.ensure_future(case.request())
        await asyncio.sleep(1)
        if end == "close":
            case.arrivals.close()
        else:
            case.arrivals.forget(NODE)
        await waiting
        return time.monotonic() - began

    assert case.run(work()) == pytest.approx(1.0)


def test_an_announcement_that_was_lost_costs_a_minute_at_most(case: Case) -> None:
    case.start_app()
    os.write(case.app, b"\n")
    idle_for(case, 3600)
    assert case.run(case.request()) == b""
    case.flower.messages.append(b"train")
    began = time.monotonic()
    while not case.run(case.request()):
        assert time.monotonic() - began < 80
    assert time.monotonic() - began <= arrivals.CHECK_INTERVAL_S


def test_while_another_app_runs_flower_is_asked_at_intervals(case: Case) -> None:
    case.start_app()
    idle_for(case, 3600)
    assert case.run(case.request()) == b""
    pauses = [b - a for a, b in itertools.pairwise(case.flower.asked_at)]
    assert sum(pauses) >= arrivals.LONGEST_HOLD_S - 1.5
    assert pauses == pytest.approx([1.0] * len(pauses), abs=0.01)
    case.end_app()
    case.flower.asked_at.clear()
    assert case.run(case.request()) == b""
    assert case.flower.asked_at == []


def test_an_idle_site_makes_three_requests_a_minute(case: Case) -> None:
    pause, requests = PollPause(), []
    case.arrivals.note_activity(NODE)
    sign_at = time.monotonic() + 20
    while (now := time.monotonic()) < 1600:
        requests.append(now)
        case.run(case.request())
        # The thread with the signs of life, which go on while a request is held.
        while sign_at < time.monotonic():
            if not pause.is_heard:
                requests.append(sign_at)
            sign_at += 20
        pause.sleep()
    in_minutes = [
        sum(start <= at < start + 60 for at in requests)
        for start in range(1000, 1600, 60)
    ]
    assert in_minutes[0] <= 15
    assert set(in_minutes[1:]) <= {2, 3, 4}
    # The gateway sends a heartbeat with a request 27 s after the last, and Flower
    # counts a node as online for 60 s.
    assert max(b - a for a, b in itertools.pairwise(requests)) < 30


def test_a_node_sends_signs_of_life_unless_a_request_is_held(case: Case) -> None:
    pause = PollPause()
    assert not pause.is_heard
    case.loop.now += 20  # a held request is answered
    pause.sleep()
    assert pause.is_heard
    case.loop.now += 20
    assert pause.is_heard
    case.loop.now += 10  # the answer is overdue
    assert not pause.is_heard
    pause.sleep()
    assert pause.is_heard
    pause.sleep()  # this server answers at once
    assert not pause.is_heard
    case.loop.now += 20
    pause.sleep()
    pause.note_work()
    assert not pause.is_heard

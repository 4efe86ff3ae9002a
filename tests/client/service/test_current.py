"""Whatever goes wrong while a newer model is looked for passes, and is seen."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from knnper.client.service.session import Current, Metrics
from knnper.errors import KnnPerError
from tests.client.service.small_service import SmallServed, small_served


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it took longer than ten seconds"
        time.sleep(0.005)


class Refreshing:
    """What is served, and what goes wrong with it."""

    def __init__(self, served: SmallServed) -> None:
        self.error: Exception | None = None
        self.looks = threading.Semaphore(0)
        served.refresh = self.refresh  # type: ignore[method-assign]

    def refresh(self) -> bool:
        self.looks.release()
        if self.error is not None:
            raise self.error
        return False


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        sqlite3.OperationalError("database or disk is full"),
        KnnPerError("the model is damaged"),
    ],
)
def test_what_goes_wrong_is_seen_and_tried_again(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    served = small_served(tmp_path / "store")
    refreshing = Refreshing(served)
    current = Current(lambda: served, poll_s=0.005)
    metrics = Metrics(current)
    current.start()
    try:
        until(lambda: current.problem == "")
        assert b"knnper_following 1.0" in metrics.text()
        refreshing.error = error
        until(lambda: str(error) in current.problem)
        assert current.served() is served, "it is served on"
        assert b"knnper_following 0.0" in metrics.text()
        assert b"knnper_ready 1.0" in metrics.text()
        for _ in range(10):
            assert refreshing.looks.acquire(timeout=10), "it looks no longer"
        refreshing.error = None
        until(lambda: current.problem == "")
    finally:
        current.close()
    told = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(told) == 1, "the same trouble is told once"
    assert (told[0].exc_info is None) == isinstance(error, KnnPerError)


def test_a_model_that_cannot_be_opened_for_any_reason_is_waited_for(
    tmp_path: Path,
) -> None:
    served, troubles = small_served(tmp_path / "store"), [OSError("a"), OSError("b")]

    def open_served() -> SmallServed:
        if troubles:
            raise troubles.pop()
        return served

    current = Current(open_served, poll_s=0.005)
    current.start()
    until(lambda: current.problem == "")
    assert current.served() is served
    current.close()

"""What is served now, how it is replaced meanwhile, and the threads that ask it."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from client.residence.served_model import ServedModel
from client.service.errors import RequestError
from knnper.config.errors import KnnPerError
from knnper.data.examples import no_examples

T = TypeVar("T")

_TRIALS = 3

_LOG = logging.getLogger(__name__)


class Current:
    """Opens what is served as soon as it is there, and follows what is installed.

    ``open_served`` opens it; a `KnnPerError` means that there is nothing to serve yet.
    Nothing that goes wrong ends this: what was served is served on, and every
    ``poll_s`` seconds it looks again.
    """

    def __init__(self, open_served: Callable[[], ServedModel], poll_s: float) -> None:
        self._open, self._poll_s = open_served, poll_s
        self._served: ServedModel | None = None
        self._problem = "the service has just been started"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow")
        self._seconds_per_input = 0.0

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why the last look failed, which leaves what is served; empty if it did not.

        Before the first look, and as long as nothing is served, why that is so.
        """
        return self._problem

    def served(self) -> ServedModel:
        """Return what is served; if nothing is, refuse (503) with the reason."""
        if self._served is None:
            raise RequestError(503, f"nothing can be served yet: {self._problem}")
        return self._served

    def close(self) -> None:
        """Stop looking, and close what is served."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._served is not None:
            served, self._served = self._served, None
            served.close()

    def require_time_for(self, count: int, seconds: float) -> None:
        """Refuse (413) inputs for which the model, once begun, surely needs longer."""
        needed = count * self._seconds_per_input
        if needed > seconds:
            most = max(1, int(seconds / self._seconds_per_input))
            raise RequestError(
                413,
                f"{count} inputs would take at least {needed:.0f} s, expected at most "
                f"{seconds:g} s; send at most {most} at once",
            )

    def took(self, count: int, seconds: float) -> None:
        """Learn how fast the model is at best."""
        self._seconds_per_input = min(self._seconds_per_input, seconds / count)

    def _follow(self) -> None:
        self._look()
        while not self._stopping.wait(self._poll_s):
            self._look()

    def _look(self) -> None:
        try:
            self._renew()
        except KnnPerError as error:
            if str(error) != self._problem:
                _LOG.warning("%s", error)
            self._problem = str(error)
        except Exception as error:  # noqa: BLE001 (a full disk, say, may pass)
            found = f"{type(error).__name__}: {error}"
            if found != self._problem:
                _LOG.exception("the state folder cannot be followed; tried again")
            self._problem = found
        else:
            self._problem = ""

    def _renew(self) -> None:
        if self._served is None:
            self._served = self._open()
        elif not self._served.refresh():
            return
        _LOG.info("serving the model %s", self._served.model.fingerprint[:12])
        self._seconds_per_input = _seconds_per_input(self._served)


def _seconds_per_input(served: ServedModel) -> float:
    """Return how long one input takes, at best."""
    nothing = no_examples(served.model.spec).images
    one = torch.zeros((1, *nothing.shape[1:]), dtype=nothing.dtype)
    seconds = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        served.predict(one)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


class Workers:
    """A few threads, with a queue that has an end; used from one event loop.

    ``max_waiting`` pieces of work may wait for one of them, for ``timeout_s`` seconds.
    """

    def __init__(
        self, name: str, num_threads: int, max_waiting: int, timeout_s: float
    ) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._most = num_threads + max_waiting
        self._timeout_s = timeout_s
        self._num_pending = 0

    async def run(self, work: Callable[[], T], *, changes: bool = False) -> T:
        """Return what ``work`` returns; refuse (503) what would take too long.

        A thread cannot be stopped. What has begun and ``changes`` something is waited
        for; else the thread alone goes on with it, and takes up other work afterwards.
        """
        if self._num_pending >= self._most:
            raise self._too_busy(f"{self._num_pending} requests wait already")
        self._num_pending += 1
        submitted = self._pool.submit(work)
        answer = asyncio.wrap_future(submitted)
        answer.add_done_callback(self._leave)
        done, _ = await asyncio.wait({answer}, timeout=self._timeout_s)
        if not done and submitted.cancel():
            raise self._too_busy(f"it waited {self._timeout_s:g} s")
        if not done and not changes:
            answer.add_done_callback(_look_away)
            raise self._too_busy(f"it took more than {self._timeout_s:g} s")
        return await answer

    def close(self) -> None:
        """Finish what has begun, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _leave(self, answer: "asyncio.Future[T]") -> None:  # noqa: ARG002 (a callback)
        self._num_pending -= 1

    def _too_busy(self, why: str) -> RequestError:
        return RequestError(
            503, f"too busy to {self._name}: {why}; try again in a moment"
        )


def _look_away(answer: "asyncio.Future[T]") -> None:
    """Take notice of an error that nobody waits for."""
    if not answer.cancelled():
        answer.exception()

"""The served model, its replacement, and the threads that work with it."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from knnper.client.served_model import ServedModel
from knnper.client.service.errors import RequestError
from knnper.data.examples import blank_input
from knnper.errors import KnnPerError

T = TypeVar("T")
_TRIALS = 3
_LOG = logging.getLogger(__name__)


class ModelWatcher:
    """Opens the served model once one is installed, and follows newer installations.

    An error never ends the service: the model before is served until the next attempt.

    Attributes
    ----------
    problem
        Why nothing is served or the last attempt failed; empty if neither.
    """

    def __init__(self, open_served: Callable[[], ServedModel], poll_s: float) -> None:
        self._open = open_served
        self._poll_s = poll_s
        self._served: ServedModel | None = None
        self.problem = "the service has just been started"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow")
        self._seconds_per_input = 0.0

    def start(self) -> None:
        """Start to look for installations, in a thread."""
        self._thread.start()

    def served(self) -> ServedModel:
        """Return the served model, or refuse (503) with the reason there is none."""
        if self._served is None:
            raise RequestError(503, f"nothing can be served yet: {self.problem}")
        return self._served

    def close(self) -> None:
        """Stop the thread, and close the served model."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._served is not None:
            served, self._served = self._served, None
            served.close()

    def require_time_for(self, count: int, seconds: float) -> None:
        """Refuse (413) inputs for which the model needs longer even at its fastest."""
        needed = count * self._seconds_per_input
        if needed > seconds:
            most = max(1, int(seconds / self._seconds_per_input))
            raise RequestError(
                413,
                f"{count} inputs would take at least {needed:.0f} s, expected at most "
                f"{seconds:g} s; send at most {most} at once",
            )

    def record_speed(self, count: int, seconds: float) -> None:
        """Record the time of a prediction; the fastest one counts."""
        self._seconds_per_input = min(self._seconds_per_input, seconds / count)

    def _follow(self) -> None:
        self._try_renew()
        while not self._stopping.wait(self._poll_s):
            self._try_renew()

    def _try_renew(self) -> None:
        problem = ""
        trace = None
        try:
            self._renew()
        except KnnPerError as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 (such as a full disk, which may pass)
            problem = f"{type(error).__name__}: {error}"
            trace = error
        if problem and problem != self.problem:
            _LOG.warning("%s; tried again", problem, exc_info=trace)
        self.problem = problem

    def _renew(self) -> None:
        if self._served is None:
            self._served = self._open()
        elif not self._served.refresh():
            return
        model = self._served.model
        _LOG.info("serving the model %s", model.fingerprint[:12])
        image = blank_input(model.spec)
        seconds = []
        for _ in range(_TRIALS):
            began = time.perf_counter()
            self._served.try_out(image)
            seconds.append(time.perf_counter() - began)
        self._seconds_per_input = min(seconds)


class Workers:
    """A few threads with a bounded queue; used from one event loop.

    anyio's limiter does not fit: it frees the place of a thread that is no longer
    waited for, so abandoned work would pile up.
    """

    def __init__(
        self, name: str, num_threads: int, max_waiting: int, timeout_s: float
    ) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._max_pending = num_threads + max_waiting
        self._timeout_s = timeout_s
        self._num_pending = 0

    async def run(self, work: Callable[[], T], *, changes: bool = False) -> T:
        """Run ``work`` in a thread; refuse (503) if it waits or takes too long.

        A thread cannot be stopped, so work that ``changes`` the store and has begun is
        waited for, however long it takes.
        """
        if self._num_pending >= self._max_pending:
            raise self._too_busy(f"{self._num_pending} requests wait already")
        self._num_pending += 1
        submitted = self._pool.submit(work)
        future = asyncio.wrap_future(submitted)
        future.add_done_callback(self._on_done)
        done, _ = await asyncio.wait({future}, timeout=self._timeout_s)
        if not done and submitted.cancel():
            raise self._too_busy(f"it waited {self._timeout_s:g} s")
        if not done and not changes:
            raise self._too_busy(f"it took more than {self._timeout_s:g} s")
        return await future

    def close(self) -> None:
        """Finish the work that has begun, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _on_done(self, future: "asyncio.Future[T]") -> None:
        self._num_pending -= 1
        # Retrieved, so that asyncio does not log the error of abandoned work.
        if not future.cancelled():
            future.exception()

    def _too_busy(self, reason: str) -> RequestError:
        return RequestError(
            503, f"too busy to {self._name}: {reason}; try again in a moment"
        )

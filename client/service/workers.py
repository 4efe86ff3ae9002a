"""Threads for what would hold up the event loop, with a queue that has an end."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from client.service.problems import RequestError

T = TypeVar("T")


class Workers:
    """A few threads; used from one event loop.

    Parameters
    ----------
    name
        Of the threads, and in messages.
    num_threads
        How many there are.
    max_waiting
        How much work may wait for one of them.
    timeout_s
        In which work has to begin.
    """

    def __init__(
        self, name: str, num_threads: int, max_waiting: int, timeout_s: float
    ) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._most = num_threads + max_waiting
        self._timeout_s = timeout_s
        self._num_pending = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, done by one of the threads.

        What has begun is waited for, however long it takes.

        Raises
        ------
        RequestError
            503, if too much waits already or this waited too long; it is not done.
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

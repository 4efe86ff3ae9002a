"""What is served now, how it is replaced meanwhile, and what is counted of it."""

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from knnper.client.served_model import ServedModel, blank_input
from knnper.client.service.inputs import RequestError
from knnper.errors import KnnPerError

T = TypeVar("T")
_TRIALS = 3
_LOG = logging.getLogger(__name__)


class Current:
    """Opens what is served as soon as it is there, and follows what is installed."""

    # Nothing that goes wrong ends this: what was served is served on.

    def __init__(self, open_served: Callable[[], ServedModel], poll_s: float) -> None:
        self._open, self._poll_s = open_served, poll_s
        self._served: ServedModel | None = None
        # Why the last look failed, or nothing is served; empty if neither.
        self.problem = "the service has just been started"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow")
        self._seconds_per_input = 0.0

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def served(self) -> ServedModel:
        """Return what is served; if nothing is, refuse (503) with the reason."""
        if self._served is None:
            raise RequestError(503, f"nothing can be served yet: {self.problem}")
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
            found = f"{count} inputs would take at least {needed:.0f} s"
            expected = f"expected at most {seconds:g} s; send at most {most} at once"
            raise RequestError(413, f"{found}, {expected}")

    def took(self, count: int, seconds: float) -> None:
        """Learn how fast the model is at best."""
        self._seconds_per_input = min(self._seconds_per_input, seconds / count)

    def _follow(self) -> None:
        self._look()
        while not self._stopping.wait(self._poll_s):
            self._look()

    def _look(self) -> None:
        found, trace = "", None
        try:
            self._renew()
        except KnnPerError as error:
            found = str(error)
        except Exception as error:  # noqa: BLE001 (a full disk, say, may pass)
            found, trace = f"{type(error).__name__}: {error}", error
        if found and found != self.problem:
            _LOG.warning("%s; tried again", found, exc_info=trace)
        self.problem = found

    def _renew(self) -> None:
        if self._served is None:
            self._served = self._open()
        elif not self._served.refresh():
            return
        model = self._served.model
        _LOG.info("serving the model %s", model.fingerprint[:12])
        one = blank_input(model.spec)
        seconds = []
        for _ in range(_TRIALS):
            began = time.perf_counter()
            self._served.predict(one)
            seconds.append(time.perf_counter() - began)
        self._seconds_per_input = min(seconds)


class Workers:
    """A few threads, with a queue that has an end; used from one event loop."""

    # Own code: anyio's limiter frees the slot of a thread that nobody waits for, so
    # that abandoned work would pile up.

    def __init__(
        self, name: str, num_threads: int, max_waiting: int, timeout_s: float
    ) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._most = num_threads + max_waiting
        self._timeout_s = timeout_s
        self._num_pending = 0

    async def run(self, work: Callable[[], T], *, changes: bool = False) -> T:
        """Return what ``work`` returns; refuse (503) what would take too long."""
        # No thread can be stopped: what has begun and makes `changes` is waited for.
        if self._num_pending >= self._most:
            raise self._too_busy(f"{self._num_pending} requests wait already")
        self._num_pending += 1
        submitted = self._pool.submit(work)
        answer = asyncio.wrap_future(submitted)
        answer.add_done_callback(self._left)
        done, _ = await asyncio.wait({answer}, timeout=self._timeout_s)
        if not done and submitted.cancel():
            raise self._too_busy(f"it waited {self._timeout_s:g} s")
        if not done and not changes:
            raise self._too_busy(f"it took more than {self._timeout_s:g} s")
        return await answer

    def close(self) -> None:
        """Finish what has begun, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _left(self, answer: "asyncio.Future[T]") -> None:
        self._num_pending -= 1
        # So that no error is complained of that nobody waits for any more.
        if not answer.cancelled():
            answer.exception()

    def _too_busy(self, why: str) -> RequestError:
        busy = f"too busy to {self._name}: {why}"
        return RequestError(503, f"{busy}; try again in a moment")


_METHODS = frozenset(("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"))
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """Counters of one service, and figures of what it serves now."""

    def __init__(self, current: Current) -> None:
        self._current, self._registry = current, CollectorRegistry()
        counter = functools.partial(Counter, registry=self._registry)
        names = ("method", "path", "status")
        self._requests = counter(
            "knnper_requests", "Requests that were answered.", names
        )
        self._errors = counter(
            "knnper_errors", "Requests that were answered with an error.", names[1:]
        )
        self._seconds = Histogram(
            "knnper_request_seconds",
            "Time from a request to the end of its answer.",
            ("path",),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._predictions = counter(
            "knnper_predictions", "Inputs by the predicted class.", ("class_name",)
        )

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a request; its path has names for its variable parts."""
        known = method if method in _METHODS else "other"
        self._requests.labels(known, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
        if status >= 400:
            self._errors.labels(path, str(status)).inc()

    def predicted(self, class_names: Iterable[str]) -> None:
        """Count predictions, by the names of the classes."""
        for name in class_names:
            self._predictions.labels(name).inc()

    def text(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        now = CollectorRegistry()
        gauge = functools.partial(Gauge, registry=now)
        ready = gauge("knnper_ready", "Whether the service predicts.")
        with contextlib.suppress(RequestError):  # nothing is served yet
            served = self._current.served()
            ready.set(1)
            following = "Whether a newer model would be served; 0: the log says why."
            gauge("knnper_following", following).set(not self._current.problem)
            stored, weight = len(served.store), served.serving.knn_weight
            gauge("knnper_store_examples", "Examples in the store.").set(stored)
            gauge("knnper_knn_weight", "The neighbours' weight, lambda.").set(weight)
            model = gauge("knnper_model_info", "The model that is served.", ["model"])
            model.labels(served.model.fingerprint).set(1)
        return generate_latest(self._registry) + generate_latest(now)


class Metered:
    """Counts every request of an application, and how long it takes."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def send_and_look(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_and_look)
        finally:
            # As it is written in the route: the paths that are asked for have no end.
            path = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - began
            self._metrics.answered(scope["method"], path, status, seconds)

"""Metrics of the service for Prometheus."""

import contextlib
import functools
import time
from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from knnper.client.service.audit import RequestCounts
from knnper.client.service.errors import RequestError
from knnper.client.service.session import ModelWatcher

_METHODS = frozenset(("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"))
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """Counters of requests, and gauges of the model that is served."""

    def __init__(self, watcher: ModelWatcher) -> None:
        self._watcher = watcher
        self._registry = CollectorRegistry()
        counter = functools.partial(Counter, registry=self._registry)
        labels = ("method", "path", "status")
        self._requests = counter(
            "knnper_requests", "Requests that were answered.", labels
        )
        self._errors = counter(
            "knnper_errors", "Requests that were answered with an error.", labels[1:]
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

    def count_request(
        self, method: str, path: str, status: int, seconds: float
    ) -> None:
        """Count a request; ``path`` names its variable parts."""
        self._requests.labels(method, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
        if status >= 400:
            self._errors.labels(path, str(status)).inc()

    def count_predictions(self, class_names: Iterable[str]) -> None:
        """Count predicted classes."""
        for name in class_names:
            self._predictions.labels(name).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        gauges = CollectorRegistry()
        gauge = functools.partial(Gauge, registry=gauges)
        ready = gauge("knnper_ready", "Whether the service predicts.")
        with contextlib.suppress(RequestError):  # nothing is served yet
            served = self._watcher.served()
            ready.set(1)
            gauge(
                "knnper_following",
                "Whether a newer model would be served; 0: the log has the reason.",
            ).set(not self._watcher.problem)
            # Of private answers these depend on stored examples without noise.
            if served.privacy is None:
                gauge("knnper_store_examples", "Examples in the store.").set(
                    len(served.store)
                )
                gauge("knnper_knn_weight", "The neighbours' weight, lambda.").set(
                    served.serving.knn_weight
                )
            model = gauge("knnper_model_info", "The model that is served.", ["model"])
            model.labels(served.model.fingerprint).set(1)
        return generate_latest(self._registry) + generate_latest(gauges)


class Metered:
    """Middleware that counts requests and measures their time."""

    def __init__(self, app: ASGIApp, metrics: Metrics, counts: RequestCounts) -> None:
        self._app = app
        self._metrics = metrics
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def send_and_record(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_and_record)
        finally:
            # Callers could send any number of other methods and paths.
            method = scope["method"] if scope["method"] in _METHODS else "other"
            path = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - began
            self._metrics.count_request(method, path, status, seconds)
            self._counts.count(scope, f"{method} {path}", status)

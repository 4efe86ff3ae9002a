"""What the service counts, as Prometheus reads it."""

import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.service.current import Current
from client.service.errors import RequestError

_METHODS = frozenset(("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"))
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """Counters of one service, and figures of what it serves now."""

    def __init__(self, current: Current) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "knnper_requests",
            "Requests that were answered.",
            ("method", "path", "status"),
            registry=self._registry,
        )
        self._errors = Counter(
            "knnper_errors",
            "Requests that were answered with an error.",
            ("path", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "knnper_request_seconds",
            "Time from a request to the end of its answer.",
            ("path",),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._predictions = Counter(
            "knnper_predictions",
            "Inputs by the class that was predicted.",
            ("class_name",),
            registry=self._registry,
        )
        self._registry.register(_ServedCollector(current))

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
        return generate_latest(self._registry)


class _ServedCollector(Collector):
    """The figures of what is served, read when they are asked for."""

    def __init__(self, current: Current) -> None:
        self._current = current

    def collect(self) -> Iterator[Metric]:
        try:
            served = self._current.served()
        except RequestError:
            yield _gauge("knnper_ready", "Whether the service predicts.", 0)
            return
        yield _gauge("knnper_ready", "Whether the service predicts.", 1)
        yield _gauge(
            "knnper_following",
            "Whether a newer model would be served; 0: the log says why not.",
            0 if self._current.problem else 1,
        )
        size, weight = len(served.store), served.serving.knn_weight
        yield _gauge("knnper_store_examples", "Examples in the store.", size)
        yield _gauge("knnper_knn_weight", "The neighbours' weight, lambda.", weight)
        model = GaugeMetricFamily(
            "knnper_model_info", "The model that is served.", labels=["model"]
        )
        model.add_metric([served.model.fingerprint], 1)
        yield model

    def describe(self) -> Sequence[Metric]:
        """Return nothing: what is collected is not known before it is asked for."""
        return ()


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, value=value)


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

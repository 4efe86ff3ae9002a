"""Counts of a service's requests in the audit log of its site."""

import logging
import time
from collections import Counter

from starlette.types import Scope

from knnper.audit_log import Recorder
from knnper.client.service.tokens import Caller
from knnper.errors import KnnPerError

_EVERY_S = 3600.0
_LOG = logging.getLogger(__name__)


class RequestCounts:
    """Counts requests, and records the counts at most once an hour."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._counts: Counter[str] = Counter()
        self._recorded_s = time.monotonic()

    def count(self, scope: Scope, request: str, status: int) -> None:
        """Count a request by the name of its token, method, path and status."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        name = "none" if caller is None else caller.name
        self._counts[f"{name} {request} {status}"] += 1
        if time.monotonic() - self._recorded_s >= _EVERY_S:
            self.record()

    def record(self) -> None:
        """Record the counts since the last call, if there are any."""
        self._recorded_s = time.monotonic()
        if not self._counts:
            return
        try:
            self._record("requests", counts=self._counts)
        except (OSError, KnnPerError) as error:
            # Predictions go on; the counts are recorded with those of the next hour.
            _LOG.error("the counts of requests are not in the audit log: %s", error)
            return
        self._counts.clear()

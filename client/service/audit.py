"""Entries of a service in the audit log of its site."""

import asyncio
import contextlib
import logging
from collections import Counter
from contextlib import AbstractContextManager

from starlette.types import Scope

from knnper.audit_log import AuditLog
from knnper.client.service.tokens import Caller
from knnper.errors import KnnPerError

_EVERY_S = 3600.0
_LOG = logging.getLogger(__name__)


class ServiceAudit:
    """Records each change of the memory, and every hour the number of requests.

    ``log`` is None for a service that keeps no audit log.
    """

    def __init__(self, log: AuditLog | None) -> None:
        self._log = log
        self._counts: Counter[tuple[str, str, int]] = Counter()

    def change(
        self, event: str, caller: Caller, **details: object
    ) -> AbstractContextManager[None]:
        """Record a change of the memory; see `AuditLog.change`."""
        if self._log is None:
            return contextlib.nullcontext()
        return self._log.change(event, token=caller.name, **details)

    def count(self, scope: Scope, request: str, status: int) -> None:
        """Count a request by the name of its token, method, path and status."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        name = "none" if caller is None else caller.name
        self._counts[name, request, status] += 1

    async def write_hourly(self) -> None:
        """Write the counts every hour until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            self.write_counts()

    def write_counts(self) -> None:
        """Write the counts since the last call."""
        if self._log is None or not self._counts:
            return
        requests = [
            {"token": token, "request": request, "status": status, "count": count}
            for (token, request, status), count in sorted(self._counts.items())
        ]
        try:
            self._log.append("requests", requests=requests)
        except (OSError, KnnPerError) as error:
            # Predictions go on; the counts are written with those of the next hour.
            _LOG.error("the counts of requests are not in the audit log: %s", error)
            return
        self._counts.clear()

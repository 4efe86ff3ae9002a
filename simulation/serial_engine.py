"""One process, no Flower, no Ray: for debugging, and the oracle of the other engines."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from client.runtime import ClientRuntime
from knnper.transport.messages import Purpose
from server.federation import Reply, Request


@dataclass(frozen=True)
class SerialFederation:
    """A `Federation` that calls the clients as functions.

    Errors are not turned into failed clients: a debugger stops where they happen.

    Attributes
    ----------
    runtime
        The one runtime that plays all clients.
    """

    runtime: ClientRuntime

    def exchange(
        self,
        purpose: Purpose,
        server_round: int,
        keep_round: int,
        requests: Iterable[Request],
    ) -> Iterator[Reply]:
        """See `Federation.exchange`."""
        for request in requests:
            record = self._answer(purpose, server_round, keep_round, request)
            yield Reply(request.client, record)

    def _answer(
        self, purpose: Purpose, server_round: int, keep_round: int, request: Request
    ) -> Any:
        client, payload = request.client, request.payload
        if purpose is Purpose.TRAIN:
            return self.runtime.train(client, payload, server_round, keep_round)
        if purpose is Purpose.VALIDATE:
            return self.runtime.validate(client, payload)
        return self.runtime.personalize(
            client, payload, request.reference, server_round
        )

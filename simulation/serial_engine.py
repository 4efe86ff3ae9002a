"""One process, no Flower, no Ray: for debugging, and as the other engines' oracle."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from client.runtime import ClientRuntime
from knnper.config.errors import KnnPerError
from knnper.transport.codec import canonical
from knnper.transport.messages import Purpose
from server.federation import Federation, Reply, Request


@dataclass(frozen=True)
class SerialFederation(Federation):
    """A `Federation` that calls the clients as functions.

    An error that the project raises on purpose makes a failed client, as in any other
    engine; all others end the run, so that a debugger stops where they happen.

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
        keep_rounds: Sequence[int],
        requests: Iterable[Request],
    ) -> Iterator[Reply]:
        """See `Federation.exchange`."""
        for request in requests:
            try:
                record = self._answer(purpose, server_round, keep_rounds, request)
            except KnnPerError as error:
                yield Reply(request.clients, None, str(error))
            else:
                yield Reply(request.clients, canonical(record))

    def _answer(
        self,
        purpose: Purpose,
        server_round: int,
        keep_rounds: Sequence[int],
        request: Request,
    ) -> Any:
        clients, payload = request.clients, canonical(request.payload)
        if purpose is Purpose.TRAIN:
            (client,), (state_round,) = clients, request.state_rounds
            return self.runtime.train(
                client, payload, server_round, state_round, keep_rounds
            )
        if purpose is Purpose.VALIDATE:
            return self.runtime.validate(clients, payload)
        reference, rounds = canonical(request.reference), request.state_rounds
        return self.runtime.personalize(clients, payload, reference, rounds)

"""After the last round: every client pulls the model, personalises and reports."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from knnper.config.errors import RunError
from knnper.config.seeding import RandomKey
from knnper.transport.messages import Purpose
from server.checkpoint import Checkpoint
from server.federation import Federation, Request
from strategies.core.evaluation import ClientResult
from strategies.core.method import NEWCOMER, Method


@dataclass(frozen=True)
class HandOver:
    """Gives the trained state to clients, seen or unseen.

    Attributes
    ----------
    method
        What was trained.
    federation
        The clients.
    key
        The experiment's root key.
    """

    method: Method
    federation: Federation
    key: RandomKey

    def personalize(
        self, trained: Checkpoint, clients: Sequence[str], seen: Collection[str]
    ) -> Iterator[ClientResult]:
        """Yield each client's result, in the order of ``clients``.

        Raises
        ------
        RunError
            If a client cannot personalise.
        """
        key = self.key.child("broadcast", "hand-over")
        state = trained.state
        reference = self.method.broadcast(state, NEWCOMER, key.child(NEWCOMER))

        def requests() -> Iterator[Request]:
            for client in clients:
                if client not in seen:
                    yield Request(client, reference, reference)
                    continue
                payload = self.method.broadcast(state, client, key.child(client))
                yield Request(client, payload, reference)

        replies = self.federation.exchange(
            Purpose.PERSONALIZE,
            trained.server_round,
            trained.server_round,
            requests(),
        )
        for reply in replies:
            if not isinstance(reply.record, ClientResult):
                raise RunError(
                    f"client {reply.client} could not personalise: {reply.failure}"
                )
            yield reply.record

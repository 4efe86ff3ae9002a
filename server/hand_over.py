"""After the last round: every client pulls the model, personalises and reports."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from knnper.config.errors import RunError
from knnper.config.seeding import RandomKey
from knnper.transport.messages import Purpose
from server.checkpoint import Checkpoint
from server.federation import Federation, Request
from server.grouping import in_groups
from strategies.core.evaluation import ClientResult, ClientResults
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
        self,
        trained: Checkpoint,
        sizes: Mapping[str, int],
        seen: Collection[str],
        done: Collection[str] = (),
    ) -> Iterator[ClientResult]:
        """Yield the result of each client that is not ``done``.

        Parameters
        ----------
        trained
            What training ended with.
        sizes
            All clients, and how many images each has; who is served together depends
            on it alone, whatever is done already.
        seen
            The clients that may have taken part in training.
        done
            The clients whose results are known.

        Raises
        ------
        RunError
            If a client cannot personalise.
        """
        replies = self.federation.exchange(
            Purpose.PERSONALIZE,
            trained.server_round,
            trained.server_round,
            self._requests(trained, self._groups(sizes, seen), seen, set(done)),
        )
        for reply in replies:
            if not isinstance(reply.record, ClientResults):
                raise RunError(_failure(reply.clients, reply.failure))
            for result in reply.record.results:
                if result.client not in done:
                    yield result

    def _groups(
        self, sizes: Mapping[str, int], seen: Collection[str]
    ) -> list[tuple[str, ...]]:
        if not self.method.personalizes_by_inference:
            return [(client,) for client in sizes]
        kinds = (
            {name: size for name, size in sizes.items() if (name in seen) == is_seen}
            for is_seen in (True, False)
        )
        return [group for kind in kinds for group in in_groups(kind)]

    def _requests(
        self,
        trained: Checkpoint,
        groups: list[tuple[str, ...]],
        seen: Collection[str],
        done: set[str],
    ) -> Iterator[Request]:
        key = self.key.child("broadcast", "hand-over")
        state = trained.state
        reference = self.method.broadcast(state, NEWCOMER, key.child(NEWCOMER))
        for group in groups:
            if done.issuperset(group):
                continue
            payload = reference
            if group[0] in seen:
                payload = self.method.broadcast(state, group[0], key.child(group[0]))
            yield Request(group, payload, reference)


def _failure(clients: tuple[str, ...], reason: str | None) -> str:
    if len(clients) == 1:
        return f"client {clients[0]} could not personalise: {reason}"
    return f"one of the clients {', '.join(clients)} could not personalise: {reason}"

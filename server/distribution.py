"""After the last round: every client pulls the model, personalises and reports."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from knnper.errors import RunError
from knnper.foreign_text import printable
from knnper.records import is_same
from knnper.seeding import RandomKey
from knnper.server.checkpoint import Checkpoint
from knnper.server.federation import Federation, Reply, Request
from knnper.server.reports import in_groups, result_problem
from knnper.strategies.core.method import UNSEEN_CLIENT, Method
from knnper.strategies.core.predictors import ClientResult, ClientResults
from knnper.transport.messages import Purpose

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelDistribution:
    """Gives the trained state to clients, seen or unseen."""

    method: Method
    federation: Federation
    key: RandomKey

    def personalize(
        self,
        trained: Checkpoint,
        sizes: Mapping[str, int],
        seen: Collection[str],
        done: Collection[str] = (),
    ) -> Iterator[tuple[str, ClientResult | None]]:
        """Yield who has the model, but is not ``done``, and the result if it shows it."""
        replies = self.federation.exchange(
            Purpose.PERSONALIZE,
            trained.server_round,
            [trained.server_round],
            self._requests(trained, self._groups(sizes, seen), seen, set(done)),
        )
        for reply in replies:
            found = self._results(reply, seen)
            for result in found.results:
                if result.client not in done:
                    yield result.client, result
            for client in found.withheld:
                if client not in done:
                    yield client, None
            for client, reason in found.failures.items():
                self._failed(client, reason)

    def _groups(
        self, sizes: Mapping[str, int], seen: Collection[str]
    ) -> list[tuple[str, ...]]:
        if not self.method.personalizes_by_inference:
            return _largest_first([(client,) for client in sizes], sizes)
        kinds = (
            {name: size for name, size in sizes.items() if (name in seen) == is_seen}
            for is_seen in (True, False)
        )
        groups = [group for kind in kinds for group in in_groups(kind)]
        return _largest_first(groups, sizes)

    def _requests(
        self,
        trained: Checkpoint,
        groups: list[tuple[str, ...]],
        seen: Collection[str],
        done: set[str],
    ) -> Iterator[Request]:
        key = self.key.child("broadcast", "hand-over")
        state = trained.state
        reference = self.method.broadcast(
            state, UNSEEN_CLIENT, key.child(UNSEEN_CLIENT)
        )

        def payload_of(client: str) -> object:
            if client not in seen:
                return reference
            return self.method.broadcast(state, client, key.child(client))

        for group in groups:
            if done.issuperset(group):
                continue
            for clients, payload in _sent_the_same(group, payload_of):
                if not done.issuperset(clients):
                    last = trained.server_round
                    rounds = trained.history.state_rounds(clients, last)
                    is_seen = clients[0] in seen
                    yield Request(clients, payload, reference, is_seen, rounds)

    def _results(self, reply: Reply, seen: Collection[str]) -> ClientResults:
        """Return what the clients of one request report, as far as it can be true."""
        names = ", ".join(reply.clients)
        if not isinstance(reply.record, ClientResults):
            self._failed(names, reply.failure)
            return ClientResults((), {})
        reported = [result.client for result in reply.record.results]
        told = [*reported, *reply.record.failures, *reply.record.withheld]
        if sorted(told) != sorted(reply.clients):
            others = printable(", ".join(told))
            self._failed(names, f"expected results of {names}, found those of {others}")
            return ClientResults((), {})
        return _possible(reply.record, seen)

    def _failed(self, client: str, reason: str | None) -> None:
        message = f"client {client} could not personalise: {reason}"
        if not self.federation.may_be_away:
            raise DistributionError(message)
        log.warning("%s", message)


class DistributionError(RunError):
    """A client could not be served, where none may be away."""


def _possible(told: ClientResults, seen: Collection[str]) -> ClientResults:
    """Return what clients told, those as failures who told what cannot be."""
    problems = {result.client: result_problem(result) for result in told.results}
    failures = {name: printable(reason) for name, reason in told.failures.items()}
    impossible = {name: problem for name, problem in problems.items() if problem}
    results = tuple(
        dataclasses.replace(result, seen=result.client in seen)
        for result in told.results
        if result.client not in impossible
    )
    return ClientResults(results, failures | impossible, told.withheld)


def _largest_first(
    groups: list[tuple[str, ...]], sizes: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """Return the groups, those with most images first: workers end together."""
    return sorted(groups, key=lambda group: -sum(sizes[client] for client in group))


def _sent_the_same(
    group: tuple[str, ...], payload_of: Callable[[str], object]
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the group in runs of clients that are sent one payload, and the payload."""
    payloads = [(client, payload_of(client)) for client in group]
    run = [payloads[0][0]]
    for (_, before), (client, payload) in itertools.pairwise(payloads):
        if not is_same(before, payload):
            yield tuple(run), before
            run = []
        run.append(client)
    yield tuple(run), payloads[-1][1]

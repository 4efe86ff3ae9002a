"""Distribute a model to clients, to personalise it, or to validate it in training."""

import dataclasses
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from knnper.errors import RunError, printable
from knnper.records import is_same
from knnper.seeding import RandomKey
from knnper.server.checkpoints import Checkpoint
from knnper.server.federation import Federation, Reply, Request, Step
from knnper.server.plausibility import result_problem, validation_problem
from knnper.server.roster import Roster
from knnper.strategies.core.evaluation import ClientResult, ClientResults, Validation
from knnper.strategies.core.method import UNSEEN_CLIENT, Method
from knnper.transport.messages import Purpose

# Images of one group of clients: their task takes a fraction of a second, so that many
# workers are busy until the end, and the overhead of a task is small.
IMAGES_AT_ONCE = 1024

_FAILED = "round %d: client %s failed: %s"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelDistribution:
    """Distributes a model to clients."""

    method: Method
    federation: Federation
    key: RandomKey
    metrics: Sequence[str] = ()
    titles: Mapping[str, str] = field(default_factory=dict)  # see `Roster.titles`

    def personalize(
        self,
        trained: Checkpoint,
        sizes: Mapping[str, int],
        seen: Collection[str],
        done: Collection[str] = (),
    ) -> Iterator[Mapping[str, ClientResult | None]]:
        """Yield the results of clients that got the model, None where withheld.

        Clients in ``done`` are skipped. Clients of one request come together.
        """
        last = trained.server_round
        key = self.key.child("broadcast", "hand-over")
        requests = requests_to_personalize(self.method, trained, key, sizes, seen, done)
        step = Step(Purpose.PERSONALIZE, last, [last])
        for reply in self.federation.exchange(step, requests):
            outcome = _results_by_client(reply, seen, self.metrics)
            yield {
                name: result
                for name, result in outcome.items()
                if name not in done and not isinstance(result, str)
            }
            for name, result in outcome.items():
                if isinstance(result, str):
                    self._failed(name, result)

    def validation_accuracies(
        self,
        trained: Checkpoint,
        roster: Roster,
        skipped: Collection[str],
        keep_rounds: Sequence[int],
        is_personal: bool,
    ) -> dict[str, float]:
        """Return the accuracies on the seen clients' validation splits, pooled.

        Clients that fail do not count.

        Parameters
        ----------
        skipped
            Clients that are not asked.
        keep_rounds
            See `Step`.
        is_personal
            Whether the clients also personalise the model.
        """
        server_round, titles = trained.server_round, self.titles
        key = self.key.child("broadcast", server_round)
        num_validation = roster.num_validation()
        free = {
            name: count for name, count in num_validation.items() if name not in skipped
        }
        requests: Iterable[Request]
        if is_personal:
            of_all = roster.sizes()
            sizes = {name: of_all[name] for name in free}
            requests = requests_to_personalize(self.method, trained, key, sizes, sizes)
        else:
            unseen = key.child(UNSEEN_CLIENT)
            reference = self.method.broadcast(trained.state, UNSEEN_CLIENT, unseen)
            requests = (Request(group, reference) for group in in_groups(free))
        step = Step(Purpose.VALIDATE, server_round, keep_rounds)
        counts: Counter[str] = Counter()
        for reply in self.federation.exchange(step, requests):
            most = sum(num_validation[name] for name in reply.clients)
            problem = reply.failure or validation_problem(reply.record, most)
            if problem:
                names = (titles.get(name, name) for name in reply.clients)
                log.warning(_FAILED, server_round, ", ".join(names), problem)
                continue
            validation: Validation = reply.record
            for name, reason in validation.failures.items():
                title = titles.get(name, printable(name))
                log.warning(_FAILED, server_round, title, printable(reason))
            counts["right"] += validation.reference.num_correct
            counts["all"] += validation.reference.num_examples
            counts["personal right"] += validation.num_personal_correct
            counts["personal"] += validation.num_personal
        accuracies = {}
        if counts["all"]:
            accuracies["validation_accuracy"] = counts["right"] / counts["all"]
        if counts["personal"]:
            accuracies["validation_accuracy_personal"] = (
                counts["personal right"] / counts["personal"]
            )
        return accuracies

    def _failed(self, client: str, reason: str) -> None:
        title = self.titles.get(client, client)
        message = f"client {title} could not personalise: {reason}"
        if not self.federation.may_be_away:
            raise DistributionError(message)
        log.warning("%s", message)


class DistributionError(RunError):
    """A client that must be online did not get the model."""


def requests_to_personalize(
    method: Method,
    trained: Checkpoint,
    key: RandomKey,
    sizes: Mapping[str, int],
    seen: Collection[str],
    done: Collection[str] = (),
) -> Iterator[Request]:
    """Yield the requests to the clients of ``sizes`` that are not ``done``.

    ``key`` is that of the broadcast.
    """
    state, last_round = trained.state, trained.server_round
    reference = method.broadcast(state, UNSEEN_CLIENT, key.child(UNSEEN_CLIENT))

    def payload_of(client: str) -> object:
        if client not in seen:
            return reference
        return method.broadcast(state, client, key.child(client))

    done = frozenset(done)
    for group in _groups(method, sizes, seen):
        if done.issuperset(group):
            continue
        for clients, payload in _sent_the_same(group, payload_of):
            if not done.issuperset(clients):
                rounds = trained.history.state_rounds(clients, last_round)
                yield Request(clients, payload, reference, clients[0] in seen, rounds)


def in_groups(
    sizes: Mapping[str, int], at_once: int = IMAGES_AT_ONCE
) -> Iterator[tuple[str, ...]]:
    """Yield groups of clients, in the order of ``sizes``, of about the same size."""
    num_groups = max(1, math.ceil(sum(sizes.values()) / at_once))
    share = max(1, sum(sizes.values())) / num_groups
    ends = itertools.accumulate(sizes.values())
    # A client belongs to the group that contains its middle image.
    middles = (end - size / 2 for end, size in zip(ends, sizes.values(), strict=True))
    numbered = zip(sizes, (int(middle / share) for middle in middles), strict=True)
    for _, group in itertools.groupby(numbered, key=lambda member: member[1]):
        yield tuple(name for name, _ in group)


def _groups(
    method: Method, sizes: Mapping[str, int], seen: Collection[str]
) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = [(client,) for client in sizes]
    if method.personalizes_by_inference:
        kinds = (
            {name: size for name, size in sizes.items() if (name in seen) == is_seen}
            for is_seen in (True, False)
        )
        groups = [group for kind in kinds for group in in_groups(kind)]
    # Clients with the most examples first, so that workers end together.
    return sorted(groups, key=lambda group: -sum(sizes[client] for client in group))


def _results_by_client(
    reply: Reply, seen: Collection[str], metrics: Collection[str]
) -> dict[str, ClientResult | str | None]:
    """Return by client its result, None if withheld, or the reason of a failure."""
    report, names = reply.record, ", ".join(reply.clients)
    if not isinstance(report, ClientResults):
        return {names: str(reply.failure)}
    results = {result.client: result for result in report.results}
    reported = [
        *(result.client for result in report.results),
        *report.failures,
        *report.withheld,
    ]
    if sorted(reported) != sorted(reply.clients):
        others = printable(", ".join(reported))
        return {names: f"expected results of {names}, found those of {others}"}
    problems = {
        name: result_problem(result, metrics) for name, result in results.items()
    }
    return {
        **{
            name: dataclasses.replace(result, seen=name in seen)
            for name, result in results.items()
            if not problems[name]
        },
        **dict.fromkeys(report.withheld),
        **{name: printable(reason) for name, reason in report.failures.items()},
        **{name: problem for name, problem in problems.items() if problem},
    }


def _sent_the_same(
    group: tuple[str, ...], payload_of: Callable[[str], object]
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Split a group into runs of clients with one payload; yield run and payload."""
    payloads = [(client, payload_of(client)) for client in group]
    run = [payloads[0][0]]
    for (_, before), (client, payload) in itertools.pairwise(payloads):
        if not is_same(before, payload):
            yield tuple(run), before
            run = []
        run.append(client)
    yield tuple(run), payloads[-1][1]

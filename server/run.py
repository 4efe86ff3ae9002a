"""One run, from start or where it was left: training, then model distribution."""

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from knnper.errors import RunError
from knnper.foreign_text import printable
from knnper.loading import results_identity, to_document
from knnper.records import canonical, fingerprint, is_same
from knnper.seeding import RandomKey
from knnper.server.federation import Federation, Reply, Request
from knnper.server.observer import Observer, RoundRecord
from knnper.server.results import (
    in_groups,
    result_problem,
    summarise_groups,
    training_summary,
)
from knnper.server.rounds import RoundLoop
from knnper.server.run_folder import (
    Checkpoint,
    CheckpointFolder,
    History,
    Roster,
    RunFolder,
    build_manifest,
)
from knnper.strategies.catalogue import Assembly
from knnper.strategies.core.method import UNSEEN_CLIENT, Method
from knnper.strategies.core.predictors import ClientResult, ClientResults
from knnper.strategies.core.records import NoState
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
        """Yield who gets the model and is not ``done``, and the result if shown."""
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


@contextlib.contextmanager
def scalar_writer(
    folder: Path, first_round: int
) -> Iterator[Callable[[RoundRecord], None]]:
    """Yield a function that adds the figures of one round to the curves."""
    # Loading it takes seconds, which only the process that leads a run should wait.
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=first_round)

    def write(record: RoundRecord) -> None:
        for name, value in record.items():
            if name not in ("server_round", "failures"):
                writer.add_scalar(name, value, record["server_round"])

    try:
        yield write
    finally:
        writer.close()


@dataclass(frozen=True)
class Conductor:
    """Leads a federation through training and model distribution."""

    assembly: Assembly
    federation: Federation
    folder: RunFolder
    observer: Observer

    def lead(self, roster: Roster, command: Sequence[str]) -> Mapping[str, Any]:
        """Train, distribute the model, and write the results."""
        self.distribute(self.train(roster, command), roster)
        return self.folder.results()

    def train(self, roster: Roster, command: Sequence[str]) -> Checkpoint:
        """Make the rounds that are missing; return the last state."""
        conditions = build_manifest(
            results_identity=results_identity(self.assembly.experiment),
            partition_hash=roster.split,
            command=command,
            started=datetime.now(UTC),
        )
        self.folder.write_manifest(conditions)
        return self._train(roster)

    def distribute(
        self, trained: Checkpoint, roster: Roster, to: Collection[str] | None = None
    ) -> Collection[str]:
        """Give the model to the clients that lack it; write the results of all."""
        began, before = time.monotonic(), self._seconds_before()
        served = self._distribute(trained, roster, roster.names() if to is None else to)
        if not served:
            return served
        results = [result for result in served.values() if result is not None]
        away = [name for name in roster.names() if name not in served]
        document = {
            "method": self.assembly.experiment.method.name,
            "personalization": self.assembly.experiment.personalization.name,
            **summarise_groups(results),
            "training": {
                **training_summary(self.folder.rounds(), results),
                "personalization_seconds": time.monotonic() - began + before,
                "state_sha256": trained.fingerprint,
            },
            "model_distribution": {
                "num_clients": len(served),
                "withheld": [name for name, result in served.items() if not result],
                "offline": away,
            },
            "manifest": {
                **self.folder.manifest(),
                "experiment": to_document(self.assembly.experiment),
            },
        }
        self.folder.write_clients_csv(results)
        self.folder.write_results(document)
        self.folder.forget_aside()
        return served

    def _seconds_before(self) -> float:
        """Return what earlier distributions of this run took."""
        if not self.folder.is_finished():
            return 0.0
        return float(self.folder.results()["training"]["personalization_seconds"])

    def last_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint of the run; None if there is none."""
        return self._checkpoints().load_latest(self.assembly.method.state_type)

    def _checkpoints(self) -> CheckpointFolder:
        identity = results_identity(self.assembly.experiment)
        most = self.assembly.experiment.run.keep_checkpoints
        return CheckpointFolder(self.folder.checkpoints, identity, most)

    def _train(self, roster: Roster) -> Checkpoint:
        start = self.last_checkpoint() or untrained(self.assembly, roster)
        self.folder.drop_rounds_after(start.server_round)
        first_round = start.server_round + 1
        self.observer.training_started(self.assembly.method.num_rounds, first_round)
        with scalar_writer(self.folder.tensorboard, first_round) as write_curves:

            def on_round(record: RoundRecord) -> None:
                self.folder.append_round(record)
                write_curves(record)
                self.observer.round_finished(record)

            checkpoints, federation = self._checkpoints(), self.federation
            loop = round_loop(self.assembly, roster, federation, checkpoints, on_round)
            return loop.train(start)

    def _distribute(
        self, trained: Checkpoint, roster: Roster, to: Collection[str]
    ) -> dict[str, ClientResult | None]:
        """Return what every client that has the model reported, sorted by name."""
        done = self.folder.distributed.reported(trained.fingerprint)
        self.observer.personalization_started(len(set(to) - set(done)))
        others = set(roster.names()) - set(to)
        # A server that was started again knows nobody yet.
        self.federation.await_clients(sorted(set(to) - set(done)), 0)
        distribution = ModelDistribution(
            self.assembly.method, self.federation, self.assembly.key
        )
        sizes, seen, left_out = roster.sizes(), roster.seen(), others | set(done)
        for name, result in distribution.personalize(trained, sizes, seen, left_out):
            self.folder.distributed.append(trained.fingerprint, name, result)
            done[name] = result
            self.observer.client_personalized()
        return {name: done[name] for name in roster.names() if name in done}


def untrained(assembly: Assembly, roster: Roster) -> Checkpoint:
    """Return what the first round starts from."""
    clients = roster.trainable()
    if not clients:
        raise RunError(
            "no seen client has training data; expected at least one. Take a larger "
            "partition.alpha, fewer clients or a smaller partition.unseen_fraction"
        )
    state = canonical(assembly.method.init(list(clients), assembly.key.child("init")))
    keeps_state = assembly.method.client_state_type is not NoState
    history = History(trained_in={} if keeps_state else None)
    return Checkpoint(0, state, fingerprint(state), history)


def round_loop(
    assembly: Assembly,
    roster: Roster,
    federation: Federation,
    checkpoints: CheckpointFolder,
    on_round: Callable[[RoundRecord], None],
) -> RoundLoop:
    """Return the loop that trains the experiment's method over ``federation``."""
    return RoundLoop(
        method=assembly.method,
        federation=federation,
        clients=roster.trainable(),
        claimed=roster.claimed(),
        num_validation=roster.num_validation(),
        training=assembly.experiment.training,
        run=assembly.experiment.run,
        key=assembly.key,
        checkpoints=checkpoints,
        on_round=on_round,
    )

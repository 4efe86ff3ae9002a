"""The round loop: the same for every method and every engine."""

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from knnper.config.errors import RunError
from knnper.config.sections import RunSettings, TrainingSettings
from knnper.config.seeding import RandomKey
from knnper.transport.codec import canonical
from knnper.transport.messages import Purpose
from server.checkpoint import Checkpoint, CheckpointFolder, History
from server.comparison import Comparison
from server.explosion import exploded, median_loss, sign_of_explosion
from server.federation import Federation, Request
from server.grouping import in_groups
from server.observer import RoundRecord
from server.reports import evaluation_problem
from server.roster import capped
from server.sampling import sample_participants
from server.validation import Tally, usable_updates
from strategies.core.method import NEWCOMER, Method

log = logging.getLogger(__name__)


MOST_NAMED = 100
"""Clients that failed in a round and are named in its record, with the reason."""

MOST_QUOTED = 5
"""The same where they end the run."""


class _Made(NamedTuple):
    """What a round came to.

    ``wild`` is what tells that the training explodes; empty if nothing does.
    """

    state: Any
    history: History
    tally: Tally
    wild: str


@dataclass(frozen=True)
class RoundLoop:
    """Trains a method's server state over a federation.

    Attributes
    ----------
    method
        What is trained.
    federation
        The clients.
    clients
        Those that may take part, seen and with training data: the number of training
        examples by name.
    claimed
        Those of them of whose number nobody knows but themselves.
    num_validation
        The number of validation examples of each of them.
    training, run
        The experiment's sections.
    key
        The experiment's root key.
    checkpoints
        Where the state is kept.
    on_round
        Called with each round's figures, before its checkpoint.
    """

    method: Method
    federation: Federation
    clients: Mapping[str, int]
    claimed: Collection[str]
    num_validation: Mapping[str, int]
    training: TrainingSettings
    run: RunSettings
    key: RandomKey
    checkpoints: CheckpointFolder
    on_round: Callable[[RoundRecord], None]
    _warned_of: set[str] = field(default_factory=set)

    def train(self, start: Checkpoint) -> Checkpoint:
        """Make the rounds that are missing after ``start``; return the last state.

        Raises
        ------
        ExplodedError
            If the training explodes.
        RunError
            If too many clients fail in a round. The state of the last checkpoint is
            what a resumed run goes on from.
        """
        latest, state, history = start, start.state, start.history
        num_wild = 0
        for server_round in range(start.server_round + 1, self.method.num_rounds + 1):
            began = time.monotonic()
            made = self._one_of_several_attempts(state, history, server_round)
            state, history, tally = made.state, made.history, made.tally
            figures: dict[str, Any] = {
                "server_round": server_round,
                "num_clients": tally.num_used,
                "num_failed": len(tally.failures),
                "train_loss": tally.train_loss,
                "bytes_down": tally.bytes_down,
                "bytes_up": tally.bytes_up,
                "learning_rate": self.training.learning_rate_at(server_round),
            }
            last = server_round == self.method.num_rounds
            if _is_due(server_round, self.run.validate_every):
                figures.update(self._validate(state, server_round))
            figures["seconds"] = time.monotonic() - began
            if tally.failures:
                named = itertools.islice(tally.failures.items(), MOST_NAMED)
                figures["failures"] = dict(named)
            # Before the checkpoint: a resumed run drops figures that are too many, and
            # could not make up for any that are missing.
            self.on_round(figures)
            num_wild = num_wild + 1 if made.wild else 0
            if num_wild and self.run.exploding_rounds:
                # No checkpoint: the last one stays the last good one.
                if last or num_wild >= self.run.exploding_rounds:
                    good = server_round - num_wild
                    raise exploded(server_round, made.wild, good)
            elif last or _is_due(server_round, self.run.checkpoint_every):
                latest = self.checkpoints.save(server_round, state, history)
        return latest

    def _one_of_several_attempts(
        self, state: Any, history: History, server_round: int
    ) -> "_Made":
        """Return what a round comes to, made again where too many clients failed."""
        participants = self._participants(server_round)
        num_spare = int(self.run.max_failed_fraction * len(participants))
        least = max(1, len(participants) - num_spare)
        for attempts_left in reversed(range(self.federation.round_attempts)):
            self.federation.await_clients(participants, least)
            try:
                return self._one_round(state, history, server_round, participants)
            except TooManyFailuresError as error:
                if not attempts_left:
                    raise
                log.warning("%s; the round is made again", error)
        raise ValueError("expected at least one attempt")

    def _one_round(
        self,
        state: Any,
        history: History,
        server_round: int,
        participants: Sequence[str],
    ) -> "_Made":
        counts = {name: self.clients[name] for name in participants}
        weights = capped(counts, self.claimed, self.run.federation.max_share)
        self._warn_of_large_counts(counts, weights)
        tally = Tally(
            weights,
            self.run.max_update_norm_ratio,
            self.method.update_problem,
            self.method.started_from,
        )
        comparison = Comparison(
            self.run.max_update_median_ratio,
            history.norms,
            self.training.learning_rate_at(server_round),
            _leeway(counts, self.claimed),
            self.checkpoints.waiting,
        )
        requests = self._requests(state, history, server_round, participants, tally)
        replies = self.federation.exchange(
            Purpose.TRAIN, server_round, self.checkpoints.ways_back(), requests
        )
        usable = usable_updates(replies, self.method.update_type, tally)
        alike = comparison.passed(usable, len(participants), tally.fails)
        try:
            new_state = self._aggregated(state, tally.using(alike), server_round, tally)
        finally:
            for client, reason in tally.failures.items():
                _warn_of_failure(server_round, client, reason)
        if len(tally.failures) > self.run.max_failed_fraction * len(participants):
            raise _too_many_failures(server_round, tally)
        loss = median_loss(loss for _, loss in tally.losses)
        wild = sign_of_explosion(loss, history.lowest_loss, comparison)
        history = history.after(
            server_round, comparison.norms(), None if wild else loss, tally.used
        )
        return _Made(canonical(new_state), history, tally, wild)

    def _warn_of_large_counts(
        self, counts: Mapping[str, int], weights: Mapping[str, int]
    ) -> None:
        for client, weight in weights.items():
            if weight < counts[client] and client not in self._warned_of:
                self._warned_of.add(client)
                log.warning(
                    "client %s says that it trains on %d examples, and counts as %d: "
                    "what it says gives it %g of a round at most, "
                    "run.federation.max_share. If it is true, fix it in a file "
                    "%s.num_train beside its key",
                    *(client, counts[client], weight),
                    *(self.run.federation.max_share, client),
                )

    def _aggregated(
        self,
        state: Any,
        updates: Iterator[tuple[str, Any]],
        server_round: int,
        tally: Tally,
    ) -> Any:
        first = next(updates, None)
        if first is None:
            raise _too_many_failures(server_round, tally)
        try:
            return self.method.aggregate(state, itertools.chain([first], updates))
        except RunError as error:
            if not tally.failures:
                raise
            # A method that compares clients cannot do without those that failed.
            raise _too_many_failures(server_round, tally) from error

    def _participants(self, server_round: int) -> list[str]:
        """Return the round's clients, the one with most to do first.

        With a short task last, workers end at nearly the same time. It is also the
        order in which replies are aggregated: sums end in bits that depend on it.
        """
        names = sample_participants(
            sorted(self.clients), self.training.participation, server_round, self.key
        )
        return sorted(names, key=lambda name: self.clients[name], reverse=True)

    def _requests(
        self,
        state: Any,
        history: History,
        server_round: int,
        clients: Sequence[str],
        tally: Tally,
    ) -> Iterator[Request]:
        for client in clients:
            key = self.key.child("broadcast", server_round, client)
            payload = self.method.broadcast(state, client, key)
            tally.sends(client, payload)
            state_rounds = history.state_rounds([client], server_round - 1)
            yield Request((client,), payload, state_rounds=state_rounds)

    def _validate(self, state: Any, server_round: int) -> RoundRecord:
        """Return the unpersonalised model's accuracy on all validation splits."""
        key = self.key.child("broadcast", server_round, NEWCOMER)
        reference = self.method.broadcast(state, NEWCOMER, key)
        replies = self.federation.exchange(
            Purpose.VALIDATE,
            server_round,
            self.checkpoints.ways_back(),
            (Request(group, reference) for group in in_groups(self.num_validation)),
        )
        correct = total = 0
        for reply in replies:
            most = sum(self.num_validation[name] for name in reply.clients)
            problem = reply.failure or evaluation_problem(reply.record, most)
            if problem:
                _warn_of_failure(server_round, ", ".join(reply.clients), problem)
                continue
            correct += reply.record.num_correct
            total += reply.record.num_examples
        return {"validation_accuracy": correct / total} if total else {}


def _leeway(counts: Mapping[str, int], claimed: Collection[str]) -> dict[str, float]:
    """Return how much farther each client may move, of whose data the size is known.

    With more data it makes more steps, each in a direction of its own.
    """
    usual = statistics.median_low(counts.values())
    return {
        name: math.sqrt(max(1.0, count / usual))
        for name, count in counts.items()
        if name not in claimed
    }


def _is_due(server_round: int, every: int) -> bool:
    return every > 0 and server_round % every == 0


def _warn_of_failure(server_round: int, client: str, reason: str | None) -> None:
    log.warning("round %d: client %s failed: %s", server_round, client, reason)


class TooManyFailuresError(RunError):
    """So many clients failed in a round that it does not count."""


def _too_many_failures(server_round: int, tally: Tally) -> TooManyFailuresError:
    total = len(tally.failures) + tally.num_used
    named = [f"client {name} said: {why}" for name, why in tally.failures.items()]
    more = f"; and {len(named) - MOST_QUOTED} more" if len(named) > MOST_QUOTED else ""
    return TooManyFailuresError(
        f"round {server_round}: {len(tally.failures)} of {total} clients failed, more "
        f"than run.max_failed_fraction allows; {'; '.join(named[:MOST_QUOTED])}{more}"
    )

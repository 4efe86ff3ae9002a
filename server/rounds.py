"""The round loop: the same for every method and every engine."""

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from knnper.errors import RunError
from knnper.experiment import BufferedTiming, UtilitySelection, is_timed_by_clients
from knnper.records import canonical, fingerprint
from knnper.secure.server import TooFewClientsError
from knnper.server.checkpoints import (
    Checkpoint,
    CheckpointFolder,
    CheckpointWriter,
    History,
)
from knnper.server.claims import cap_claims, leeway
from knnper.server.distribution import ModelDistribution
from knnper.server.explosion import ExplodedError, explosion_sign, median_loss
from knnper.server.federation import Federation, LiveFederation, Reply, Request, Step
from knnper.server.fleet import Cohort, LiveFleet
from knnper.server.observer import RoundRecord
from knnper.server.private_training import PrivateRound, PrivateTraining
from knnper.server.roster import Roster
from knnper.server.round_record import RoundOutcome, round_record
from knnper.server.schedule import (
    RoundSchedule,
    Schedule,
    rebased,
    schedule_of,
    scheduled,
    staleness_factor,
)
from knnper.server.screening import (
    ROUNDS_COMPARED,
    Clipping,
    Screening,
    UpdateChecks,
    agreements,
    find_suspects,
)
from knnper.server.secure_rounds import PairwiseKeys, SecureRound
from knnper.server.selection import Uniform
from knnper.server.tally import Tally
from knnper.strategies.core.assembly import Assembly
from knnper.strategies.core.method import UNSEEN_CLIENT, origins
from knnper.strategies.core.records import NoState
from knnper.transport.messages import Purpose

# Failed clients with a reason in the error that ends a run.
MOST_QUOTED = 5
# Above any finite norm of float32 numbers.
_ANY_NORM = 1e100

_FAILED = "round %d: client %s failed: %s"

log = logging.getLogger(__name__)


class TooManyFailuresError(RunError):
    """More clients failed in a round than ``run.max_failed_fraction`` allows."""


class RoundLoop:
    """Trains a method's server state over a federation.

    Parameters
    ----------
    on_round
        Called with the record of each round.
    on_return
        Called after an explosion, with the round that the training returns to.
    """

    def __init__(
        self,
        assembly: Assembly,
        federation: Federation,
        roster: Roster,
        checkpoints: CheckpointFolder,
        on_round: Callable[[RoundRecord], None],
        on_return: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.assembly = assembly
        self.method = assembly.method
        self.key = assembly.key
        self.training = assembly.experiment.training
        self.run = assembly.experiment.run
        self.federation = federation
        self.checkpoints = checkpoints
        self.roster = roster
        self.clients = roster.trainable()
        self.claimed = roster.claimed()
        self.titles = roster.titles()
        self.on_round = on_round
        self.on_return = on_return
        self.privacy: PrivateTraining | None = None
        privacy = assembly.experiment.privacy
        if privacy is not None and privacy.is_private:
            releases = None if federation.trusts_clients else checkpoints.releases
            self.privacy = PrivateTraining(assembly, len(self.clients), releases)
        self._warned_of_count: set[str] = set()
        self._warned_of_clipping: set[str] = set()
        self._history = History()
        self.schedule: Schedule = RoundSchedule(
            sorted(self.clients), self.training.participation, Uniform(self.key)
        )
        # By round, the models after it with which clients train: the last, and some
        # before.
        self._models: dict[int, Checkpoint] = {}
        self._pairwise_keys = PairwiseKeys()

    def train(self, start: Checkpoint) -> Checkpoint:
        """Make the rounds that are missing after ``start``; return the last state."""
        with CheckpointWriter(self.checkpoints) as writer:
            while True:
                try:
                    self._make_rounds(start, writer)
                except ExplodedError as error:
                    suspects = self._suspects()
                    if not suspects:
                        raise
                    start = self._go_back(error, suspects, writer)
                else:
                    return writer.latest() or start

    def _suspects(self) -> Mapping[str, float]:
        """Find the clients to leave out after an explosion; none if none stands out."""
        # In other schedules clients train while a step is made.
        if self.federation.trusts_clients or not isinstance(
            self.schedule, RoundSchedule
        ):
            return {}
        history = self._history
        return find_suspects(history.agreements, history.left_out, len(self.clients))

    def _go_back(
        self,
        error: ExplodedError,
        suspects: Mapping[str, float],
        writer: CheckpointWriter,
    ) -> Checkpoint:
        """Go back to before a training exploded, and leave the suspects out from there.

        The model after the last round without a sign of an explosion may have become
        worse for many rounds. So this is the newest checkpoint from which a round began
        with a model that was about as good as any.
        """
        writer.latest()
        before = error.last_good
        if self._history.good_round is not None:
            before = min(before, self._history.good_round)
        good = self.checkpoints.load_before(before, self.method.state_type)
        good = good or untrained(self.assembly, self.roster)
        left_out = dict(self._history.left_out)
        for name, cosine in suspects.items():
            left_out[name] = {"after_round": good.server_round, "cosine": cosine}
        good = replace(good, history=replace(good.history, left_out=left_out))
        for client, cosine in suspects.items():
            log.warning(
                "%s. Going back to round %d; client %s is left out from there on: its "
                "updates opposed those of the others (mean cosine %.2f in the last "
                "rounds). Look at it, remove it or resume with --from-round",
                error.summary,
                good.server_round,
                self.titles.get(client, client),
                cosine,
            )
        self.checkpoints.forget_after(good.server_round)
        self.on_return(good.server_round)
        writer.save(good.server_round, good.state, good.history, good.earlier)
        return good

    def _make_rounds(self, start: Checkpoint, writer: CheckpointWriter) -> None:
        state, history = start.state, start.history
        self._models = {earlier.server_round: earlier for earlier in start.earlier}
        self.schedule = self._make_schedule(start)
        num_exploding = 0
        for server_round in range(start.server_round + 1, self.method.num_rounds + 1):
            began = time.monotonic()
            if self.privacy is not None and not self.privacy.allows(server_round):
                if not _is_due(server_round - 1, self.run.checkpoint_every):
                    writer.save(server_round - 1, state, history, ())
                break
            present = Checkpoint(server_round - 1, state, "", history)
            self._models[server_round - 1] = present
            self.schedule.learn(history.gains)
            cohort = self.schedule.cohort(server_round)
            outcome = self._attempt_round(history, server_round, cohort)
            clip_norm = history.clip_norm
            state, history = outcome.state, outcome.history
            self._history = history
            needed = self.schedule.needed_after(server_round)
            self._models = {number: self._models[number] for number in needed}
            record = round_record(server_round, cohort, outcome, self.training)
            if self.privacy is not None:
                record.update(self.privacy.figures(server_round, clip_norm))
            is_last = server_round == self.method.num_rounds
            if _is_due(server_round, self.run.validate_every):
                present = Checkpoint(server_round, state, "", history)
                record.update(self.validate(present))
            record["seconds"] = time.monotonic() - began
            # Before the checkpoint: a resumed run can drop superfluous records, but not
            # restore missing records.
            self.on_round(record)
            num_exploding = num_exploding + 1 if outcome.explosion else 0
            if num_exploding and self.run.exploding_rounds:
                # No checkpoint: the last one stays the last good one.
                if is_last or num_exploding >= self.run.exploding_rounds:
                    good = server_round - num_exploding
                    raise ExplodedError(server_round, outcome.explosion, good)
            elif is_last or _is_due(server_round, self.run.checkpoint_every):
                # Of the last round too: another run may continue from it.
                earlier = tuple(self._models.values())
                writer.save(server_round, state, history, earlier)

    def _attempt_round(
        self, history: History, server_round: int, cohort: Cohort
    ) -> RoundOutcome:
        """Make a round, and repeat it when too many clients failed."""
        # With a short task last, workers end at nearly the same time. It is also the
        # order in which replies are aggregated: sums end in bits that depend on it.
        ordered = sorted(
            cohort.versions, key=lambda client: self.clients[client], reverse=True
        )
        versions = {client: cohort.versions[client] for client in ordered}
        replies = cohort.replies
        num_spare = self.run.max_failed_fraction * len(ordered)
        least = max(1, len(ordered) - int(num_spare))
        if cohort.num_asked is not None:
            num_spare = self.run.max_failed_fraction * cohort.num_asked
        for attempts_left in reversed(range(self.federation.round_attempts)):
            if replies is None and ordered:
                self.federation.await_clients(ordered, least)
            try:
                return self._make_round(
                    history, server_round, versions, replies, num_spare
                )
            except TooManyFailuresError as error:
                replies = None
                if not attempts_left:
                    raise
                log.warning("%s; the round is repeated", error)
        raise ValueError("expected at least one attempt")

    def _make_round(
        self,
        history: History,
        server_round: int,
        versions: Mapping[str, int],
        known: Mapping[str, Reply] | None,
        num_spare: float,
    ) -> RoundOutcome:
        """Make one round.

        Parameters
        ----------
        versions
            By client, the round of the model it trains with; in the order of requests.
        known
            Replies that have already arrived; None to send requests.
        num_spare
            Clients that may fail.
        """
        # 1. Limits on what each client may weigh and how far it may move the model.
        limits = self.run.federation
        counts = {name: self.clients[name] for name in versions}
        weights = cap_claims(
            counts,
            self.claimed,
            most=limits.max_share,
            most_times=limits.max_weight_ratio,
        )
        privacy, max_norm_ratio = self.privacy, self.run.max_update_norm_ratio
        # Noise hides one client in a sum, but not in a comparison of clients.
        compares = privacy is None
        if self.assembly.experiment.privacy is None:
            self._warn_of_large_counts(counts, weights)
        elif privacy is None:  # without noise, clients clip and count alike
            weights = dict.fromkeys(weights, min(weights.values()))
        elif privacy.sum_noise:  # then the server clips
            max_norm_ratio = _ANY_NORM
        tally = Tally(weights, self.titles)
        checks = UpdateChecks(
            num_train=weights,
            update_type=self.method.update_type,
            max_norm_ratio=max_norm_ratio,
            update_problem=self.method.update_problem,
            started_from=self.method.started_from,
            decoded=self.method.decoded,
            notes_directions=compares and not self.federation.trusts_clients,
        )
        screening = Screening(
            most=self.run.max_update_median_ratio if compares else None,
            past=history.norms,
            rate=self.training.learning_rate_at(server_round),
            leeway=leeway(counts, weights, self.claimed),
            folder=self.checkpoints.waiting,
            clipping=self._clipping() if compares else None,
        )
        # 2. A stream of replies, checked, screened and aggregated one by one.
        requests = self._requests(history, server_round, versions, checks, tally)
        keep_rounds = self.checkpoints.rounds_for_clients()
        step = Step(Purpose.TRAIN, server_round, keep_rounds)
        state = self._models[server_round - 1].state
        secure = self.training.secure_aggregation
        private = None
        if privacy is not None:
            payload = self._payload(UNSEEN_CLIENT, server_round - 1)
            clip_norm = history.clip_norm or privacy.settings.clip_norm
            private = PrivateRound(privacy, payload, server_round, clip_norm)

        def require_enough() -> None:
            if len(tally.failures) > num_spare:
                raise self._failed(server_round, tally, num_spare)

        try:
            if secure is None:
                if known is None:
                    replies = self.federation.exchange(step, requests)
                else:
                    replies = (known[request.client] for request in requests)
                usable = checks.usable(replies, tally.fail)
                accepted = screening.passed(usable, len(versions), tally.fail)
                updates = self._rebase(tally.using(accepted), server_round, versions)
            else:
                of_each = weights if privacy is None else dict.fromkeys(weights, 1)
                # The server may know a sum before the round ends.
                updates = SecureRound(
                    secure,
                    self.assembly,
                    self.federation,
                    self._pairwise_keys,
                    step,
                    {request.client: request for request in requests},
                    of_each,
                    tally,
                    num_spare,
                    before_sum=lambda: None if private is None else private.note(),
                ).updates()
            if private is not None:
                masked = None if secure is None else tally.used
                updates = private.noisy_mean(updates, require_enough, masked)
            new_state = self._aggregate(state, updates, server_round, tally)
        except TooFewClientsError as error:
            raise self._failed(server_round, tally, num_spare, str(error)) from error
        finally:
            for client, reason in tally.failures.items():
                log.warning(_FAILED, server_round, client, reason)
        require_enough()
        self._warn_of_clipping(screening.clipped)
        # 3. The history for the next rounds.
        loss = median_loss(loss for _, loss in tally.losses)
        distances = screening.distances() if compares else {}
        explosion = explosion_sign(loss, history.lowest_loss, distances)
        history = history.after(
            server_round,
            screening.norms() if compares else {},
            None if explosion else loss,
            tally.used,
        )
        if private is not None:
            history = replace(history, clip_norm=private.next_clip_norm())
        if isinstance(self.training.selection, UtilitySelection):
            history = replace(history, gains=[*history.gains, tally.gains()])
        if checks.notes_directions:
            of_rounds = [*history.agreements, agreements(checks.sketches)]
            history = replace(history, agreements=of_rounds[-ROUNDS_COMPARED:])
        return RoundOutcome(
            canonical(new_state), history, tally, screening.clipped, explosion
        )

    def _clipping(self) -> Clipping | None:
        most = self.run.federation.clip_median_ratio
        if self.federation.trusts_clients or most is None:
            return None
        return Clipping(most, functools.partial(origins, self.method))

    def _warn_of_clipping(self, clipped: Mapping[str, float]) -> None:
        for client, times in clipped.items():
            if client not in self._warned_of_clipping:
                self._warned_of_clipping.add(client)
                log.warning(
                    "client %s moves the model %.3g times as far as it may: its update "
                    "is shortened, in this round and others that rounds.jsonl names. "
                    "run.federation.clip_median_ratio is how far, in multiples of the "
                    "median client",
                    self.titles.get(client, client),
                    times,
                )

    def _warn_of_large_counts(
        self, counts: Mapping[str, int], weights: Mapping[str, int]
    ) -> None:
        limits = self.run.federation
        for client, weight in weights.items():
            if weight < counts[client] and client not in self._warned_of_count:
                self._warned_of_count.add(client)
                log.warning(
                    "client %s reports %d training examples, and counts as %d: a "
                    "reported number weighs at most %g times the median client of a "
                    "round, run.federation.max_weight_ratio, and %g of the round, "
                    "run.federation.max_share. If it is true, fix it in a file "
                    "%s.num_train beside its key",
                    client,
                    counts[client],
                    weight,
                    limits.max_weight_ratio or math.inf,
                    limits.max_share,
                    client,
                )

    def _aggregate(
        self,
        state: Any,
        updates: Iterator[tuple[str, Any]],
        server_round: int,
        tally: Tally,
    ) -> Any:
        first = next(updates, None)
        if first is None:
            raise self._failed(server_round, tally, 0)
        try:
            return self.method.aggregate(state, itertools.chain([first], updates))
        except RunError as error:
            if not tally.failures:
                raise
            # A method that compares clients cannot do without those that failed.
            raise self._failed(server_round, tally, 0) from error

    def _failed(
        self, server_round: int, tally: Tally, num_spare: float, problem: str = ""
    ) -> RunError:
        """Return the error of a round in which too many clients failed."""
        problem = problem or "more than run.max_failed_fraction allows"
        total = len(tally.failures) + len(tally.used)
        quoted = [
            f"client {name} failed with: {reason}"
            for name, reason in itertools.islice(tally.failures.items(), MOST_QUOTED)
        ]
        num_others = len(tally.failures) - len(quoted)
        others = f"; and {num_others} more" if num_others else ""
        error = TooManyFailuresError(
            f"round {server_round}: {len(tally.failures)} of {total} clients failed, "
            f"{problem}; {'; '.join(quoted)}{others}"
        )
        # Most of the round must report divergence: a client may give any reason.
        most = max(num_spare, total / 2)
        is_explosion = tally.num_diverged > most and self.run.exploding_rounds
        if self.federation.trusts_clients or not is_explosion:
            return error
        # The model is to blame, and repeating the round would end in the same way.
        return ExplodedError(server_round, str(error), server_round - 1)

    def _rebase(
        self,
        updates: Iterable[tuple[str, Any]],
        server_round: int,
        versions: Mapping[str, int],
    ) -> Iterator[tuple[str, Any]]:
        """Yield updates as if all had started from the present model."""
        timing = self.training.timing
        for client, update in updates:
            if isinstance(timing, BufferedTiming):
                version = versions[client]
                staleness = server_round - 1 - version
                factor = staleness_factor(timing, staleness)
                if staleness or factor != 1.0:
                    key = self.key.child("broadcast", version + 1, client)
                    then, now = (
                        self.method.broadcast(self._models[number].state, client, key)
                        for number in (version, server_round - 1)
                    )
                    update = rebased(self.method, update, then, now, factor)
            yield client, update

    def _requests(
        self,
        history: History,
        server_round: int,
        versions: Mapping[str, int],
        checks: UpdateChecks,
        tally: Tally,
    ) -> Iterator[Request]:
        for client, version in versions.items():
            sent = checks.note_sent(client, self._payload(client, version))
            tally.bytes_down += sent.num_bytes
            yield Request(
                (client,),
                sent.payload,
                state_rounds=history.state_rounds([client], server_round - 1),
                server_round=version + 1,
            )

    def _payload(self, client: str, version: int) -> object:
        key = self.key.child("broadcast", version + 1, client)
        return self.method.broadcast(self._models[version].state, client, key)

    def _make_schedule(self, start: Checkpoint) -> Schedule:
        """Make the schedule of participants from the step after ``start`` on."""
        training = self.training
        sizes = {
            client: size
            for client, size in self.clients.items()
            if client not in start.history.left_out
        }
        if self.privacy is not None:
            selection = self.privacy.selection
            return RoundSchedule(sorted(sizes), training.participation, selection)
        if not is_timed_by_clients(training):
            return schedule_of(training, sizes, self.method, self.key)
        if not isinstance(self.federation, LiveFederation):
            found = type(self.federation).__name__
            raise TypeError(f"expected a LiveFederation, found {found}")
        if start.history.trained_in is not None:
            raise RunError(
                f"training.timing: found {training.timing.name} for real clients with "
                "a method that keeps state at them, expected one without; give "
                "training.devices for a schedule that is known before, or leave "
                "training.timing out"
            )

        def request(client: str, version: int) -> Request:
            payload = self._payload(client, version)
            return Request((client,), payload, state_rounds=(version,))

        fleet = LiveFleet(self.federation, sizes, self.key, request)
        return scheduled(fleet, training, start.server_round + 1)

    def validate(self, trained: Checkpoint) -> RoundRecord:
        """Return the accuracies on validation splits of clients that are not busy."""
        distribution = ModelDistribution(
            self.method, self.federation, self.key, titles=self.titles
        )
        return distribution.validation_accuracies(
            trained,
            self.roster,
            skipped={*self.schedule.busy(), *trained.history.left_out},
            keep_rounds=self.checkpoints.rounds_for_clients(),
            is_personal=self.run.validate_personal,
        )


def untrained(assembly: Assembly, roster: Roster) -> Checkpoint:
    """Make the checkpoint before the first round."""
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


def _is_due(server_round: int, every: int) -> bool:
    return every > 0 and server_round % every == 0

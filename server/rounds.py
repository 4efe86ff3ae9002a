"""The round loop: the same for every method and every engine."""

import functools
import itertools
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from knnper.errors import CodecError, RunError, printable
from knnper.experiment import BufferedTiming, UtilitySelection, is_timed_by_clients
from knnper.records import canonical, fingerprint, is_finite, is_same, tensors_of
from knnper.server.distribution import requests_to_personalize
from knnper.server.federation import Federation, Reply, Request, Step
from knnper.server.fleet import Cohort, LiveFleet
from knnper.server.observer import RoundRecord
from knnper.server.results import in_groups, validation_problem
from knnper.server.run_folder import (
    Checkpoint,
    CheckpointFolder,
    CheckpointWriter,
    History,
    Roster,
)
from knnper.server.schedule import (
    Rounds,
    Schedule,
    rebased,
    schedule_of,
    scheduled,
    staleness_factor,
)
from knnper.server.screening import (
    DIVERGED,
    LARGEST_LOSS,
    ROUNDS_COMPARED,
    Clipping,
    ExplodedError,
    Measured,
    Screening,
    changes_of,
    exploded,
    median_loss,
    norm,
    num_bytes,
    sign_of_explosion,
)
from knnper.server.selection import Uniform, gain
from knnper.server.suspects import Sketch, agreements, sketch, suspects
from knnper.strategies.catalogue import Assembly
from knnper.strategies.core.method import (
    UNSEEN_CLIENT,
    Origin,
    UpdateProblem,
    origins,
)
from knnper.strategies.core.records import NoState
from knnper.strategies.core.task import Validation
from knnper.transport.messages import Purpose


def capped(
    counts: Mapping[str, int],
    claimed: Collection[str],
    most: float,
    most_times: float | None = None,
) -> dict[str, int]:
    """Return the counts of a round's clients, those cut that are claimed and too large.

    Parameters
    ----------
    counts
        Training examples of each client.
    claimed
        Clients whose number is their own claim.
    most
        The largest part of the total that a claim may be.
    most_times
        How many times the median of all counts a claim may be; None for any.
    """
    if most_times is not None and counts:
        limit = max(1, int(most_times * statistics.median_low(counts.values())))
        counts = {
            name: min(count, limit) if name in claimed else count
            for name, count in counts.items()
        }
    claims = sorted((counts[name] for name in counts if name in claimed), reverse=True)
    rest = sum(counts.values())
    limit = claims[-1] if claims else 0
    for num_cut, claim in enumerate([*claims, 0]):
        # With so many clients at the limit, it is this part of what the others have.
        if rest == 0 or num_cut * most >= 1:
            break
        share = most * rest / (1 - num_cut * most)
        if claim <= share:
            limit = max(1, int(share))
            break
        rest -= claim
    return {
        name: min(count, limit) if name in claimed else count
        for name, count in counts.items()
    }


Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Sent:
    """What a client was sent, with the norm of each of its tensors, by path."""

    payload: object
    tensors: Mapping[str, Tensor]
    norms: Mapping[str, float]

    @classmethod
    def of(cls, payload: object) -> "_Sent":
        tensors = tensors_of(payload)
        return cls(payload, tensors, {path: norm(one) for path, one in tensors.items()})

    def norm(self) -> float:
        return math.hypot(*self.norms.values())


_NOTHING = _Sent(None, {}, {})


@dataclass
class Tally:
    """What a round's replies came to, filled while they stream by."""

    num_train: Mapping[str, int]  # the most that each client may weigh in a mean
    # Most that an update may differ from what was sent, in norms of that, plus 1.
    max_norm_ratio: float = math.inf
    update_problem: UpdateProblem | None = None  # the method's, as `started_from`
    started_from: Origin | None = None
    decoded: Callable[[Any, Any], Any] | None = None
    titles: Mapping[str, str] = field(default_factory=dict)  # see `Roster.titles`
    notes_directions: bool = False  # whether `sketches` are made

    losses: list[tuple[int, float]] = field(default_factory=list)  # (n_m, loss) used
    failures: dict[str, str] = field(default_factory=dict)  # why, of those not used
    used: list[str] = field(default_factory=list)
    shapes: Shapes = field(default_factory=dict)  # by path, of the first that was used
    bytes_down: int = 0  # of the tensors of all payloads
    bytes_up: int = 0  # of all used updates
    sketches: dict[str, Sketch] = field(default_factory=dict)  # of all finite updates
    _sent: dict[str, _Sent] = field(default_factory=dict)
    _sent_shapes: Shapes = field(default_factory=dict)
    _latest: _Sent = _NOTHING

    def sends(self, client: str, payload: object) -> object:
        """Take note of what a client is sent; return it as others were sent it."""
        if not is_same(payload, self._latest.payload):  # most are sent the same
            self._latest = _Sent.of(payload)
            self._sent_shapes.update(_shapes(self._latest.tensors))
        self.bytes_down += sum(one.nbytes for one in self._latest.tensors.values())
        self._sent[client] = self._latest
        return self._latest.payload

    def using(self, passed: Iterable[Measured]) -> Iterator[tuple[str, Any]]:
        """Yield ``(client, update)`` of what is aggregated, and take note of it."""
        for one in passed:
            self.used.append(one.client)
            self.bytes_up += one.num_bytes
            self.losses.append((one.update.num_examples, one.update.train_loss))
            yield one.client, one.update

    def fails(self, client: str, reason: str) -> None:
        """Take note of why a client's update is not."""
        self.failures[self.titles.get(client, client)] = printable(reason)

    def note_direction(
        self, client: str, arrived: Mapping[str, Tensor], origin: Mapping[str, Tensor]
    ) -> None:
        """Take note of where an update moves what its client was sent."""
        own = sketch(arrived, origin) if self.notes_directions else None
        if own is not None:
            self.sketches[client] = own

    def gains(self) -> dict[str, float]:
        """Return the statistical utility of each client that was used."""
        used = zip(self.used, self.losses, strict=True)
        return {name: gain(self.num_train[name], loss) for name, (_, loss) in used}

    def expected(self, shapes: Shapes, sent: Shapes) -> Shapes:
        """Return the shapes that an update must have which has these.

        ``sent``: Of what its client was sent.
        """
        # What was sent under the same name has the shape in which it was sent. Of what
        # was not, the method says it, or else the first update decides for all.
        if self.shapes and self.update_problem is None:
            return self.shapes
        known = self._sent_shapes | sent
        return {name: known.get(name, shapes[name]) for name in shapes}

    @property
    def num_diverged(self) -> int:
        """Clients whose failure's reason is that the training diverged."""
        return sum(DIVERGED in reason for reason in self.failures.values())

    @property
    def train_loss(self) -> float:
        """Mean train loss, weighted by examples, over those that made a step."""
        known = [(n, loss) for n, loss in self.losses if abs(loss) <= LARGEST_LOSS]
        total = sum(n for n, _ in known)
        return sum(n * loss for n, loss in known) / total if total else math.nan


def usable_updates(
    replies: Iterable[Reply], update_type: type, tally: Tally
) -> Iterator[Measured | None]:
    """Yield for each reply the update that can be aggregated, or None."""
    for reply in replies:
        sent = tally._sent.pop(reply.client, _NOTHING)
        found = reply.failure or _measured(reply, sent, update_type, tally)
        if isinstance(found, str):
            tally.fails(reply.client, found)
        yield None if isinstance(found, str) else found


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _measured(
    reply: Reply, sent: _Sent, update_type: type, tally: Tally
) -> Measured | str:
    update = reply.record
    if not isinstance(update, update_type):
        expected = update_type.__name__
        return f"expected a {expected}, found a {type(update).__name__}"
    found = getattr(update, "num_examples", None)
    if type(found) is not int or found < 1:
        return f"expected a number of training examples, at least 1, found {found!r}"
    if reply.client not in tally.num_train:
        return "expected a client of this run, found one that takes no part in training"
    size = num_bytes(update)
    if tally.decoded is not None:
        try:
            update = tally.decoded(sent.payload, update)
        except CodecError as error:
            return str(error)
    if tally.update_problem is not None:
        problem = tally.update_problem(sent.payload, update)
        if problem is not None:
            return problem
    return _compared(reply.client, update, sent, tally, size)


def _compared(
    client: str, update: Any, sent: _Sent, tally: Tally, size: int
) -> Measured | str:
    """Return an update with how far it is from what was sent, or what is wrong."""
    arrived = tensors_of(update)
    shapes = _shapes(arrived)
    known = tally.expected(shapes, _shapes(sent.tensors))
    if shapes != known:
        return f"expected tensors of shapes {known}, found {shapes}"
    origin, norms = sent.tensors, sent.norms
    if tally.started_from is not None:
        origin = tally.started_from(sent.payload, update)
        norms = {path: norm(tensor) for path, tensor in origin.items()}
    changes = changes_of(arrived, origin, norms)
    moved = math.hypot(*(change.norm for change in changes.values()))
    if not math.isfinite(moved):
        for name, tensor in arrived.items():
            if not is_finite(tensor):
                return f"{name} is not finite: {DIVERGED}, lower the learning rate"
    tally.note_direction(client, arrived, origin)
    most = tally.max_norm_ratio * (sent.norm() + 1)
    if not moved <= most:
        return (
            f"the update moved by a norm of {moved:.3g}, more than {most:.3g}, "
            f"run.max_update_norm_ratio times that of what was sent: {DIVERGED}, or "
            "the client sends nonsense"
        )
    tally.shapes.update(shapes)
    # Data that has grown since the run began counts in the next one: no client can
    # weigh more than it said then.
    if update.num_examples > tally.num_train[client]:
        update = replace(update, num_examples=tally.num_train[client])
    return Measured(client, update, changes, size, sent.payload)


log = logging.getLogger(__name__)
# Clients that failed in a round and are named in its record, with the reason.
MOST_NAMED = 100
MOST_QUOTED = 5  # the same where they end the run
_FULL_LENGTH_UP_TO = 1.5  # times the median weight, see `_leeway`


_FAILED = "round %d: client %s failed: %s"


class _RoundOutcome(NamedTuple):
    state: Any
    history: History
    tally: Tally
    clipped: Mapping[str, float]  # see `Screening.clipped`
    explosion: str  # the sign that the training explodes, empty without


class RoundLoop:
    """Trains a method's server state over a federation."""

    def __init__(
        self,
        assembly: Assembly,
        federation: Federation,
        roster: Roster,
        checkpoints: CheckpointFolder,
        on_round: Callable[[RoundRecord], None],
        on_return: Callable[[int], None] = lambda _: None,  # to after a round
    ) -> None:
        self.assembly = assembly
        self.method, self.key = assembly.method, assembly.key
        self.training, self.run = assembly.experiment.training, assembly.experiment.run
        self.federation, self.checkpoints = federation, checkpoints
        self.clients, self.claimed = roster.trainable(), roster.claimed()
        self.roster, self.titles = roster, roster.titles()
        self.on_round, self.on_return = on_round, on_return
        self._warned_of: set[str] = set()
        self._warned_of_clipping: set[str] = set()
        self._history = History()
        self.schedule: Schedule = Rounds(
            sorted(self.clients), self.training.participation, Uniform(self.key)
        )
        # After which rounds clients train with a model: the last, and some before.
        self._models: dict[int, Checkpoint] = {}

    def train(self, start: Checkpoint) -> Checkpoint:
        """Make the rounds that are missing after ``start``; return the last state."""
        with CheckpointWriter(self.checkpoints) as writer:
            self._train(start, writer)
            return writer.latest() or start

    def _train(self, start: Checkpoint, writer: CheckpointWriter) -> None:
        good = start
        while True:
            try:
                self._make_rounds(good, writer)
            except ExplodedError as error:
                found = self._suspects()
                if not found:
                    raise
                good = self._gone_back(error, found, writer)
            else:
                return

    def _suspects(self) -> Mapping[str, float]:
        """Find the clients to leave out after an explosion; none if none stands out."""
        # Other schedules have clients at work while a step is made.
        if self.federation.trusts_clients or not isinstance(self.schedule, Rounds):
            return {}
        history = self._history
        return suspects(history.agreements, history.left_out, len(self.clients))

    def _gone_back(
        self,
        error: ExplodedError,
        found: Mapping[str, float],
        writer: CheckpointWriter,
    ) -> Checkpoint:
        """Go back to before a training exploded, and leave clients out from there on.

        The model after the last round without a sign is the one that the clients found
        exploded when they trained it, and it may have become worse for many rounds. So
        it is the newest checkpoint from which such a round began as was still good.
        """
        writer.latest()
        before = error.last_good
        if self._history.good_round is not None:
            before = min(before, self._history.good_round)
        good = self.checkpoints.load_before(before, self.method.state_type)
        good = good or untrained(self.assembly, self.roster)
        after = {"after_round": good.server_round}
        left_out = {
            **self._history.left_out,
            **{name: {**after, "cosine": cosine} for name, cosine in found.items()},
        }
        good = replace(good, history=replace(good.history, left_out=left_out))
        for client, cosine in found.items():
            log.warning(
                "%s. Going back to round %d; client %s is left out from there on: its "
                "updates opposed those of the others (mean cosine %.2f in the last "
                "rounds). Look at it, remove it or resume with --from-round",
                *(error.what, good.server_round),
                *(self.titles.get(client, client), cosine),
            )
        self.checkpoints.forget_after(good.server_round)
        self.on_return(good.server_round)
        writer.save(good.server_round, good.state, good.history, good.earlier)
        return good

    def _make_rounds(self, start: Checkpoint, writer: CheckpointWriter) -> None:
        state, history = start.state, start.history
        self._models = {one.server_round: one for one in start.earlier}
        self.schedule = self._schedule(start)
        num_exploding = 0
        for server_round in range(start.server_round + 1, self.method.num_rounds + 1):
            began = time.monotonic()
            present = Checkpoint(server_round - 1, state, "", history)
            self._models[server_round - 1] = present
            self.schedule.learn(history.gains)
            cohort = self.schedule.cohort(server_round)
            made = self._one_of_several_attempts(history, server_round, cohort)
            state, history = made.state, made.history
            self._history = history
            needed = self.schedule.needed_after(server_round)
            self._models = {one: self._models[one] for one in needed}
            figures = self._figures(server_round, cohort, made)
            last = server_round == self.method.num_rounds
            if _is_due(server_round, self.run.validate_every):
                at_present = Checkpoint(server_round, state, "", history)
                figures.update(self.validate(at_present))
            figures["seconds"] = time.monotonic() - began
            # Before the checkpoint: a resumed run drops figures that are too many, and
            # could not make up for any that are missing.
            self.on_round(figures)
            num_exploding = num_exploding + 1 if made.explosion else 0
            if num_exploding and self.run.exploding_rounds:
                # No checkpoint: the last one stays the last good one.
                if last or num_exploding >= self.run.exploding_rounds:
                    good = server_round - num_exploding
                    raise exploded(server_round, made.explosion, good)
            elif last or _is_due(server_round, self.run.checkpoint_every):
                # Of the last round too: more may follow in another run.
                earlier = tuple(self._models.values())
                writer.save(server_round, state, history, earlier)

    def _figures(
        self, server_round: int, cohort: Cohort, made: _RoundOutcome
    ) -> dict[str, Any]:
        """Collect the figures of a round that are known before any validation."""
        tally, titles = made.tally, self.titles
        figures: dict[str, Any] = {
            "server_round": server_round,
            "num_clients": len(tally.used),
            "num_failed": len(tally.failures),
            "train_loss": tally.train_loss,
            "bytes_down": tally.bytes_down,
            "bytes_up": tally.bytes_up,
            "learning_rate": self.training.learning_rate_at(server_round),
            **_on_time(cohort, server_round),
        }
        if cohort.replies is not None:
            figures["participants"] = {
                titles.get(client, client): server_round - 1 - cohort.versions[client]
                for client in sorted(tally.used)
            }
        if made.clipped:
            clipped = itertools.islice(made.clipped.items(), MOST_NAMED)
            figures["clipped"] = {titles.get(one, one): times for one, times in clipped}
        if left_out := sorted(made.history.left_out):
            figures["left_out"] = [titles.get(client, client) for client in left_out]
        if tally.failures:
            named = itertools.islice(tally.failures.items(), MOST_NAMED)
            figures["failures"] = dict(named)
        return figures

    def _one_of_several_attempts(
        self, history: History, server_round: int, cohort: Cohort
    ) -> _RoundOutcome:
        """Return what a round comes to, made again where too many clients failed."""
        # With a short task last, workers end at nearly the same time. It is also the
        # order in which replies are aggregated: sums end in bits that depend on it.
        ordered = sorted(
            cohort.versions, key=lambda one: self.clients[one], reverse=True
        )
        versions = {client: cohort.versions[client] for client in ordered}
        replies = cohort.replies
        num_spare = self.run.max_failed_fraction * len(ordered)
        least = max(1, len(ordered) - int(num_spare))
        if cohort.num_asked is not None:
            num_spare = self.run.max_failed_fraction * cohort.num_asked
        for attempts_left in reversed(range(self.federation.round_attempts)):
            if replies is None:
                self.federation.await_clients(ordered, least)
            try:
                return self._one_round(
                    history, server_round, versions, replies, num_spare
                )
            except TooManyFailuresError as error:
                replies = None
                if not attempts_left:
                    raise
                log.warning("%s; the round is made again", error)
        raise ValueError("expected at least one attempt")

    def _one_round(
        self,
        history: History,
        server_round: int,
        versions: Mapping[str, int],
        known: Mapping[str, Reply] | None,
        num_spare: float,
    ) -> _RoundOutcome:
        counts = {name: self.clients[name] for name in versions}
        limits = self.run.federation
        weights = capped(
            counts, self.claimed, limits.max_share, limits.max_weight_ratio
        )
        self._warn_of_large_counts(counts, weights)
        tally = Tally(
            weights,
            self.run.max_update_norm_ratio,
            self.method.update_problem,
            self.method.started_from,
            self.method.decoded,
            self.titles,
            notes_directions=not self.federation.trusts_clients,
        )
        screening = Screening(
            self.run.max_update_median_ratio,
            history.norms,
            self.training.learning_rate_at(server_round),
            _leeway(counts, weights, self.claimed),
            self.checkpoints.waiting,
            self._clipping(),
        )
        requests = self._requests(history, server_round, versions, tally)
        step = Step(Purpose.TRAIN, server_round, self.checkpoints.ways_back())
        if known is None:
            replies = self.federation.exchange(step, requests)
        else:
            replies = (known[request.client] for request in requests)
        usable = usable_updates(replies, self.method.update_type, tally)
        alike = screening.passed(usable, len(versions), tally.fails)
        state = self._models[server_round - 1].state
        try:
            used = self._present(tally.using(alike), server_round, versions)
            new_state = self._aggregated(state, used, server_round, tally)
        finally:
            for client, reason in tally.failures.items():
                log.warning(_FAILED, server_round, client, reason)
        if len(tally.failures) > num_spare:
            raise self._failed(server_round, tally, num_spare)
        self._warn_of_clipping(screening.clipped)
        loss = median_loss(loss for _, loss in tally.losses)
        explosion = sign_of_explosion(loss, history.lowest_loss, screening)
        history = history.after(
            server_round, screening.norms(), None if explosion else loss, tally.used
        )
        if isinstance(self.training.selection, UtilitySelection):
            history = replace(history, gains=[*history.gains, tally.gains()])
        if tally.notes_directions:
            found = [*history.agreements, agreements(tally.sketches)]
            history = replace(history, agreements=found[-ROUNDS_COMPARED:])
        return _RoundOutcome(
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
                    *(self.titles.get(client, client), times),
                )

    def _warn_of_large_counts(
        self, counts: Mapping[str, int], weights: Mapping[str, int]
    ) -> None:
        limits = self.run.federation
        for client, weight in weights.items():
            if weight < counts[client] and client not in self._warned_of:
                self._warned_of.add(client)
                log.warning(
                    "client %s says that it trains on %d examples, and counts as %d: "
                    "by what it says it weighs %g times the median client of a round "
                    "at most, run.federation.max_weight_ratio, and is %g of the round, "
                    "run.federation.max_share. If it is true, fix it in a file "
                    "%s.num_train beside its key",
                    *(
                        client,
                        counts[client],
                        weight,
                        limits.max_weight_ratio or math.inf,
                    ),
                    *(limits.max_share, client),
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
            raise self._failed(server_round, tally, 0)
        try:
            return self.method.aggregate(state, itertools.chain([first], updates))
        except RunError as error:
            if not tally.failures:
                raise
            # A method that compares clients cannot do without those that failed.
            raise self._failed(server_round, tally, 0) from error

    def _failed(self, server_round: int, tally: Tally, num_spare: float) -> RunError:
        """Return the error of a round in which too many clients failed."""
        error = _too_many_failures(server_round, tally)
        # Most of the round must say so: a client may give any reason.
        most = max(num_spare, (len(tally.failures) + len(tally.used)) / 2)
        is_explosion = tally.num_diverged > most and self.run.exploding_rounds
        if self.federation.trusts_clients or not is_explosion:
            return error
        # To make it again would end in the same way: the model is to blame.
        return exploded(server_round, str(error), server_round - 1)

    def _present(
        self,
        updates: Iterable[tuple[str, Any]],
        server_round: int,
        versions: Mapping[str, int],
    ) -> Iterator[tuple[str, Any]]:
        """Yield updates as if all had started from the present model."""
        timing = self.training.timing
        for client, update in updates:
            if isinstance(timing, BufferedTiming):
                staleness = server_round - 1 - versions[client]
                factor = staleness_factor(timing, staleness)
                if staleness or factor != 1.0:
                    version = versions[client]
                    key = self.key.child("broadcast", version + 1, client)
                    then, now = (
                        self.method.broadcast(self._models[one].state, client, key)
                        for one in (version, server_round - 1)
                    )
                    update = rebased(self.method, update, then, now, factor)
            yield client, update

    def _requests(
        self,
        history: History,
        server_round: int,
        versions: Mapping[str, int],
        tally: Tally,
    ) -> Iterator[Request]:
        for client, version in versions.items():
            payload = tally.sends(client, self._payload(client, version))
            state_rounds = history.state_rounds([client], server_round - 1)
            yield Request(
                (client,),
                payload,
                state_rounds=state_rounds,
                server_round=version + 1,
            )

    def _payload(self, client: str, version: int) -> object:
        key = self.key.child("broadcast", version + 1, client)
        return self.method.broadcast(self._models[version].state, client, key)

    def _schedule(self, start: Checkpoint) -> Schedule:
        """Return who takes part when, from the step after ``start`` on."""
        training = self.training
        left_out = start.history.left_out
        sizes = {one: self.clients[one] for one in self.clients if one not in left_out}
        if not is_timed_by_clients(training):
            return schedule_of(training, sizes, self.method, self.key)
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
        """Return the accuracies on the seen clients' validation splits."""
        server_round, state = trained.server_round, trained.state
        key = self.key.child("broadcast", server_round)
        passed_over = {*self.schedule.busy(), *trained.history.left_out}
        num_validation = self.roster.num_validation()
        free = {
            name: count
            for name, count in num_validation.items()
            if name not in passed_over
        }
        if self.run.validate_personal:
            of_all = self.roster.sizes()
            sizes = {name: of_all[name] for name in free}
            requests = requests_to_personalize(self.method, trained, key, sizes, sizes)
        else:
            unseen = key.child(UNSEEN_CLIENT)
            reference = self.method.broadcast(state, UNSEEN_CLIENT, unseen)
            groups = in_groups(free)
            requests = (Request(group, reference) for group in groups)
        step = Step(Purpose.VALIDATE, server_round, self.checkpoints.ways_back())
        counts: Counter[str] = Counter()
        for reply in self.federation.exchange(step, requests):
            most = sum(num_validation[name] for name in reply.clients)
            problem = reply.failure or validation_problem(reply.record, most)
            if problem:
                named = ", ".join(self.titles.get(one, one) for one in reply.clients)
                log.warning(_FAILED, server_round, named, problem)
                continue
            found: Validation = reply.record
            for name, why in found.failures.items():
                told = self.titles.get(name, printable(name))
                log.warning(_FAILED, server_round, told, printable(why))
            counts["right"] += found.reference.num_correct
            counts["all"] += found.reference.num_examples
            counts["personal right"] += found.num_personal_correct
            counts["personal"] += found.num_personal
        figures = {}
        if counts["all"]:
            figures["validation_accuracy"] = counts["right"] / counts["all"]
        if total := counts["personal"]:
            right = counts["personal right"]
            figures["validation_accuracy_personal"] = right / total
        return figures


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


def _leeway(
    counts: Mapping[str, int], weights: Mapping[str, int], claimed: Collection[str]
) -> dict[str, float]:
    """Return the factor on how far each client may move, against a usual one.

    A client with more data makes more steps, each in a direction of its own: √n where
    the number is verified. Where it is a claim, a large weight lowers the limit: in a
    mean, weight and length multiply.
    """
    usual = statistics.median_low(counts.values())
    return {
        name: min(1.0, _FULL_LENGTH_UP_TO * usual / weights[name])
        if name in claimed
        else math.sqrt(max(1.0, count / usual))
        for name, count in counts.items()
    }


def _on_time(cohort: Cohort, server_round: int) -> dict[str, float]:
    """Return the figures of a round that are of virtual time; none without it."""
    if cohort.ended_s is None and cohort.replies is None:
        return {}
    staleness = [server_round - 1 - version for version in cohort.versions.values()]
    virtual = {} if cohort.ended_s is None else {"virtual_seconds": cohort.ended_s}
    return {
        **virtual,
        "num_late": cohort.num_late,
        "staleness": statistics.fmean(staleness),
        "staleness_max": max(staleness),
    }


def _is_due(server_round: int, every: int) -> bool:
    return every > 0 and server_round % every == 0


class TooManyFailuresError(RunError):
    """So many clients failed in a round that it does not count."""


def _too_many_failures(server_round: int, tally: Tally) -> TooManyFailuresError:
    total = len(tally.failures) + len(tally.used)
    named = [f"client {name} said: {why}" for name, why in tally.failures.items()]
    more = f"; and {len(named) - MOST_QUOTED} more" if len(named) > MOST_QUOTED else ""
    return TooManyFailuresError(
        f"round {server_round}: {len(tally.failures)} of {total} clients failed, more "
        f"than run.max_failed_fraction allows; {'; '.join(named[:MOST_QUOTED])}{more}"
    )

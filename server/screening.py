"""Screening of updates: outliers of a round, and trainings that explode.

An update is judged by how far it moves each of its fields (`weights`, `components`,
...) from what the client was sent; a field that nobody was sent, such as a control
variate, by its own norm. More than `most` times the median of its round counts as an
attack, or as a training that diverged. Where the median has fallen, since most clients
have learned what there is to learn, it is a part of the largest median so far, at the
same learning rate: those that still learn are no attack.

The verdict depends on the norms of the whole round and of the rounds before, never on
who answered first: so it is the same on any engine and after a resume, and holds while
less than half of the round's updates are bad. Updates are passed on in the order in
which they come. One that is no more than the rounds before account for is passed on at
once; any other waits, and all behind it, until enough norms are known. Those that wait
are kept on disk once they take much memory.

Over real clients an accepted update is also clipped to a multiple of the median
(`Clipping`), so that no client has more than a few times the pull of another. The
largest median so far does not count for this limit: late in a training it would be many
times the present one.
"""

import bisect
import math
import shutil
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from knnper.errors import RunError
from knnper.records import Parts, put_together, take_apart, tensors_of
from knnper.transport.messages import Files, Packed, pack, unpack

# Also in the reasons that clients give, see `strategies.core.records`.
DIVERGED = "training diverged"
# Rounds before the present one whose updates a new one is compared with.
ROUNDS_COMPARED = 5
# Of updates that wait in memory; more of them wait on disk.
MOST_WAITING_BYTES = 128 * 1024**2
# Below the length from which BLAS shares the sum out between threads: their number
# must not show in the last bits.
_BLOCK = 8192
_BLOCKS_AT_ONCE = 8  # still in the processor's own cache

# Of what a median of this round may be exceeded by, what the largest of earlier rounds
# may: honest clients were seen at 4 times that one, and at 25 times their round's.
_OF_THE_LARGEST = 0.2

# A norm of what nobody was sent, such as a loss, is never strange below the limit of
# this median: the losses of clients differ by orders of magnitude.
_LEAST_UNSENT = 1.0


@dataclass(frozen=True)
class Change:
    """How far a client moved one field of what it was sent."""

    norm: float  # Euclidean, of the difference; of the field itself if it was not sent
    sent: float  # norm of what was sent; 0 if it was not


@dataclass(frozen=True)
class Measured:
    """An update that can be aggregated, unless it is unlike the others."""

    client: str
    update: Any  # the method's record
    changes: Mapping[str, Change]  # by the name of the record's field
    num_bytes: int  # of the tensors that were sent
    payload: Any = None  # what the client was sent


@dataclass(frozen=True)
class Norms:
    """The norms of one field in the last rounds, at a learning rate of 1."""

    medians: Sequence[float] = ()  # of the last `ROUNDS_COMPARED` rounds, oldest first
    largest: float = 0.0  # of all `usual` ones so far: a single round cannot move it

    def usual(self) -> float:
        """Return the median of the last rounds' medians; 0 if there was none."""
        return statistics.median_low(self.medians) if self.medians else 0.0

    def after(self, median: float) -> "Norms":
        """Return this with the median of one more round."""
        medians = [*self.medians, median][-ROUNDS_COMPARED:]
        return Norms(medians, max(self.largest, statistics.median_low(medians)))


def changes_of(
    tensors: Mapping[str, Tensor],
    origin: Mapping[str, Tensor],
    norms: Mapping[str, float],
) -> dict[str, Change]:
    """Return how far an update moved each of its fields; all three are by path."""
    # What is missing in the origin, or of another shape there, was not sent.
    pairs: dict[str, list[tuple[float, float]]] = {}
    for path, tensor in tensors.items():
        start = origin.get(path)
        if start is None or start.shape != tensor.shape:
            pair = norm(tensor), 0.0
        else:
            pair = norm(tensor, start), norms[path]
        pairs.setdefault(path.partition("/")[0], []).append(pair)
    return {
        name: Change(*(math.hypot(*values) for values in zip(*found, strict=True)))
        for name, found in pairs.items()
    }


def norm(tensor: Tensor, origin: Tensor | None = None) -> float:
    """Return the Euclidean norm of a tensor, or of its difference from another."""
    values = tensor.reshape(-1).numpy()
    start = None if origin is None else origin.reshape(-1).numpy()
    step = _BLOCKS_AT_ONCE * _BLOCK
    buffer = np.empty(min(step, len(values)), np.float32)
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(0, len(values), step):
            part = values[at : at + step]
            if start is not None:
                rest = buffer[: len(part)]
                part = np.subtract(part, start[at : at + step], out=rest)
            whole = len(part) // _BLOCK * _BLOCK
            blocks, last = part[:whole].reshape(-1, _BLOCK), part[whole:]
            for square in (*np.vecdot(blocks, blocks).tolist(), float(last @ last)):
                total += square
    return math.sqrt(total)


@dataclass(frozen=True)
class Clipping:
    """Clips updates to a multiple of the usual length.

    Attributes
    ----------
    most
        Times the median of the round, or of the last rounds if that is larger.
    origin
        ``(payload, update) -> {path: tensor}``: what the update's tensors started from.
    """

    most: float
    origin: Callable[[Any, Any], Mapping[str, Tensor]]

    def shortened(self, measured: Measured, factors: Mapping[str, float]) -> Measured:
        """Multiply the changes of some fields of an update by a factor each."""
        parts = take_apart(measured.update)
        origin, tensors = self.origin(measured.payload, measured.update), {}
        for path, tensor in parts.tensors.items():
            factor, start = factors.get(path.partition("/")[0]), origin.get(path)
            if factor is None or start is None or start.shape != tensor.shape:
                tensors[path] = tensor
            else:
                tensors[path] = start + factor * (tensor - start)
        update = put_together(type(measured.update), Parts(tensors, parts.structure))
        return replace(measured, update=update)


class Screening:
    """Passes the updates of one round on, but for those that are unlike the others.

    Attributes
    ----------
    clipped
        For each client whose update was shortened, its length over the limit.
    """

    def __init__(
        self,
        most: float | None,  # times the median that a norm may be; None for any
        past: Mapping[str, Norms],  # what earlier rounds tell, by field
        rate: float,  # this round's learning rate, in whatever unit
        leeway: Mapping[str, float],  # what both limits are multiplied with, by client
        folder: Path,  # for updates that wait on disk; it is made, and removed
        clipping: Clipping | None = None,
    ) -> None:
        self.clipped: dict[str, float] = {}
        self._most, self._clipping = most, clipping
        self._leeway = leeway
        self._past, self._rate = past, rate
        self._known = {
            name: sorted(rate * median for median in norms.medians)
            for name, norms in past.items()
        }
        self._accepted: dict[str, list[Change]] = {}
        self._waiting = _Waiting(folder)

    def passed(
        self,
        updates: Iterable[Measured | None],  # None where a reply cannot be used anyway
        expected: int,  # replies; fewer may come
        refuse: Callable[[str, str], None],
    ) -> Iterator[Measured]:
        """Yield the updates that are like the others, in their order."""
        missing = expected
        self._waiting.clear()
        try:
            for update in updates:
                missing -= 1
                if update is not None:
                    self._waiting.push(update)
                    for name, change in update.changes.items():
                        bisect.insort(self._known.setdefault(name, []), change.norm)
                yield from self._settled(missing, refuse)
            yield from self._settled(0, refuse)
        finally:
            self._waiting.clear()

    def norms(self) -> dict[str, Norms]:
        """Return what the rounds tell of the norms, with what this one passed on."""
        medians = {
            name: statistics.median_low(change.norm for change in changes) / self._rate
            for name, changes in self._accepted.items()
        }
        now = {
            name: self._past.get(name, Norms()).after(median)
            for name, median in medians.items()
        }
        return {**self._past, **now}

    def distances(self) -> dict[str, float]:
        """Return the same in multiples of the length of what was sent, plus 1."""
        return {
            name: statistics.median_low(one.norm / (one.sent + 1) for one in changes)
            for name, changes in self._accepted.items()
            if any(one.sent for one in changes)
        }

    def _settled(
        self, missing: int, refuse: Callable[[str, str], None]
    ) -> Iterator[Measured]:
        """Yield the first in turn for as long as their verdict is certain."""
        # Whatever is still missing, the median lies between those with nothing but
        # zeros and with nothing but infinities to come.
        while (first := self._waiting.first()) is not None:
            objection = self._objection(first, 0, missing)
            if objection is None and (
                self._objection(first, missing, 0) is not None
                or (missing and self._excesses(first, missing))
            ):
                return
            update = self._waiting.pop()
            if objection is not None:
                refuse(update.client, objection)
                continue
            for name, change in update.changes.items():
                self._accepted.setdefault(name, []).append(change)
            yield self._clip(update)

    def _clip(self, update: Measured) -> Measured:
        excesses = self._excesses(update, 0)
        if self._clipping is None or not excesses:
            return update
        self.clipped[update.client] = max(excesses.values())
        factors = {name: 1 / excess for name, excess in excesses.items()}
        return self._clipping.shortened(update, factors)

    def _excesses(self, update: Measured, zeros: int) -> dict[str, float]:
        """Return the length over the limit of each field that moved too far.

        ``zeros``: Updates still to come, taken to move nothing.
        """
        if self._clipping is None:
            return {}
        most = self._clipping.most * self._leeway.get(update.client, 1.0)
        excesses: dict[str, float] = {}
        for name, change in update.changes.items():
            usual = self._past.get(name, Norms()).usual()
            limit = most * max(self._median(name, zeros, 0), self._rate * usual)
            # A field that was not sent, such as a loss, has no origin to be moved back
            # to. Where most clients move nothing, there is no usual length.
            if not change.sent or (limit == 0 and not zeros):
                continue
            if change.norm > limit:
                excesses[name] = change.norm / limit if limit else math.inf
        return excesses

    def _objection(self, update: Measured, zeros: int, endless: int) -> str | None:
        """Return why an update is unlike the others, with so many more to come."""
        if self._most is None:
            return None
        most = self._most * self._leeway.get(update.client, 1.0)
        for name, change in update.changes.items():
            past = self._past.get(name, Norms())
            scale = max(
                self._median(name, zeros, endless),
                self._rate * past.usual(),
                self._rate * past.largest * _OF_THE_LARGEST,
            )
            if not change.sent:
                scale = max(scale, _LEAST_UNSENT)
            # Before any round has said how far clients move, to move something by its
            # own length is nothing strange.
            limit = max(most * scale, 0.0 if past.largest else change.sent + 1)
            if change.norm > limit:
                return (
                    f"{name} moved by a norm of {change.norm:.3g}, more than "
                    f"{limit:.3g}, which follows from run.max_update_median_ratio and "
                    f"the medians of this round and those before: {DIVERGED}, or the "
                    "client sends nonsense"
                )
        return None

    def _median(self, name: str, zeros: int, endless: int) -> float:
        """Return the lower median of the known norms with zeros and infinities."""
        known = self._known[name]
        place = (len(known) + zeros + endless - 1) // 2 - zeros
        if place < 0:
            return 0.0
        return known[place] if place < len(known) else math.inf


class _Waiting:
    """Updates in their order; those that take too much memory are on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, Files(folder, least_bytes=0)
        # With the bytes that each takes in memory, or where it is on disk.
        self._queue: deque[tuple[Measured, int | Packed]] = deque()
        self._num_bytes = 0

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def first(self) -> Measured | None:
        return self._queue[0][0] if self._queue else None

    def push(self, one: Measured) -> None:
        size = num_bytes(one.update)
        if self._num_bytes + size <= MOST_WAITING_BYTES or not self._queue:
            self._num_bytes += size
            self._queue.append((one, size))
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        packed = pack(one.update, self._files)
        self._queue.append((replace(one, update=type(one.update)), packed))

    def pop(self) -> Measured:
        one, place = self._queue.popleft()
        if isinstance(place, int):
            self._num_bytes -= place
            return one
        update = unpack(one.update, place, self._files)
        self._files.discard(place)
        return replace(one, update=update)


def num_bytes(record: object) -> int:
    """Return the size of a record's tensors, which is what travels, in bytes."""
    return sum(tensor.nbytes for tensor in tensors_of(record).values())


LARGEST_LOSS = 1e100  # A loss beyond it counts as infinite; in a mean it might overflow
_TIMES_THE_LOWEST = 20.0
_TIMES_ITS_LENGTH = 2.0
_OF_A_GOOD_MODEL = 0.5  # as `_TIMES_THE_LOWEST`


class ExplodedError(RunError):
    """A training exploded.

    Attributes
    ----------
    what
        The rounds in which it exploded, and the sign of it.
    last_good
        The round before the first of them.
    """

    what: str
    last_good: int


def exploded(server_round: int, sign: str, last_good: int) -> ExplodedError:
    """Return the error that ends a training."""
    since = last_good + 1
    several = f"rounds {since} to {server_round}"
    when = several if since < server_round else f"round {since}"
    what = f"the training has exploded in {when}: {sign}"
    error = ExplodedError(
        f"{what}. The last good round is {last_good}. Lower training.learning_rate in "
        "a run of its own, or look for a client that spoils it; run.exploding_rounds "
        "is after how many such rounds a run ends, and 0 for never"
    )
    error.what, error.last_good = what, last_good
    return error


def median_loss(losses: Iterable[float]) -> float | None:
    """Return the lower median of the clients' train losses; infinite if they are."""
    # A loss that is NaN tells that nobody made a step.
    known = [
        loss if abs(loss) <= LARGEST_LOSS else math.inf
        for loss in losses
        if not math.isnan(loss)
    ]
    return statistics.median_low(known) if known else None


def is_near_lowest(loss: float, lowest: float) -> bool:
    """Return whether a model with this median loss is about as good as the best one."""
    return loss <= lowest + _OF_A_GOOD_MODEL * max(abs(lowest), 1.0)


def sign_of_explosion(
    loss: float | None, lowest: float | None, screening: Screening
) -> str:
    """Return what tells that the training explodes in a round; empty if nothing."""
    if loss is not None and lowest is not None:
        most = lowest + _TIMES_THE_LOWEST * max(abs(lowest), 1.0)
        if not loss <= most:
            return f"the median train loss is {loss:.3g}, and was {lowest:.3g}"
    if loss == math.inf:
        return "the median train loss is infinite"
    for name, far in screening.distances().items():
        if far > _TIMES_ITS_LENGTH:
            return (
                f"the median client moves {name} by {far:.3g} times the length of what "
                "it was sent"
            )
    return ""

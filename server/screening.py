"""Screening of updates: validity, outliers of a round, clipping, and opposed clients.

**Validity.** `UpdateChecks` compares an update with what its client was sent: type,
shapes, finite numbers, and the length of the change.

**Outliers.** `Screening` judges an update by how far it moves each of its fields
(`weights`, `components`, ...) from what the client was sent. A field that was not sent,
such as a control variate, counts by its own norm. More than `most` times the median of
the round counts as an attack, or as a training that diverged. Late in a training most
clients hardly move any more, and the median falls; then the limit is a part of the
largest median so far, at the same learning rate, so that a client that still learns is
not taken for an attacker.

The verdict depends on the norms of the whole round and of the rounds before, never on
the order of the replies: so it is the same on any engine and after a resume, and holds
while less than half of the round's updates are bad. Updates are passed on in the order
in which they come. An update within what the rounds before account for is passed on at
once; any other waits, and all behind it, until enough norms are known. Waiting updates
move to disk once they take much memory.

**Clipping.** Over real clients an accepted update is also clipped to a multiple of the
median (`Clipping`), so that no client has more than a few times the pull of another.
The largest median so far does not count for this limit: late in a training it would be
many times the present median.

**Opposed clients.** After an explosion over real clients the directions of the updates
are compared (`find_suspects`); their lengths have been bounded by `Screening`. For each
round and client, this is the cosine between the client's direction and the sum of the
others' directions, each scaled to length 1. Where one client flips the sign of its
updates, its cosine is clearly negative and the others' are positive. Where the learning
rate is too large, all cosines are negative, and no client stands out. A direction has
as many numbers as the model. It is reduced to a sketch of 2,048, and inner products of
sketches equal those of directions up to 1/sqrt(2048), or 0.02 (count sketch: Charikar,
Chen and Farach-Colton, "Finding frequent items in data streams", 2002).
"""

import bisect
import functools
import math
import shutil
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnper.errors import CodecError
from knnper.records import (
    Parts,
    is_finite,
    is_same,
    put_together,
    take_apart,
    tensors_of,
)
from knnper.seeding import RandomKey
from knnper.server.federation import Reply
from knnper.strategies.core.method import Origin, UpdateProblem
from knnper.transport.messages import Files, Packed, pack, unpack

# Also in the reasons that clients give, see `strategies.core.records`.
DIVERGED = "training diverged"
# Earlier rounds that an update is compared with.
ROUNDS_COMPARED = 5
# Updates that wait in memory; further updates wait on disk.
MOST_WAITING_BYTES = 128 * 1024**2

# Below the length from which BLAS shares the sum out between threads, whose number
# would change the last bits.
_BLOCK = 8192
_BLOCKS_AT_ONCE = 8  # fit in the processor's cache
# The largest median of earlier rounds counts as this part of a median of this round:
# honest clients were seen to exceed it 4 times, and their own round's median 25 times.
_OF_THE_LARGEST = 0.2
# Least scale of a field that was not sent, such as a loss: the losses of honest clients
# differ by orders of magnitude.
_LEAST_UNSENT = 1.0
_SKETCH_LENGTH = 2048
_SIGNED_AT_ONCE = 512 * _SKETCH_LENGTH
# A suspect's mean cosine is at least this part of the most negative one.
_LEAST_OF_THE_WORST = 0.5

Shapes = dict[str, tuple[int, ...]]
Sketch = NDArray[np.float64]


@dataclass(frozen=True)
class FieldChange:
    """How far a client moved one field of what it was sent.

    Attributes
    ----------
    norm
        Euclidean norm of the difference; of the field itself if it was not sent.
    sent
        Norm of what was sent; 0 if the field was not sent.
    """

    norm: float
    sent: float


@dataclass(frozen=True)
class MeasuredUpdate:
    """A valid update, which may still be an outlier.

    Attributes
    ----------
    update
        The method's record.
    changes
        By field of the record.
    num_bytes
        Size of the tensors as they were sent.
    payload
        What the client was sent.
    """

    client: str
    update: Any
    changes: Mapping[str, FieldChange]
    num_bytes: int
    payload: Any = None


@dataclass(frozen=True)
class SentPayload:
    """A payload as it was sent, with the norm of each tensor, by path."""

    payload: Any = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, payload: object) -> "SentPayload":
        """Measure a payload."""
        tensors = tensors_of(payload)
        norms = {path: norm(tensor) for path, tensor in tensors.items()}
        return cls(payload, tensors, norms)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass
class UpdateChecks:
    """Validates the updates of one round.

    Attributes
    ----------
    num_train
        The largest number of examples that each client may report.
    update_type
        The method's record.
    max_norm_ratio
        Most that an update may differ from what was sent, in norms of that, plus 1.
    update_problem, started_from, decoded
        The method's functions of these names, if it has them.
    notes_directions
        Whether to fill `sketches`.
    sketches
        Direction of each finite update, by client.
    """

    num_train: Mapping[str, int]
    update_type: type
    max_norm_ratio: float = math.inf
    update_problem: UpdateProblem | None = None
    started_from: Origin | None = None
    decoded: Callable[[Any, Any], Any] | None = None
    notes_directions: bool = False
    sketches: dict[str, Sketch] = field(default_factory=dict, init=False)
    _shapes: Shapes = field(default_factory=dict, init=False)  # of valid updates
    _sent: dict[str, SentPayload] = field(default_factory=dict, init=False)
    _sent_shapes: Shapes = field(default_factory=dict, init=False)
    _latest: SentPayload = field(default_factory=SentPayload, init=False)

    def note_sent(self, client: str, payload: object) -> SentPayload:
        """Note what a client is sent; equal payloads become one object."""
        if not is_same(payload, self._latest.payload):  # most are sent the same
            self._latest = SentPayload.of(payload)
            self._sent_shapes.update(_shapes_of(self._latest.tensors))
        self._sent[client] = self._latest
        return self._latest

    def usable(
        self, replies: Iterable[Reply], fail: Callable[[str, str], None]
    ) -> Iterator[MeasuredUpdate | None]:
        """Yield the valid update of each reply, or None after ``fail(client, why)``."""
        for reply in replies:
            sent = self._sent.pop(reply.client, SentPayload())
            measured = reply.failure or self._measure(reply, sent)
            if isinstance(measured, str):
                fail(reply.client, measured)
                yield None
            else:
                yield measured

    def _measure(self, reply: Reply, sent: SentPayload) -> MeasuredUpdate | str:
        """Measure an update, or describe its problem."""
        update, client = reply.record, reply.client
        if not isinstance(update, self.update_type):
            expected = self.update_type.__name__
            return f"expected a {expected}, found a {type(update).__name__}"
        count = getattr(update, "num_examples", None)
        if type(count) is not int or count < 1:
            return (
                f"expected a number of training examples, at least 1, found {count!r}"
            )
        if client not in self.num_train:
            return "expected a client of this round, found one that takes no part in it"
        num_bytes = size_of(update)
        if self.decoded is not None:
            try:
                update = self.decoded(sent.payload, update)
            except CodecError as error:
                return str(error)
        if self.update_problem is not None:
            problem = self.update_problem(sent.payload, update)
            if problem is not None:
                return problem
        tensors = tensors_of(update)
        shapes = _shapes_of(tensors)
        expected_shapes = self._expected_shapes(shapes, _shapes_of(sent.tensors))
        if shapes != expected_shapes:
            return f"expected tensors of shapes {expected_shapes}, found {shapes}"
        origin, norms = sent.tensors, sent.norms
        if self.started_from is not None:
            origin = self.started_from(sent.payload, update)
            norms = {path: norm(tensor) for path, tensor in origin.items()}
        changes = changes_of(tensors, origin, norms)
        moved = math.hypot(*(change.norm for change in changes.values()))
        if not math.isfinite(moved):
            for name, tensor in tensors.items():
                if not is_finite(tensor):
                    return f"{name} is not finite: {DIVERGED}, lower the learning rate"
        if self.notes_directions:
            direction = sketch(tensors, origin)
            if direction is not None:
                self.sketches[client] = direction
        most = self.max_norm_ratio * (math.hypot(*sent.norms.values()) + 1)
        if not moved <= most:
            return (
                f"the update moved by a norm of {moved:.3g}, more than {most:.3g}, "
                "run.max_update_norm_ratio times that of what was sent: "
                f"{DIVERGED}, the client adds much noise, or it sends nonsense"
            )
        self._shapes.update(shapes)
        # Data that has grown since the run began counts in the next run: no client can
        # weigh more than it said then.
        if count > self.num_train[client]:
            update = replace(update, num_examples=self.num_train[client])
        return MeasuredUpdate(client, update, changes, num_bytes, sent.payload)

    def _expected_shapes(self, shapes: Shapes, sent: Shapes) -> Shapes:
        """Return the tensor shapes expected of an update with these ``shapes``.

        ``sent`` are the shapes of what its client was sent.
        """
        # A tensor that was sent under the same name keeps its shape. The method checks
        # the others; if it does not, the first valid update decides for all.
        if self._shapes and self.update_problem is None:
            return self._shapes
        known = self._sent_shapes | sent
        return {name: known.get(name, shapes[name]) for name in shapes}


def _shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def size_of(record: object) -> int:
    """Return the size of a record's tensors in bytes."""
    return sum(tensor.nbytes for tensor in tensors_of(record).values())


def changes_of(
    tensors: Mapping[str, Tensor],
    origin: Mapping[str, Tensor],
    norms: Mapping[str, float],
) -> dict[str, FieldChange]:
    """Return how far an update moved each of its fields.

    Parameters
    ----------
    tensors, origin
        The update's tensors and what they started from, by path. A tensor that is
        missing in ``origin``, or has another shape there, was not sent.
    norms
        Of ``origin``, by path.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for path, tensor in tensors.items():
        start = origin.get(path)
        if start is None or start.shape != tensor.shape:
            pair = norm(tensor), 0.0
        else:
            pair = norm(tensor, start), norms[path]
        pairs.setdefault(path.partition("/")[0], []).append(pair)
    return {
        name: FieldChange(
            *(math.hypot(*values) for values in zip(*of_field, strict=True))
        )
        for name, of_field in pairs.items()
    }


def norm(tensor: Tensor, origin: Tensor | None = None) -> float:
    """Return the Euclidean norm of a tensor, or of its difference from another.

    The bits of the result do not depend on the number of threads.
    """
    values = tensor.reshape(-1).numpy()
    start = None if origin is None else origin.reshape(-1).numpy()
    step = _BLOCKS_AT_ONCE * _BLOCK
    buffer = np.empty(min(step, len(values)), np.float32)
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(0, len(values), step):
            part = values[at : at + step]
            if start is not None:
                part = np.subtract(part, start[at : at + step], out=buffer[: len(part)])
            whole = len(part) // _BLOCK * _BLOCK
            blocks, last = part[:whole].reshape(-1, _BLOCK), part[whole:]
            for square in (*np.vecdot(blocks, blocks).tolist(), float(last @ last)):
                total += square
    return math.sqrt(total)


@dataclass(frozen=True)
class Norms:
    """How far clients moved one field in the last rounds, at a learning rate of 1.

    Attributes
    ----------
    medians
        Of the last `ROUNDS_COMPARED` rounds, oldest first.
    largest
        Largest value of `usual` so far, which a single round cannot move.
    """

    medians: Sequence[float] = ()
    largest: float = 0.0

    def usual(self) -> float:
        """Return the median of the last rounds' medians; 0 before the first round."""
        return statistics.median_low(self.medians) if self.medians else 0.0

    def after(self, median: float) -> "Norms":
        """Return the norms after one more round with this median."""
        medians = [*self.medians, median][-ROUNDS_COMPARED:]
        return Norms(medians, max(self.largest, statistics.median_low(medians)))


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

    def shorten(
        self, measured: MeasuredUpdate, factors: Mapping[str, float]
    ) -> MeasuredUpdate:
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
    """Passes on the updates of one round that are like the others.

    Parameters
    ----------
    most
        Times the median that a norm may be; None for any.
    past
        Norms of earlier rounds, by field.
    rate
        This round's learning rate, in any unit.
    leeway
        Factor on both limits, by client.
    folder
        For updates that wait on disk; it is made, and removed.

    Attributes
    ----------
    clipped
        For each client with a shortened update, its length over the limit.
    """

    def __init__(
        self,
        most: float | None,
        past: Mapping[str, Norms],
        rate: float,
        leeway: Mapping[str, float],
        folder: Path,
        clipping: Clipping | None = None,
    ) -> None:
        self.clipped: dict[str, float] = {}
        self._most, self._clipping = most, clipping
        self._leeway = leeway
        self._past, self._rate = past, rate
        # Sorted norms by field: of this round, and the medians of the last rounds.
        self._known = {
            name: sorted(rate * median for median in norms.medians)
            for name, norms in past.items()
        }
        self._accepted: dict[str, list[FieldChange]] = {}
        self._waiting = _UpdateQueue(folder)

    def passed(
        self,
        updates: Iterable[MeasuredUpdate | None],
        expected: int,
        refuse: Callable[[str, str], None],
    ) -> Iterator[MeasuredUpdate]:
        """Yield the updates that are like the others, in their order.

        Parameters
        ----------
        updates
            None for a reply that cannot be used.
        expected
            Number of replies; fewer may come.
        refuse
            Called as ``refuse(client, why)`` for each of the others.
        """
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
        """Return the norms of all rounds, including this one."""
        medians = {
            name: statistics.median_low(change.norm for change in changes) / self._rate
            for name, changes in self._accepted.items()
        }
        present = {
            name: self._past.get(name, Norms()).after(median)
            for name, median in medians.items()
        }
        return {**self._past, **present}

    def distances(self) -> dict[str, float]:
        """Return each field's median change, in lengths of what was sent, plus 1."""
        return {
            name: statistics.median_low(
                change.norm / (change.sent + 1) for change in changes
            )
            for name, changes in self._accepted.items()
            if any(change.sent for change in changes)
        }

    def _settled(
        self, missing: int, refuse: Callable[[str, str], None]
    ) -> Iterator[MeasuredUpdate]:
        """Yield the first updates in turn for as long as their verdict is certain.

        The missing updates may be anything, so the median lies between that with only
        zeros to come and that with only infinities to come.
        """
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

    def _clip(self, update: MeasuredUpdate) -> MeasuredUpdate:
        """Shorten the fields that moved too far, and note it in `clipped`."""
        # While updates are missing, `_settled` passes only those without any excess.
        excesses = self._excesses(update, 0)
        if self._clipping is None or not excesses:
            return update
        self.clipped[update.client] = max(excesses.values())
        factors = {name: 1 / excess for name, excess in excesses.items()}
        return self._clipping.shorten(update, factors)

    def _excesses(self, update: MeasuredUpdate, zeros: int) -> dict[str, float]:
        """Return the length over the limit of each field that moved too far.

        ``zeros`` updates are still to come, and are assumed to move nothing.
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

    def _objection(
        self, update: MeasuredUpdate, zeros: int, infinities: int
    ) -> str | None:
        """Return why an update is unlike the others, with these norms still to come."""
        if self._most is None:
            return None
        most = self._most * self._leeway.get(update.client, 1.0)
        for name, change in update.changes.items():
            past = self._past.get(name, Norms())
            scale = max(
                self._median(name, zeros, infinities),
                self._rate * past.usual(),
                self._rate * past.largest * _OF_THE_LARGEST,
            )
            if not change.sent:
                scale = max(scale, _LEAST_UNSENT)
            # Before any round has shown how far clients move, a move by a field's own
            # length is nothing strange.
            limit = max(most * scale, 0.0 if past.largest else change.sent + 1)
            if change.norm > limit:
                return (
                    f"{name} moved by a norm of {change.norm:.3g}, more than "
                    f"{limit:.3g}, which follows from run.max_update_median_ratio and "
                    f"the medians of this round and those before: {DIVERGED}, or the "
                    "client sends nonsense"
                )
        return None

    def _median(self, name: str, zeros: int, infinities: int) -> float:
        """Return the lower median of the known norms with zeros and infinities."""
        known = self._known[name]
        place = (len(known) + zeros + infinities - 1) // 2 - zeros
        if place < 0:
            return 0.0
        return known[place] if place < len(known) else math.inf


class _UpdateQueue:
    """A queue of updates; those that take too much memory are on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, Files(folder, least_bytes=0)
        # With the bytes that each takes in memory, or its place on disk.
        self._queue: deque[tuple[MeasuredUpdate, int | Packed]] = deque()
        self._num_bytes = 0

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def first(self) -> MeasuredUpdate | None:
        return self._queue[0][0] if self._queue else None

    def push(self, measured: MeasuredUpdate) -> None:
        num_bytes = size_of(measured.update)
        if self._num_bytes + num_bytes <= MOST_WAITING_BYTES or not self._queue:
            self._num_bytes += num_bytes
            self._queue.append((measured, num_bytes))
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        packed = pack(measured.update, self._files)
        # Only the type of the record stays in memory.
        self._queue.append((replace(measured, update=type(measured.update)), packed))

    def pop(self) -> MeasuredUpdate:
        measured, place = self._queue.popleft()
        if isinstance(place, int):
            self._num_bytes -= place
            return measured
        update = unpack(measured.update, place, self._files)
        self._files.discard(place)
        return replace(measured, update=update)


def sketch(
    tensors: Mapping[str, Tensor], origin: Mapping[str, Tensor]
) -> Sketch | None:
    """Sketch the direction of an update; None if it moved no tensor, or not finitely.

    Both arguments are by path. Tensors that are missing in ``origin``, or have another
    shape there, are left out.
    """
    total: Sketch = np.zeros(_SKETCH_LENGTH)
    for path, tensor in tensors.items():
        start = origin.get(path)
        if start is not None and start.shape == tensor.shape:
            total += _sketch_of(tensor.reshape(-1).numpy(), start.reshape(-1).numpy())
    length = float(np.linalg.norm(total))
    return total / length if 0 < length < math.inf else None


def _sketch_of(values: NDArray[np.float32], start: NDArray[np.float32]) -> Sketch:
    """Return the sums of the signed differences over every 2,048th number."""
    total: Sketch = np.zeros(_SKETCH_LENGTH)
    for number, at in enumerate(range(0, len(values), _SIGNED_AT_ONCE)):
        moved = values[at : at + _SIGNED_AT_ONCE] - start[at : at + _SIGNED_AT_ONCE]
        rows = -(-len(moved) // _SKETCH_LENGTH)
        signed = np.zeros(rows * _SKETCH_LENGTH, np.float32)
        np.multiply(moved, _signs(number)[: len(moved)], out=signed[: len(moved)])
        total += signed.reshape(rows, _SKETCH_LENGTH).sum(axis=0, dtype=np.float64)
    return total


@functools.lru_cache(maxsize=64)
def _signs(block: int) -> NDArray[np.int8]:
    """Return random signs, the same for each update, shape (_SIGNED_AT_ONCE,)."""
    generator = RandomKey(0, ("sketch", block)).numpy()
    return generator.integers(0, 2, _SIGNED_AT_ONCE, np.int8) * 2 - 1


def agreements(sketches: Mapping[str, Sketch]) -> dict[str, float]:
    """Compute each client's cosine with the sum of the others' directions."""
    total = sum(sketches.values(), start=np.zeros(_SKETCH_LENGTH))
    cosines: dict[str, float] = {}
    for client, direction in sketches.items():
        others = total - direction
        length = float(np.linalg.norm(others))
        if length > 0:
            cosines[client] = float(direction @ others) / length
    return cosines


def find_suspects(
    rounds: Sequence[Mapping[str, float]], left_out: Iterable[str], num_clients: int
) -> dict[str, float]:
    """Find the clients that oppose all others, with their mean cosines.

    A suspect's mean cosine is negative, and at least half as negative as the lowest.
    There are no suspects if they would be half of all clients or more, together with
    those left out already: the majority is taken to be honest.

    ``rounds`` are the `agreements` of the last rounds.
    """
    already_left_out = set(left_out)
    cosines: dict[str, list[float]] = {}
    for of_round in rounds:
        for client, cosine in of_round.items():
            if client not in already_left_out:
                cosines.setdefault(client, []).append(cosine)
    means = {client: statistics.fmean(values) for client, values in cosines.items()}
    worst = min(means.values(), default=0.0)
    if worst >= 0:
        return {}
    suspects = {
        client: cosine
        for client, cosine in sorted(means.items())
        if cosine <= _LEAST_OF_THE_WORST * worst
    }
    num_excluded = len(suspects) + len(already_left_out)
    return suspects if 2 * num_excluded < num_clients else {}

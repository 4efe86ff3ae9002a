"""What an update must be like to be aggregated."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from knnper.transport.codec import is_finite, take_apart
from knnper.transport.foreign_text import printable
from server.comparison import Measured, changes_of, norm, num_bytes
from server.explosion import LARGEST_LOSS
from server.federation import Reply
from strategies.core.method import Origin, UpdateProblem
from strategies.core.records import Update

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Sent:
    """What a client was sent, with the norm of each of its tensors, by path."""

    payload: object
    tensors: Mapping[str, Tensor]
    norms: Mapping[str, float]

    @classmethod
    def of(cls, payload: object) -> "_Sent":
        tensors = take_apart(payload).tensors
        return cls(payload, tensors, {path: norm(one) for path, one in tensors.items()})

    def norm(self) -> float:
        return math.hypot(*self.norms.values())


_NOTHING = _Sent(None, {}, {})


@dataclass
class Tally:
    """What a round's replies came to, filled while they stream by.

    Attributes
    ----------
    num_train
        The most that each client may weigh in a mean, by name.
    max_norm_ratio
        Most that an update may differ from what the client was sent, in multiples of
        the norm of that, plus 1.
    update_problem, started_from
        The method's; see `Method`.
    losses
        (n_m, train loss) of each update that was used.
    failures
        Why, by client, for those that were not.
    used
        The clients whose updates were.
    shapes
        Shape of each tensor of the first update that was used, by its path; what the
        others must have too, where the method does not say.
    bytes_down, bytes_up
        Size of the tensors of all payloads and of all used updates.
    """

    num_train: Mapping[str, int]
    max_norm_ratio: float = math.inf
    update_problem: UpdateProblem | None = None
    started_from: Origin | None = None

    losses: list[tuple[int, float]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    shapes: Shapes = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    _sent: dict[str, _Sent] = field(default_factory=dict)
    _sent_shapes: Shapes = field(default_factory=dict)
    _latest: _Sent = _NOTHING

    def sends(self, client: str, payload: object) -> None:
        """Take note of what a client is sent."""
        if payload is not self._latest.payload:  # most methods send everyone the same
            self._latest = _Sent.of(payload)
            self._sent_shapes.update(_shapes(self._latest.tensors))
        self.bytes_down += _num_bytes(self._latest.tensors)
        self._sent[client] = self._latest

    def take_sent(self, client: str) -> _Sent:
        """Return what a client was sent, and forget it.

        There is one answer to it, and it may be large.
        """
        return self._sent.pop(client, _NOTHING)

    def using(self, passed: Iterable[Measured]) -> Iterator[tuple[str, Any]]:
        """Yield ``(client, update)`` of what is aggregated, and take note of it."""
        for one in passed:
            self.used.append(one.client)
            self.bytes_up += num_bytes(one.update)
            self.losses.append((one.update.num_examples, one.update.train_loss))
            yield one.client, one.update

    def fails(self, client: str, reason: str) -> None:
        """Take note of why a client's update is not."""
        self.failures[client] = printable(reason)

    def expected(self, shapes: Shapes) -> Shapes:
        """Return the shapes that an update must have which has these.

        What was sent under the same name has the shape in which it was sent. Of what
        was not, the method says it, or else the first update decides for all.
        """
        if self.shapes and self.update_problem is None:
            return self.shapes
        return {name: self._sent_shapes.get(name, shapes[name]) for name in shapes}

    @property
    def num_used(self) -> int:
        """The number of updates that were used."""
        return len(self.used)

    @property
    def train_loss(self) -> float:
        """Mean train loss, weighted by examples, over those that made a step.

        One that is so large that the mean might overflow is left out.
        """
        known = [(n, loss) for n, loss in self.losses if abs(loss) <= LARGEST_LOSS]
        total = sum(n for n, _ in known)
        return sum(n * loss for n, loss in known) / total if total else math.nan


def usable_updates(
    replies: Iterable[Reply], update_type: type, tally: Tally
) -> Iterator[Measured | None]:
    """Yield for each reply the update that can be aggregated, or None.

    None stands for a client that failed, or whose update is not finite or not an answer
    to what it was sent; ``tally`` has the reason.
    """
    for reply in replies:
        sent = tally.take_sent(reply.client)
        found = reply.failure or _measured(reply, sent, update_type, tally)
        if isinstance(found, str):
            tally.fails(reply.client, found)
        yield None if isinstance(found, str) else found


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    """Return the shape of each tensor, by its path."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _measured(
    reply: Reply, sent: _Sent, update_type: type, tally: Tally
) -> Measured | str:
    """Return an update that can be aggregated, or what is wrong with it."""
    update = reply.record
    if not isinstance(update, update_type) or not isinstance(update, Update):
        expected = update_type.__name__
        return f"expected a {expected}, found a {type(update).__name__}"
    problem = _weight_problem(reply.client, update, tally)
    if problem is None and tally.update_problem is not None:
        problem = tally.update_problem(sent.payload, update)
    if problem is not None:
        return problem
    return _compared(reply.client, update, sent, tally)


def _weight_problem(client: str, update: Update, tally: Tally) -> str | None:
    """Return why an update cannot be weighed in a mean; None if it can."""
    found = update.num_examples
    if type(found) is not int:
        return f"expected a number of training examples, found {found!r}"
    if found < 1:
        return f"expected at least one training example, found {found}"
    if client not in tally.num_train:
        return "expected a client of this run, found one that takes no part in training"
    return None


def _compared(client: str, update: Any, sent: _Sent, tally: Tally) -> Measured | str:
    """Return an update with how far it is from what was sent, or what is wrong."""
    arrived = take_apart(update).tensors
    shapes = _shapes(arrived)
    known = tally.expected(shapes)
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
                return (
                    f"{name} is not finite: training diverged, lower the learning rate"
                )
    most = tally.max_norm_ratio * (sent.norm() + 1)
    if not moved <= most:
        return (
            f"the update moved by a norm of {moved:.3g}, more than {most:.3g}, "
            "run.max_update_norm_ratio times that of what was sent: training diverged, "
            "or the client sends nonsense"
        )
    tally.shapes.update(shapes)
    # Data that has grown since the run began counts in the next one: no client can
    # weigh more than it said then.
    if update.num_examples > tally.num_train[client]:
        update = replace(update, num_examples=tally.num_train[client])
    return Measured(client, update, changes)

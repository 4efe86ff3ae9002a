"""What an update must be like to be aggregated."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from knnper.transport.codec import is_finite, take_apart
from knnper.transport.foreign_text import printable
from server.federation import Reply
from strategies.core.method import UpdateProblem
from strategies.core.records import Update

LARGEST_LOSS = 1e100
"""A loss beyond it, or NaN, is left out of the mean, in which it might overflow."""

Shapes = dict[str, tuple[int, ...]]


@dataclass
class Tally:
    """What a round's replies came to, filled while they stream by.

    Attributes
    ----------
    num_train
        Training examples of each client, by name.
    max_norm_ratio
        Most that an update's norm may be, in multiples of that of what the client was
        sent, plus 1.
    update_problem
        The method's; see `Method`.
    losses
        (n_m, train loss) of each update that was used.
    failures
        Why, by client, for those that were not.
    shapes
        Shape of each tensor of the first update that was used, by its path; what the
        others must have too, where the method does not say.
    bytes_down, bytes_up
        Size of the tensors of all payloads and of all used updates.
    """

    num_train: Mapping[str, int]
    max_norm_ratio: float = math.inf
    update_problem: UpdateProblem | None = None

    losses: list[tuple[int, float]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    _sent_norms: dict[str, float] = field(default_factory=dict)
    _sent_shapes: Shapes = field(default_factory=dict)
    _sent: dict[str, object] = field(default_factory=dict)
    _latest: tuple[object, float] = (None, 0.0)

    def sends(self, client: str, payload: object) -> None:
        """Take note of what a client is sent."""
        self.bytes_down += num_bytes(payload)
        self._sent_shapes.update(_shapes(payload))
        latest, norm = self._latest
        if payload is not latest:  # most methods send everyone the same
            norm = _norm(payload)
        self._latest = payload, norm
        self._sent_norms[client] = norm
        if self.update_problem is not None:
            self._sent[client] = payload

    def most_norm(self, client: str) -> float:
        """Return the largest norm of an update that is taken from a client."""
        return self.max_norm_ratio * (self._sent_norms.get(client, 0.0) + 1)

    def expected(self, shapes: Shapes) -> Shapes:
        """Return the shapes that an update must have which has these.

        What was sent under the same name has the shape in which it was sent. Of what
        was not, the method says it, or else the first update decides for all.
        """
        if self.shapes and self.update_problem is None:
            return self.shapes
        return {name: self._sent_shapes.get(name, shapes[name]) for name in shapes}

    def take_sent(self, client: str) -> object:
        """Return what a client was sent, where the method wants to see it, and forget.

        There is one answer to it, and it may be large.
        """
        return self._sent.pop(client, None)

    @property
    def num_used(self) -> int:
        """The number of updates that were used."""
        return len(self.losses)

    @property
    def train_loss(self) -> float:
        """Mean train loss, weighted by examples, over those that made a step."""
        known = [(n, loss) for n, loss in self.losses if abs(loss) <= LARGEST_LOSS]
        total = sum(n for n, _ in known)
        return sum(n * loss for n, loss in known) / total if total else math.nan


def usable_updates(
    replies: Iterable[Reply], update_type: type, tally: Tally
) -> Iterator[tuple[str, Update]]:
    """Yield ``(client, update)`` of the replies that can be aggregated.

    A client that failed, or whose update is not finite or not an answer to what it was
    sent, is counted in ``tally`` and passed over.
    """
    for reply in replies:
        sent = tally.take_sent(reply.client)
        problem = reply.failure or _problem(reply, sent, update_type, tally)
        if problem:
            tally.failures[reply.client] = printable(problem)
            continue
        update = _weighed(reply.record, tally.num_train.get(reply.client, 0))
        tally.bytes_up += num_bytes(update)
        tally.losses.append((update.num_examples, update.train_loss))
        yield reply.client, update


def num_bytes(record: object) -> int:
    """Return the size of a record's tensors, which is what travels, in bytes."""
    return sum(tensor.nbytes for tensor in take_apart(record).tensors.values())


def _shapes(record: object) -> Shapes:
    """Return the shape of each of a record's tensors, by its path."""
    tensors = take_apart(record).tensors
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _norm(record: object) -> float:
    """Return the Euclidean norm of all of a record's tensors together."""
    tensors = take_apart(record).tensors.values()
    return math.hypot(*(float(torch.linalg.vector_norm(one)) for one in tensors))


def _problem(reply: Reply, sent: object, update_type: type, tally: Tally) -> str | None:
    """Return what is wrong with an update, or None and its shapes in ``tally``."""
    update = reply.record
    if not isinstance(update, update_type) or not isinstance(update, Update):
        expected = update_type.__name__
        return f"expected a {expected}, found a {type(update).__name__}"
    return (
        _weight_problem(reply.client, update, tally)
        or (tally.update_problem and tally.update_problem(sent, update))
        or _tensor_problem(reply.client, update, tally)
    )


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


def _weighed(update: Any, most: int) -> Any:
    """Return an update that weighs no more than its client said when the run began.

    Data that has grown since counts in the next run; nobody can take over a mean.
    """
    if update.num_examples <= most:
        return update
    return dataclasses.replace(update, num_examples=most)


def _tensor_problem(client: str, update: Update, tally: Tally) -> str | None:
    """Return why tensors cannot be aggregated, or None and their shapes in a tally."""
    for name, tensor in take_apart(update).tensors.items():
        if not is_finite(tensor):
            return f"{name} is not finite: training diverged, lower the learning rate"
    arrived = _shapes(update)
    known = tally.expected(arrived)
    if arrived != known:
        return f"expected tensors of shapes {known}, found {arrived}"
    norm, most = _norm(update), tally.most_norm(client)
    if norm > most:
        return (
            f"the update's norm is {norm:.3g}, more than {most:.3g}, "
            "run.max_update_norm_ratio times that of what was sent: training diverged, "
            "or the client sends nonsense"
        )
    tally.shapes.update(arrived)
    return None

"""What an update must be like to be aggregated."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from knnper.transport.codec import is_finite, take_apart
from server.federation import Reply
from strategies.core.records import Update


@dataclass
class Tally:
    """What a round's replies came to, filled while they stream by.

    Attributes
    ----------
    losses
        (n_m, train loss) of each update that was used.
    failures
        Why, by client, for those that were not.
    shapes
        Shape of each tensor of the first update that was used, by its path.
    bytes_down, bytes_up
        Size of the tensors of all payloads and of all used updates.
    """

    losses: list[tuple[int, float]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0

    @property
    def num_used(self) -> int:
        """The number of updates that were used."""
        return len(self.losses)

    @property
    def train_loss(self) -> float:
        """Mean train loss, weighted by examples, over those that made a step."""
        known = [(n, loss) for n, loss in self.losses if math.isfinite(loss)]
        total = sum(n for n, _ in known)
        return sum(n * loss for n, loss in known) / total if total else math.nan


def usable_updates(
    replies: Iterable[Reply], update_type: type, tally: Tally
) -> Iterator[tuple[str, Update]]:
    """Yield ``(client, update)`` of the replies that can be aggregated.

    A client that failed, or whose update is not finite, is counted in ``tally`` and
    passed over.
    """
    for reply in replies:
        problem = reply.failure or _problem(reply.record, update_type, tally.shapes)
        if problem:
            tally.failures[reply.client] = problem
            continue
        tally.bytes_up += num_bytes(reply.record)
        tally.losses.append((reply.record.num_examples, reply.record.train_loss))
        yield reply.client, reply.record


def num_bytes(record: object) -> int:
    """Return the size of a record's tensors, which is what travels, in bytes."""
    return sum(tensor.nbytes for tensor in take_apart(record).tensors.values())


def _problem(
    update: object, update_type: type, shapes: dict[str, tuple[int, ...]]
) -> str | None:
    """Return what is wrong with ``update``, or None and its shapes in ``shapes``."""
    if not isinstance(update, update_type) or not isinstance(update, Update):
        expected = update_type.__name__
        return f"expected a {expected}, found a {type(update).__name__}"
    if update.num_examples < 1:
        return f"expected at least one training example, found {update.num_examples}"
    tensors = take_apart(update).tensors
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            return f"{name} is not finite: training diverged, lower the learning rate"
    arrived = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes and arrived != shapes:
        return f"expected tensors of shapes {shapes}, found {arrived}"
    shapes.update(arrived)
    return None

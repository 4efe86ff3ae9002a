"""The bookkeeping of a round: losses, failures and bytes."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from knnper.errors import printable
from knnper.server.explosion import LARGEST_LOSS
from knnper.server.screening import DIVERGED, MeasuredUpdate
from knnper.server.selection import gain


@dataclass
class Tally:
    """The outcome of a round's replies.

    Attributes
    ----------
    num_train
        The most that each client may weigh in a mean.
    titles
        See `knnper.server.roster.Roster.titles`.
    losses
        Of each used update: number of examples, and train loss.
    used
        Clients of these updates.
    failures
        By title of the client, why its update was not used.
    bytes_down, bytes_up
        Size of the tensors of all payloads, and of all used updates.
    """

    num_train: Mapping[str, int]
    titles: Mapping[str, str] = field(default_factory=dict)
    losses: list[tuple[int, float]] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0

    def using(self, updates: Iterable[MeasuredUpdate]) -> Iterator[tuple[str, Any]]:
        """Yield ``(client, update)`` of the updates to aggregate, and note them."""
        for measured in updates:
            self.used.append(measured.client)
            self.bytes_up += measured.num_bytes
            update = measured.update
            self.losses.append((update.num_examples, update.train_loss))
            yield measured.client, update

    def fail(self, client: str, reason: str) -> None:
        """Note why a client's update is not used."""
        self.failures[self.titles.get(client, client)] = printable(reason)

    def gains(self) -> dict[str, float]:
        """Return the statistical utility of each client with a used update."""
        used = zip(self.used, self.losses, strict=True)
        return {name: gain(self.num_train[name], loss) for name, (_, loss) in used}

    @property
    def num_diverged(self) -> int:
        """Number of clients that failed because their training diverged."""
        return sum(DIVERGED in reason for reason in self.failures.values())

    @property
    def train_loss(self) -> float:
        """Mean train loss, weighted by examples; NaN if no client made a step."""
        known = [(n, loss) for n, loss in self.losses if abs(loss) <= LARGEST_LOSS]
        total = sum(n for n, _ in known)
        return sum(n * loss for n, loss in known) / total if total else math.nan

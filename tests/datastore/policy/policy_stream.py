"""A store that is nothing but its contents, to follow what a policy decides."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from knnper.datastore.examples import Contents, StreamState, no_contents
from knnper.datastore.policy import Policy, forget
from knnper.seeding import RandomKey


@dataclass
class PolicyStream:
    """Offers examples to ``policy`` and deletes some as a user would."""

    policy: Policy
    capacity: int | None
    num_classes: int = 4
    seed: int = 0
    stored: Contents = field(default_factory=no_contents)

    def __post_init__(self) -> None:
        self.state = StreamState.start(self.num_classes)

    @property
    def ids(self) -> list[int]:
        """The ids of what is stored."""
        ids: list[int] = self.stored.ids.tolist()
        return ids

    def offer(
        self, labels: Sequence[int], arrivals: Sequence[float] | None = None
    ) -> None:
        first = self.state.num_offered + 1
        ids = np.arange(first, first + len(labels), dtype=np.int64)
        times = ids if arrivals is None else np.array(arrivals)
        batch = Contents(ids, np.array(labels, np.int64), times.astype(np.float64))
        decision = self.policy.decide(
            self.stored, batch, self.state, self.capacity, RandomKey(self.seed)
        )
        left = self.stored.without(decision.evicted)
        self.stored = left.followed_by(batch.take(decision.kept))
        self.state = decision.state

    def delete(self, *ids: int) -> None:
        chosen = np.isin(self.stored.ids, ids)
        self.state = forget(self.state, self.stored.labels[chosen])
        self.stored = self.stored.take(~chosen)

    def counts(self) -> list[int]:
        """How many of each label are stored."""
        counts = np.bincount(self.stored.labels, minlength=self.num_classes)
        return [int(count) for count in counts]

"""What can be set for a store."""

from dataclasses import dataclass, field

import numpy as np

from knnper.datastore.examples import StoreSpec
from knnper.datastore.index_kinds import FlatSettings, IndexSettings
from knnper.datastore.policy import POLICIES, PolicyName
from knnper.datastore.schema import row_bytes
from knnper.errors import ConfigError, Problem
from knnper.experiment import NonNegativeInt, PositiveFloat, PositiveInt, Settings

NAME_BYTES = 96
"""Kept for an example's label, time and external id, the last one twice."""

FILLED = 0.85
"""Share of the budget that a compact database takes at most. Examples that are evicted
here and there leave holes; the rest is room for them, before the database is compacted.
"""


@dataclass(frozen=True)
class StoreSettings(Settings):
    """How much a store keeps, and how it is searched.

    Attributes
    ----------
    policy
        What stays when new examples arrive; a name of `knnper.datastore.policy`.
    capacity
        Most examples that are stored; null does not bound them.
    budget_mb
        Most megabytes (10^6 bytes) on disk, from which a capacity follows; null does
        not bound them. Counted are the database and the saved index, not the log of
        writes under way, nor the second set of embeddings while and after the store
        is embedded anew.
    seed
        Root of the policy's random choices.
    index
        The kind of index and its parameters.
    """

    policy: PolicyName = "concatenate"
    capacity: PositiveInt | None = None
    budget_mb: PositiveFloat | None = None
    seed: NonNegativeInt = 0
    index: IndexSettings = field(default_factory=FlatSettings)

    def most_examples(self, spec: StoreSpec, embedding_dim: int) -> int | None:
        """Return how many examples may be stored; None if that is not bounded."""
        if self.budget_mb is None:
            return self.capacity
        example_bytes = self.example_bytes(spec, embedding_dim)
        affordable = int(FILLED * self.budget_mb * 1e6 // example_bytes)
        return affordable if self.capacity is None else min(affordable, self.capacity)

    def example_bytes(self, spec: StoreSpec, embedding_dim: int) -> float:
        """Return the bytes on disk that one example takes."""
        database = row_bytes(4 * embedding_dim) + row_bytes(spec.input_bytes)
        return database + NAME_BYTES + self.index_bytes(embedding_dim)

    def index_bytes(self, embedding_dim: int) -> int:
        """Return the bytes of the saved index that one example takes."""
        return self.index.code_bytes(embedding_dim) + 8


def require_settings(
    settings: StoreSettings, spec: StoreSpec, embedding_dim: int
) -> None:
    """Refuse settings that do not go together."""
    no_ids, no_vectors = np.empty(0, np.int64), np.empty((0, embedding_dim), np.float32)
    settings.index.build(embedding_dim, no_ids, no_vectors)
    most = settings.most_examples(spec, embedding_dim)
    if most is None and POLICIES[settings.policy].needs_capacity:
        message = (
            f"found none with policy = {settings.policy}, which needs one; set "
            "capacity or budget_mb, or policy = concatenate to keep everything"
        )
        raise ConfigError([Problem("capacity", message)], "the store's settings")
    if most == 0:
        needed = settings.example_bytes(spec, embedding_dim) / FILLED / 1e6
        message = (
            f"found {settings.budget_mb}, expected at least {needed:.6f}, which one "
            "example takes"
        )
        raise ConfigError([Problem("budget_mb", message)], "the store's settings")

"""A store's capacity, and its eviction policies: which examples are kept."""

import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.examples import (
    Contents,
    Ids,
    StoreFullError,
    StoreSpec,
    StreamState,
)
from knnper.datastore.index import FlatSettings, IndexSettings
from knnper.datastore.tables import row_bytes
from knnper.errors import ConfigError, Problem
from knnper.own import Door, Kind, local_door
from knnper.seeding import RandomKey
from knnper.settings import (
    NonNegativeInt,
    Own,
    PositiveFloat,
    PositiveInt,
    Settings,
    one_of,
)

# Random bits behind a draw.
NUM_BITS = 128
# Bytes counted for the label, the time and the external id (which is stored twice).
NAME_BYTES = 96
# The largest share of the budget that a compact database takes. Evicted examples leave
# unused pages between others; the rest of the budget has room for them until the
# database is compacted.
FILLED = 0.85

Positions = Sequence[int] | NDArray[np.intp]


@dataclass(frozen=True)
class Decision:
    """The outcome of a batch of m arriving examples."""

    is_kept: NDArray[np.bool_]  # whether the batch leaves each in the store, (m,)
    evicted: Ids  # of examples stored before the batch, ascending
    state: StreamState  # after the batch


class Policy(ABC):
    """Decides which examples are kept. A pure function of its arguments."""

    needs_capacity: ClassVar[bool] = True  # whether it needs a bound of the store

    def decide(
        self,
        stored: Contents,
        arriving: Contents,
        state: StreamState,
        capacity: int | None,
        key: RandomKey,
    ) -> Decision:
        """Decide about the ``arriving`` examples in their order.

        A batch has the same outcome as its examples one by one. Their ids are those
        that they get if stored, each larger than all before. ``state`` is that after
        the batch before; ``capacity`` None does not bound the store. Random choices
        about the t-th example that was ever offered, t from 1, derive from
        ``key.child(t)``.
        """
        if self.needs_capacity and (capacity is None or capacity < 1):
            raise ValueError(
                f"{type(self).__name__} needs a capacity of at least 1 example, found "
                f"{capacity}; give a capacity, or keep everything with the policy "
                "'concatenate'"
            )
        batch = OfferedBatch(
            stored=stored,
            arriving=arriving,
            state=state,
            capacity=sys.maxsize if capacity is None else capacity,
            key=key,
        )
        evicted, was_largest = self._evict(batch)
        stays = np.ones(len(stored) + len(arriving), np.bool_)
        stays[np.asarray(evicted, np.intp)] = False
        arrived = np.bincount(arriving.labels, minlength=len(state.num_seen))
        return Decision(
            is_kept=stays[len(stored) :],
            evicted=stored.ids[~stays[: len(stored)]],
            state=StreamState(
                state.num_offered + len(arriving), state.num_seen + arrived, was_largest
            ),
        )

    @abstractmethod
    def _evict(self, batch: "OfferedBatch") -> tuple[Positions, NDArray[np.bool_]]:
        """Return the evicted positions and the labels that were ever largest.

        Positions count the stored examples first, then the arriving examples.
        """


class OfferedBatch(NamedTuple):
    """The arguments of `Policy.decide`."""

    stored: Contents
    arriving: Contents
    state: StreamState
    capacity: int
    key: RandomKey


def draw_below(bound: int, key: RandomKey) -> int:
    """Return an integer that is uniform in [0, bound), up to 2^-128."""
    return (key.entropy(NUM_BITS // 8) * bound) >> NUM_BITS


def forget(state: StreamState, labels: NDArray[np.int64]) -> StreamState:
    """Return the state after a user deleted stored examples with these labels.

    They no longer count as seen. A label that lost examples counts as never having been
    the largest, so that `class_balanced` lets it grow again.
    """
    deleted = np.bincount(labels, minlength=len(state.num_seen))
    if len(deleted) > len(state.num_seen) or (deleted > state.num_seen).any():
        raise ValueError(
            f"expected to forget at most {state.num_seen.tolist()} examples of each "
            f"label, found {deleted.tolist()}; forget each deleted example once"
        )
    return replace(
        state,
        num_seen=state.num_seen - deleted,
        was_largest=state.was_largest & (deleted == 0),
    )


class Members:
    """The positions of each label, ascending."""

    def __init__(self, labels: NDArray[np.int64], num_classes: int) -> None:
        self._labels = labels
        self._counts = np.bincount(labels, minlength=num_classes)
        self._positions: dict[int, array[int]] = {}

    def count(self, label: int) -> int:
        """Return the number of positions with ``label``."""
        return int(self._counts[label])

    def largest(self) -> list[int]:
        """Return the labels that have the most positions, ascending."""
        return np.flatnonzero(self._counts == self._counts.max()).tolist()

    def append(self, label: int, position: int) -> None:
        """Add a position that is larger than all before."""
        self._of(label).append(position)
        self._counts[label] += 1

    def pop(self, label: int, which: int) -> int:
        """Remove and return the position with index ``which`` among a label's."""
        position = self._of(label).pop(which)
        self._counts[label] -= 1
        return position

    def _of(self, label: int) -> "array[int]":
        """Return a label's positions, found on first use: most batches need few."""
        if label not in self._positions:
            positions = np.flatnonzero(self._labels == label).astype(np.int64)
            self._positions[label] = array("q", positions.tobytes())
        return self._positions[label]


class ClassBalancedPolicy(Policy):
    """Keeps the labels as equal in number as the stream allows.

    In a full store, a label that has the most examples, or ever had, is full. An
    arrival of another label replaces a random example of the largest labels. One of a
    full label c, with m_c stored and n_c seen examples, is kept with probability
    m_c / n_c and then replaces a random example of its label: within a label the sample
    is uniform.

    User deletions: see `forget`.
    """

    def _evict(self, batch: OfferedBatch) -> tuple[Positions, NDArray[np.bool_]]:
        stored, arriving, state, capacity, key = batch
        # The first arrivals fill free places.
        num_filled = min(max(capacity - len(stored), 0), len(arriving))
        labels = np.concatenate([stored.labels, arriving.labels])
        members = Members(labels[: len(stored) + num_filled], len(state.num_seen))
        filled = np.bincount(
            arriving.labels[:num_filled], minlength=len(state.num_seen)
        )
        num_seen = state.num_seen + filled
        was_largest = state.was_largest.copy()
        if len(stored) + num_filled >= capacity:
            was_largest[members.largest()] = True
        evicted = list[int]()
        for arrival in range(num_filled, len(arriving)):
            position = len(stored) + arrival
            label = int(arriving.labels[arrival])
            draws = key.child(state.num_offered + arrival + 1)
            num_seen[label] += 1
            if was_largest[label]:
                drawn = draw_below(int(num_seen[label]), draws)
                loser = label
                if drawn >= members.count(label):
                    evicted.append(position)
                    continue
            else:
                largest = members.largest()
                count = members.count(largest[0])
                which, drawn = divmod(draw_below(count * len(largest), draws), count)
                loser = largest[which]
            evicted.append(members.pop(loser, drawn))
            members.append(label, position)
            if not was_largest[label]:
                was_largest[members.largest()] = True
        return evicted, was_largest


class ConcatenatePolicy(Policy):
    """Keeps everything; a batch that exceeds the capacity is refused as a whole."""

    needs_capacity: ClassVar[bool] = False

    def _evict(self, batch: OfferedBatch) -> tuple[Positions, NDArray[np.bool_]]:
        stored, arriving, state, capacity, _ = batch
        num_after = len(stored) + len(arriving)
        if len(arriving) > 0 and num_after > capacity:
            raise StoreFullError(
                f"the store holds {len(stored)} examples of at most {capacity}, and "
                f"{len(arriving)} arrive: none was added; raise the capacity, delete "
                "examples, or choose a policy that makes room, such as 'fifo'"
            )
        return [], state.was_largest


class FifoPolicy(Policy):
    """Keeps the newest examples, by time of arrival and then by id.

    A full store rejects an example that arrives with an earlier time than all stored
    examples: it is the oldest itself.
    """

    def _evict(self, batch: OfferedBatch) -> tuple[Positions, NDArray[np.bool_]]:
        stored, arriving, state, capacity, _ = batch
        arrivals = np.concatenate([stored.arrivals, arriving.arrivals])
        num_gone = max(len(arrivals) - capacity, 0) if len(arriving) else 0
        # Stable, so equal times stay in the order of ids.
        oldest = np.argsort(arrivals, kind="stable")[:num_gone]
        return oldest, state.was_largest


class FixedPolicy(Policy):
    """Keeps examples up to the capacity and rejects all later examples.

    The next arrival fills a place that a user's deletion freed.
    """

    def _evict(self, batch: OfferedBatch) -> tuple[Positions, NDArray[np.bool_]]:
        stored, arriving, state, capacity, _ = batch
        first_rejected = max(capacity, len(stored))
        rejected = np.arange(first_rejected, len(stored) + len(arriving))
        return rejected, state.was_largest


class ReservoirPolicy(Policy):
    """Keeps a uniform sample, without replacement, of all arrivals.

    With a full store of s examples, the n-th arrival is kept with probability s / n,
    and then takes the place of a stored one, each with probability 1 / s.

    A user's deletion removes the example from the count of arrivals, and the next
    arrival takes the freed place. That is the random pairing of Gemulla, Lehner, Haas,
    "A Dip in the Reservoir", VLDB 2006, where an arrival replaces a deleted example: of
    u deletions not yet paired, v of them of stored examples, it is kept with
    probability v / u. Here v = u, because only stored examples can be deleted. It
    follows that:

    - After a deletion the stored examples are a uniform sample of the arrivals that
      were not deleted: given that x is in a uniform sample, the others are uniform
      among the others.
    - Examples that arrived before the deletion stay equally likely among themselves,
      and so do those that arrive after the freed place was taken; the latter are more
      likely, by (1 - 1/n) / (1 - 1/s) for each deletion.
    - The example that took the place is stored with certainty at first, so it stays up
      to n / s times as likely as the others. A uniform sample would have to leave the
      place empty for ever, because the candidates for it were not stored.
    """

    def _evict(self, batch: OfferedBatch) -> tuple[Positions, NDArray[np.bool_]]:
        stored, arriving, state, capacity, key = batch
        num_free = max(capacity - len(stored), 0)
        # Deleted examples do not count here, but in the key of a draw.
        num_seen = int(state.num_seen.sum())
        num_added = min(num_free, len(arriving))
        # Positions of the examples in the store, ascending.
        held = array("q", np.arange(len(stored) + num_added, dtype=np.int64).tobytes())
        evicted = []
        for arrival in range(num_added, len(arriving)):
            number = state.num_offered + arrival + 1
            drawn = draw_below(num_seen + arrival + 1, key.child(number))
            position = len(stored) + arrival
            # They stay ascending: a batch in two parts makes the same draws.
            if drawn < len(held):
                evicted.append(held.pop(drawn))
                held.append(position)
            else:
                evicted.append(position)
        return evicted, state.was_largest


POLICIES: Mapping[str, Policy] = {
    "fixed": FixedPolicy(),
    "fifo": FifoPolicy(),
    "concatenate": ConcatenatePolicy(),
    "reservoir": ReservoirPolicy(),
    "class_balanced": ClassBalancedPolicy(),
}
PolicyName = Annotated[str, one_of(POLICIES)]
OWN_POLICY = Kind(
    "a subclass of knnper.datastore.policy.Policy that takes no arguments",
    is_right=lambda value: isinstance(value, type) and issubclass(value, Policy),
)
# Users' policies that were loaded, by reference.
_BROUGHT: dict[str, Policy] = {}
# The door through which further policies are loaded; empty until it is set.
_DOORS: list[Door] = []


def bring_policy(reference: str, door: Door) -> Own:
    """Load a user's policy for the stores of this process."""
    policy = door.open(reference, OWN_POLICY)
    _BROUGHT[reference] = policy.entry()
    return policy


def policy_of(name: str) -> Policy:
    """Return a policy by its name, or a user's policy by its reference."""
    if name in POLICIES:
        return POLICIES[name]
    if name not in _BROUGHT:
        bring_policy(name, _DOORS[-1] if _DOORS else local_door())
    return _BROUGHT[name]


def policies_through(door: Door) -> None:
    """Set the door through which stores of this process load users' policies."""
    _DOORS[:] = [door]


@dataclass(frozen=True)
class StoreSettings(Settings):
    """The capacity, eviction policy and index of a store.

    Attributes
    ----------
    policy
        Decides which examples are kept: ``concatenate`` (all), ``fixed``, ``fifo``,
        ``reservoir``, ``class_balanced``, or a class of your own as
        ``module:attribute``.
    capacity
        The largest number of stored examples; null does not bound it.
    budget_mb
        The largest number of megabytes (10^6 bytes) on disk, from which a capacity
        follows; null does not bound it. Counted are the database and the saved index,
        but not the write-ahead log, nor the second set of embeddings during and after a
        re-embedding.
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
        """Return the largest number of stored examples; None without a bound."""
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
    """Reject contradictory settings, and an index that FAISS cannot build."""
    settings.index.build(
        embedding_dim,
        ids=np.empty(0, np.int64),
        vectors=np.empty((0, embedding_dim), np.float32),
    )
    most = settings.most_examples(spec, embedding_dim)
    if most is None and policy_of(settings.policy).needs_capacity:
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

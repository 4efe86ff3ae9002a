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


@dataclass(frozen=True)
class Decision:
    """What becomes of a batch of arriving examples."""

    kept: NDArray[np.bool_]  # of those: in the store after the whole batch, shape (m,)
    evicted: Ids  # that were stored before and no longer are, ascending
    state: StreamState  # to be remembered with it


Gone = Sequence[int] | NDArray[np.intp]


class Policy(ABC):
    """Says which examples stay. A pure function of its arguments."""

    needs_capacity: ClassVar[bool] = True  # whether it decides nothing without one

    def decide(
        self,
        stored: Contents,
        arriving: Contents,
        state: StreamState,
        capacity: int | None,
        key: RandomKey,
    ) -> Decision:
        """Decide about ``arriving``, one after the other.

        A batch has the same outcome as its examples one by one. They come under the ids
        that they would get: each larger than all before it, whether or not it will be
        stored. ``state`` is as the batch before left it; no ``capacity`` does not bound
        what is stored. Random choices about the t-th example that was ever offered, t
        from 1, derive from ``key.child(t)``.
        """
        if self.needs_capacity and (capacity is None or capacity < 1):
            raise ValueError(
                f"{type(self).__name__} needs a capacity of at least 1 example, found "
                f"{capacity}; give one, or keep everything with the policy "
                "'concatenate'"
            )
        most = sys.maxsize if capacity is None else capacity
        gone, was_largest = self._gone(Batch(stored, arriving, state, most, key))
        stays = np.ones(len(stored) + len(arriving), np.bool_)
        stays[np.asarray(gone, np.intp)] = False
        arrived = np.bincount(arriving.labels, minlength=len(state.num_seen))
        return Decision(
            kept=stays[len(stored) :],
            evicted=stored.ids[~stays[: len(stored)]],
            state=StreamState(
                state.num_offered + len(arriving), state.num_seen + arrived, was_largest
            ),
        )

    @abstractmethod
    def _gone(self, batch: "Batch") -> tuple[Gone, NDArray[np.bool_]]:
        """Return positions in stored and arriving that go, and labels once largest."""


class Batch(NamedTuple):
    """What a policy decides about; see `Policy.decide`."""

    stored: Contents
    arriving: Contents
    state: StreamState
    capacity: int
    key: RandomKey


NUM_BITS = 128


def draw_below(bound: int, key: RandomKey) -> int:
    """Return an integer that is uniform in [0, bound), but for 2^-128."""
    return (key.entropy(NUM_BITS // 8) * bound) >> NUM_BITS


def forget(state: StreamState, labels: NDArray[np.int64]) -> StreamState:
    """Return the state after a user deleted stored examples with these labels.

    They no longer count as seen. A label that lost examples is not held to the share
    that it once had: it counts as never having been the largest, so that
    `class_balanced` lets it grow back.
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
    """Positions by label, each label's ascending."""

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
        """Remove and return the position that stands at ``which`` in its label."""
        position = self._of(label).pop(which)
        self._counts[label] -= 1
        return position

    def _of(self, label: int) -> "array[int]":
        """Return a label's positions; most batches touch few labels."""
        if label not in self._positions:
            found = np.flatnonzero(self._labels == label).astype(np.int64)
            self._positions[label] = array("q", found.tobytes())
        return self._positions[label]


class ClassBalancedPolicy(Policy):
    """Keeps the labels as equal in number as the stream allows.

    In a full store, a label that has the most examples, or ever had, is full. An
    arrival of another label replaces a random example of the largest labels. One of a
    full label c, of which m_c are stored and n_c were seen, is kept with probability
    m_c / n_c and then replaces a random one of its own: within a label the sample is
    uniform.

    User deletions: see `forget`.
    """

    def _gone(self, batch: Batch) -> tuple[Gone, NDArray[np.bool_]]:
        stored, arriving, state, capacity, key = batch
        # The first find free places.
        num_taken = min(max(capacity - len(stored), 0), len(arriving))
        labels = np.concatenate([stored.labels, arriving.labels])
        members = Members(labels[: len(stored) + num_taken], len(state.num_seen))
        taken = np.bincount(arriving.labels[:num_taken], minlength=len(state.num_seen))
        num_seen, was_largest = state.num_seen + taken, state.was_largest.copy()
        if len(stored) + num_taken >= capacity:
            was_largest[members.largest()] = True
        gone = list[int]()
        for arrival in range(num_taken, len(arriving)):
            position, label = len(stored) + arrival, int(arriving.labels[arrival])
            draws = key.child(state.num_offered + arrival + 1)
            num_seen[label] += 1
            if was_largest[label]:
                drawn, loser = draw_below(int(num_seen[label]), draws), label
                if drawn >= members.count(label):
                    gone.append(position)
                    continue
            else:
                largest = members.largest()
                count = members.count(largest[0])
                which, drawn = divmod(draw_below(count * len(largest), draws), count)
                loser = largest[which]
            gone.append(members.pop(loser, drawn))
            members.append(label, position)
            if not was_largest[label]:
                was_largest[members.largest()] = True
        return gone, was_largest


class ConcatenatePolicy(Policy):
    """Keeps everything; a batch that exceeds the capacity is refused as a whole."""

    needs_capacity: ClassVar[bool] = False

    def _gone(self, batch: Batch) -> tuple[Gone, NDArray[np.bool_]]:
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

    Where an example arrives late, with a time before that of all stored ones, it is
    the oldest itself: a full store does not take it.
    """

    def _gone(self, batch: Batch) -> tuple[Gone, NDArray[np.bool_]]:
        stored, arriving, state, capacity, _ = batch
        arrivals = np.concatenate([stored.arrivals, arriving.arrivals])
        num_gone = max(len(arrivals) - capacity, 0) if len(arriving) else 0
        # Stable, so equal times stay in the order of ids.
        oldest = np.argsort(arrivals, kind="stable")[:num_gone]
        return oldest, state.was_largest


class FixedPolicy(Policy):
    """Keeps examples up to the capacity and refuses all later ones.

    A place that a user's deletion frees goes to the next arrival.
    """

    def _gone(self, batch: Batch) -> tuple[Gone, NDArray[np.bool_]]:
        stored, arriving, state, capacity, _ = batch
        first_refused = max(capacity, len(stored))
        refused = np.arange(first_refused, len(stored) + len(arriving))
        return refused, state.was_largest


class ReservoirPolicy(Policy):
    """Keeps a uniform sample, without replacement, of all that came by.

    With a full store of s examples, the n-th arrival is kept with probability s / n,
    and then takes the place of a stored one, each with probability 1 / s.

    A user's deletion takes the example out of what was seen, and the next arrival takes
    the freed place. That is the random pairing of Gemulla, Lehner, Haas, "A Dip in the
    Reservoir", VLDB 2006, where an arrival takes over the fate of a deleted example: of
    u deletions not yet paired, v of them of stored examples, it is kept with
    probability v / u. Here v = u, because a store is never told of the deletion of an
    example that it does not hold. So:

    - What is left after a deletion is a uniform sample of what was seen and not
      deleted: given that x is in a uniform sample, the rest is uniform among the rest.
    - Those seen before the deletion stay equally likely among themselves, and so do
      those that come after the freed place was taken; the latter are more likely, by
      (1 - 1/n) / (1 - 1/s) for each deletion.
    - The one that took the place is there with certainty at first, so it stays up to
      n / s times as likely as the others. To be uniform all the same, a sample would
      have to leave the place empty for ever: what could fill it has been forgotten.
    """

    def _gone(self, batch: Batch) -> tuple[Gone, NDArray[np.bool_]]:
        stored, arriving, state, capacity, key = batch
        num_free = max(capacity - len(stored), 0)
        num_seen = int(state.num_seen.sum())
        first = min(num_free, len(arriving))
        places = array("q", np.arange(len(stored) + first, dtype=np.int64).tobytes())
        gone = []
        for arrival in range(first, len(arriving)):
            number = state.num_offered + arrival + 1
            drawn = draw_below(num_seen + arrival + 1, key.child(number))
            position = len(stored) + arrival
            # Places stay ascending, so a batch draws from the order its parts would.
            if drawn < len(places):
                gone.append(places.pop(drawn))
                places.append(position)
            else:
                gone.append(position)
        return gone, state.was_largest


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
    is_right=lambda one: isinstance(one, type) and issubclass(one, Policy),
)
_BROUGHT: dict[str, Policy] = {}  # users', by reference
_DOORS: list[Door] = []


def bring_policy(reference: str, door: Door) -> Own:
    """Let stores of this process use a user's policy; return it."""
    own = door.open(reference, OWN_POLICY)
    _BROUGHT[reference] = own.entry()
    return own


def policy_of(name: str) -> Policy:
    """Return a policy by its name, or a user's by its reference."""
    if name in POLICIES:
        return POLICIES[name]
    if name not in _BROUGHT:
        bring_policy(name, _DOORS[-1] if _DOORS else local_door())
    return _BROUGHT[name]


def policies_through(door: Door) -> None:
    """Let stores that this process opens from now on bring policies through a door."""
    _DOORS[:] = [door]


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
        What stays when new examples arrive: ``concatenate`` (all), ``fixed``, ``fifo``,
        ``reservoir``, ``class_balanced``, or a class of your own as
        ``module:attribute``.
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

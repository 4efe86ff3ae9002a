"""What a policy is: it says which examples stay when new ones arrive."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from datastore.contents import Contents, Ids
from knnper.config.seeding import RandomKey


@dataclass(frozen=True)
class StreamState:
    """What a policy remembers of the examples that came by.

    Attributes
    ----------
    num_offered
        Examples that ever arrived, stored or not. It only grows: the random choices
        about an example derive from its number.
    num_seen
        Of each label, the examples that arrived and were not deleted since, int64 of
        shape (c,). What a policy evicted stays counted; what a user deleted does not.
    was_largest
        Labels that had the most examples in a full store since they last lost one to a
        deletion, bool of shape (c,).
    """

    num_offered: int
    num_seen: NDArray[np.int64]
    was_largest: NDArray[np.bool_]

    @classmethod
    def start(cls, num_classes: int) -> "StreamState":
        """Return the state before the first example."""
        return cls(0, np.zeros(num_classes, np.int64), np.zeros(num_classes, np.bool_))


@dataclass(frozen=True)
class Decision:
    """What becomes of a batch of arriving examples.

    Attributes
    ----------
    kept
        The arriving examples that are in the store after the whole batch, bool of
        shape (m,).
    evicted
        Ids that were stored before and no longer are, ascending, int64.
    state
        To be remembered with it.
    """

    kept: NDArray[np.bool_]
    evicted: Ids
    state: StreamState


class Policy(Protocol):
    """Says which examples stay. A pure function of its arguments."""

    def decide(
        self,
        stored: Contents,
        arriving: Contents,
        state: StreamState,
        capacity: int | None,
        key: RandomKey,
    ) -> Decision:
        """Decide about ``arriving``, one after the other.

        A batch has the same outcome as its examples one by one.

        Parameters
        ----------
        stored
            What the store holds.
        arriving
            What is to be added, under the ids it would get: each larger than all
            before it, whether or not it will be stored.
        state
            As it was left by the batch before.
        capacity
            Most examples that may be stored; None does not bound them.
        key
            Root of the random choices; those about the t-th example that was ever
            offered, t from 1, derive from ``key.child(t)``.

        Raises
        ------
        StoreFullError
            If the policy neither evicts nor refuses and the batch does not fit.
        """

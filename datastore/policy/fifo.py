"""First in, first out: the newest stay.

knn-per.txt, Section 6 and Appendix B: at time step t the n(t) oldest examples are
replaced by the newly obtained ones.
"""

from typing import ClassVar

import numpy as np

from datastore.contents import Contents
from datastore.policy.base import Decision, StreamState
from datastore.policy.outcome import all_but, required_capacity
from knnper.config.seeding import RandomKey


class FifoPolicy:
    """Keeps the newest examples, by time of arrival and then by id.

    Where an example arrives late, with a time before that of all stored ones, it is
    the oldest itself: a full store does not take it.
    """

    needs_capacity: ClassVar[bool] = True

    def decide(
        self,
        stored: Contents,
        arriving: Contents,
        state: StreamState,
        capacity: int | None,
        key: RandomKey,  # noqa: ARG002 - nothing is left to chance
    ) -> Decision:
        """Decide as `datastore.policy.base.Policy` says.

        Raises
        ------
        ValueError
            If there is no capacity.
        """
        capacity = required_capacity("fifo", capacity)
        arrivals = np.concatenate([stored.arrivals, arriving.arrivals])
        num_gone = max(len(arrivals) - capacity, 0) if len(arriving) else 0
        # Stable, so equal times stay in the order of ids.
        oldest = np.argsort(arrivals, kind="stable")[:num_gone]
        return all_but(oldest, stored, arriving, state)

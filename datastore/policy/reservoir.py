"""Reservoir sampling: every example that came by is equally likely to be stored.

Vitter, "Random Sampling with a Reservoir", ACM TOMS 11(1), 1985, Algorithm R.
"""

from array import array
from typing import ClassVar

import numpy as np

from datastore.contents import Contents
from datastore.policy.base import Decision, StreamState
from datastore.policy.chance import draw_below
from datastore.policy.outcome import all_but, required_capacity
from knnper.config.seeding import RandomKey


class ReservoirPolicy:
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

    needs_capacity: ClassVar[bool] = True

    def decide(
        self,
        stored: Contents,
        arriving: Contents,
        state: StreamState,
        capacity: int | None,
        key: RandomKey,
    ) -> Decision:
        """Decide as `datastore.policy.base.Policy` says.

        Raises
        ------
        ValueError
            If there is no capacity.
        """
        num_free = max(required_capacity("reservoir", capacity) - len(stored), 0)
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
        return all_but(gone, stored, arriving, state)

"""Fixed: who comes first, stays.

knn-per.txt, Section 6 and Appendix B, "fixed datastore": the store that was built at
the start is not updated.
"""

from typing import ClassVar

import numpy as np

from datastore.contents import Contents
from datastore.policy.base import Decision, StreamState
from datastore.policy.outcome import all_but, required_capacity
from knnper.config.seeding import RandomKey


class FixedPolicy:
    """Keeps examples up to the capacity and refuses all later ones.

    A place that a user's deletion frees goes to the next arrival.
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
        first_refused = max(required_capacity("fixed", capacity), len(stored))
        refused = np.arange(first_refused, len(stored) + len(arriving))
        return all_but(refused, stored, arriving, state)

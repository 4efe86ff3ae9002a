"""Concatenate: everything stays.

knn-per.txt, Section 6 and Appendix B: new examples are simply added.
"""

from typing import ClassVar

from datastore.contents import Contents
from datastore.errors import StoreFullError
from datastore.policy.base import Decision, StreamState
from datastore.policy.outcome import all_but
from knnper.config.seeding import RandomKey


class ConcatenatePolicy:
    """Keeps everything; a batch that exceeds the capacity is refused as a whole."""

    needs_capacity: ClassVar[bool] = False

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
        StoreFullError
            If the batch does not fit; none of it is taken.
        """
        num_after = len(stored) + len(arriving)
        if capacity is not None and len(arriving) > 0 and num_after > capacity:
            raise StoreFullError(
                f"the store holds {len(stored)} examples of at most {capacity}, and "
                f"{len(arriving)} arrive: none was added; raise the capacity, delete "
                "examples, or choose a policy that makes room, such as 'fifo'"
            )
        return all_but([], stored, arriving, state)

"""What a user's deletions do to the memory of the stream."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from datastore.policy.base import StreamState


def forget(state: StreamState, labels: NDArray[np.int64]) -> StreamState:
    """Return the state after a user deleted stored examples with these labels.

    They no longer count as seen. A label that lost examples is not held to the share
    that it once had: it counts as never having been the largest, so that
    `class_balanced` lets it grow back.

    Parameters
    ----------
    labels
        Of the deleted examples, int64 of shape (d,).

    Raises
    ------
    ValueError
        If more examples of a label are deleted than were seen.
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

"""How positions that do not stay, and what came by, become a decision."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from datastore.contents import Contents
from datastore.policy.base import Decision, StreamState


def all_but(
    gone: Sequence[int] | NDArray[np.intp],
    stored: Contents,
    arriving: Contents,
    state: StreamState,
) -> Decision:
    """Return the decision that everything stays but ``gone``.

    Parameters
    ----------
    gone
        Positions among the n stored and then the m arriving examples, in [0, n + m).
    stored, arriving, state
        As of `Policy.decide`.
    """
    stays = np.ones(len(stored) + len(arriving), np.bool_)
    stays[np.asarray(gone, np.intp)] = False
    return Decision(
        kept=stays[len(stored) :],
        evicted=stored.ids[~stays[: len(stored)]],
        state=_counted(state, arriving.labels),
    )


def required_capacity(policy: str, capacity: int | None) -> int:
    """Return ``capacity``.

    Raises
    ------
    ValueError
        If it is None or less than 1.
    """
    if capacity is None or capacity < 1:
        raise ValueError(
            f"the policy {policy!r} needs a capacity of at least 1 example, found "
            f"{capacity}; give one, or keep everything with the policy 'concatenate'"
        )
    return capacity


def _counted(state: StreamState, labels: NDArray[np.int64]) -> StreamState:
    arrived = np.bincount(labels, minlength=len(state.num_seen))
    return replace(
        state,
        num_offered=state.num_offered + len(labels),
        num_seen=state.num_seen + arrived,
    )

"""Who gets which sample: one owner per sample, so none is lost or given twice."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Integers: TypeAlias = NDArray[np.int64]
ClassWeights: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Assignment:
    """The samples of each client.

    Attributes
    ----------
    train, test
        For each of the M clients, sorted int64 indices into that split.
    seen
        Which clients are there during training, where that follows from the split;
        None where ``unseen_fraction`` of them are drawn.
    class_weights
        For each client P_m(y), what an example of each label counts when the client is
        tested, shape (c,); None where all count the same.
    """

    train: tuple[Integers, ...]
    test: tuple[Integers, ...]
    seen: tuple[bool, ...] | None = None
    class_weights: tuple[ClassWeights, ...] | None = None


def assignment_of(
    train_owner: Integers, test_owner: Integers, num_clients: int
) -> Assignment:
    """Return the samples of each client.

    Parameters
    ----------
    train_owner, test_owner
        The client, 0 ... M-1, of each sample; shapes (n_train,) and (n_test,).
    num_clients
        M.
    """
    return Assignment(
        _samples_by_owner(train_owner, num_clients),
        _samples_by_owner(test_owner, num_clients),
    )


def _samples_by_owner(owner: Integers, num_clients: int) -> tuple[Integers, ...]:
    by_owner = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=num_clients))
    return tuple(np.split(by_owner, ends[:-1]))

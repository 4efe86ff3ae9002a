"""Samples that the server keeps: dealt to no client."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from knnper.config.errors import DataError
from knnper.config.seeding import RandomKey
from knnper.data.dataset import Dataset, LabelledArrays
from simulation.partition.assignment import Assignment, Integers


def keep_back(
    num_samples: int, fraction: float, key: RandomKey
) -> tuple[Integers, Integers]:
    """Return the sorted positions that the server keeps, and those to be dealt.

    Parameters
    ----------
    num_samples
        n, of the training split.
    fraction
        Part that is kept, [0, 1); the nearest whole number.
    key
        Fixes which.

    Raises
    ------
    DataError
        If nothing would be left to deal.
    """
    count = int(fraction * num_samples + 0.5)
    if 0 < num_samples == count:
        raise DataError(
            f"partition.proxy_fraction {fraction} of {num_samples} training samples "
            "leaves none for the clients; lower it"
        )
    shuffled = key.numpy().permutation(num_samples)
    return np.sort(shuffled[:count]), np.sort(shuffled[count:])


def deal_part(
    dataset: Dataset, dealt: Integers, split: Callable[[Dataset], Assignment]
) -> Assignment:
    """Return how ``split`` deals a part of the training split.

    Parameters
    ----------
    dataset
        All of the data.
    dealt
        Sorted positions of its training samples that are dealt, int64.
    split
        Deals all that it is given.

    Returns
    -------
    Assignment
        Positions in the whole data set.
    """
    if len(dealt) == len(dataset.train):
        return split(dataset)
    assignment = split(replace(dataset, train=_labels_at(dataset.train, dealt)))
    train = tuple(dealt[positions] for positions in assignment.train)
    return Assignment(train, assignment.test)


def _labels_at(arrays: LabelledArrays, positions: Integers) -> LabelledArrays:
    """Return what a split looks at: no images, which are too many to copy."""
    ids = arrays.client_ids
    return LabelledArrays(
        arrays.images[:0],
        arrays.labels[positions],
        None if ids is None else ids[positions],
    )

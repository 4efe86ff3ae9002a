"""Samples that no client gets: what the server keeps, and what is not used at all."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from knnper.config.errors import DataError
from knnper.config.seeding import RandomKey
from knnper.data.dataset import Dataset, LabelledArrays
from simulation.partition.assignment import Assignment, Integers


def used(num_samples: int, fraction: float, key: RandomKey) -> Integers:
    """Return the sorted positions of the part of a split that is used at all.

    Parameters
    ----------
    num_samples
        n, of the split.
    fraction
        Part that is used, (0, 1]; the nearest whole number, and one at least.
    key
        Fixes which.
    """
    if fraction == 1:
        return np.arange(num_samples)
    count = min(num_samples, max(1, int(fraction * num_samples + 0.5)))
    return np.sort(key.numpy().permutation(num_samples)[:count])


def keep_back(
    samples: Integers, fraction: float, key: RandomKey
) -> tuple[Integers, Integers]:
    """Return the sorted samples that the server keeps, and those to be dealt.

    Parameters
    ----------
    samples
        Positions in the training split, n of them.
    fraction
        Part that is kept, [0, 1); the nearest whole number.
    key
        Fixes which.

    Raises
    ------
    DataError
        If nothing would be kept of what is to be, or left to deal.
    """
    num_samples = len(samples)
    count = int(fraction * num_samples + 0.5)
    if fraction > 0 and count == 0:
        raise DataError(
            f"partition.proxy_fraction {fraction} of {num_samples} training samples is "
            "none, expected at least one for the server; raise it to "
            f"{1 / max(num_samples, 1):g}, or leave it out to keep none"
        )
    if 0 < num_samples == count:
        raise DataError(
            f"partition.proxy_fraction {fraction} of {num_samples} training samples "
            "leaves none for the clients; lower it"
        )
    shuffled = samples[key.numpy().permutation(num_samples)]
    return np.sort(shuffled[:count]), np.sort(shuffled[count:])


def deal_part(
    dataset: Dataset,
    train: Integers,
    test: Integers,
    split: Callable[[Dataset], Assignment],
) -> Assignment:
    """Return how ``split`` deals a part of a data set.

    Parameters
    ----------
    dataset
        All of the data.
    train, test
        Sorted positions of the samples of its splits that are dealt, int64.
    split
        Deals all that it is given.

    Returns
    -------
    Assignment
        Positions in the whole data set.
    """
    if len(train) == len(dataset.train) and len(test) == len(dataset.test):
        return split(dataset)
    part = replace(
        dataset,
        train=_labels_at(dataset.train, train),
        test=_labels_at(dataset.test, test),
    )
    assignment = split(part)
    return replace(
        assignment,
        train=tuple(train[positions] for positions in assignment.train),
        test=tuple(test[positions] for positions in assignment.test),
    )


def _labels_at(arrays: LabelledArrays, positions: Integers) -> LabelledArrays:
    """Return what a split looks at: no images, which are too many to copy."""
    clients, domains = arrays.client_ids, arrays.domain_ids
    return LabelledArrays(
        arrays.images[:0],
        arrays.labels[positions],
        None if clients is None else clients[positions],
        None if domains is None else domains[positions],
    )

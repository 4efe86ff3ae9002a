"""Arithmetic of dealing: shares to whole numbers, whole numbers to samples."""

import numpy as np
from numpy.typing import NDArray

from knnper.config.seeding import RandomKey
from simulation.partition.assignment import Integers

# Remainders closer than this differ by rounding errors only, and count as equal.
_REMAINDER_DECIMALS = 9


def apportion(
    weights: NDArray[np.float64], totals: Integers, generator: np.random.Generator
) -> Integers:
    """Split each total into whole numbers proportional to a row of weights.

    Largest remainder rounding; equal remainders are ordered at random. An entry of
    weight 0 gets nothing, except in a row of zeros, which counts as equal weights.

    Parameters
    ----------
    weights
        Non-negative, finite, shape (rows, M).
    totals
        Shape (rows,).

    Returns
    -------
    Shape (rows, M); row r sums to ``totals[r]``.
    """
    weights = np.where(weights.any(axis=1, keepdims=True), weights, 1.0)
    shares = weights / weights.sum(axis=1, keepdims=True) * totals[:, None]
    counts: Integers = np.floor(shares).astype(np.int64)
    remainders = np.round(shares - counts, _REMAINDER_DECIMALS)
    # No entry without weight may be rounded up.
    remainders[weights == 0] = -1.0
    order = np.lexsort((generator.random(shares.shape), -remainders), axis=1)
    ranks = np.argsort(order, axis=1)
    missing = totals - counts.sum(axis=1)
    counts[ranks < missing[:, None]] += 1
    return counts


def deal(labels: Integers, counts: Integers, key: RandomKey) -> Integers:
    """Give each client random samples: ``counts[y, m]`` of label y to client m.

    Parameters
    ----------
    labels
        Shape (n,).
    counts
        Shape (num_labels, M); row y sums to the number of samples with label y.

    Returns
    -------
    The client of each sample, shape (n,).
    """
    num_labels, num_clients = counts.shape
    owner = np.empty(len(labels), dtype=np.int64)
    samples_of = _samples_by_label(labels, num_labels)
    for label, samples in enumerate(samples_of):
        shuffled = key.child(label).numpy().permutation(samples)
        owner[shuffled] = np.repeat(np.arange(num_clients), counts[label])
    return owner


def deal_test_like_train(
    train_counts: Integers,
    test_labels: Integers,
    key: RandomKey,
    weights: NDArray[np.float64] | None = None,
) -> Integers:
    """Deal the test samples so that no client is tested on a label it cannot know.

    Parameters
    ----------
    train_counts
        Training samples of each label at each client, shape (num_labels, M).
    test_labels
        Shape (n,).
    weights
        What each label's test samples are dealt in proportion to, shape
        (num_labels, M); by default ``train_counts``. A client without training
        samples of a label gets none, unless no client has any: then all get some.

    Returns
    -------
    The client of each test sample, shape (n,).
    """
    proportions = train_counts.astype(np.float64) if weights is None else weights
    held = np.where(train_counts > 0, proportions, 0.0)
    # The weights of all holders may be too small for a number.
    usable = np.where(held.any(axis=1, keepdims=True), held, train_counts > 0)
    totals = np.bincount(test_labels, minlength=len(train_counts))
    counts = apportion(usable, totals, key.child("round").numpy())
    return deal(test_labels, counts, key.child("deal"))


def count_labels(labels: Integers, owner: Integers, shape: tuple[int, int]) -> Integers:
    """Count each client's samples of each label; ``shape`` is (num_labels, M)."""
    cells = np.ravel_multi_index((labels, owner), shape)
    return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)


def num_labels_of(train_labels: Integers, test_labels: Integers) -> int:
    """Return the smallest number of labels, one at least, that covers both splits."""
    return int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1


def _samples_by_label(labels: Integers, num_labels: int) -> list[Integers]:
    by_label = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels, minlength=num_labels))
    return np.split(by_label, ends[:-1])

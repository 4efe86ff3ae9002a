"""Who gets which sample: one owner per sample, so none is lost or given twice."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from knnper.experiment import PositiveFraction, PositiveInt, ProperFraction, Settings
from knnper.seeding import RandomKey

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
        _samples_by(train_owner, num_clients), _samples_by(test_owner, num_clients)
    )


def _samples_by(values: Integers, num_values: int) -> tuple[Integers, ...]:
    """Return the positions of each value 0, 1, ..., ascending."""
    ordered = np.argsort(values, kind="stable")
    ends = np.cumsum(np.bincount(values, minlength=num_values))
    return tuple(np.split(ordered, ends[:-1]))


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


def allocate(labels: Integers, counts: Integers, key: RandomKey) -> Integers:
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
    samples_of = _samples_by(labels, num_labels)
    for label, samples in enumerate(samples_of):
        shuffled = key.child(label).numpy().permutation(samples)
        owner[shuffled] = np.repeat(np.arange(num_clients), counts[label])
    return owner


def allocate_test_like_train(
    train_counts: Integers,
    test_labels: Integers,
    key: RandomKey,
    weights: NDArray[np.float64] | None = None,
) -> Integers:
    """Split the test samples so that no client is tested on a label it cannot know.

    Parameters
    ----------
    train_counts
        Training samples of each label at each client, shape (num_labels, M).
    test_labels
        Shape (n,).
    weights
        What each label's test samples are split in proportion to, shape
        (num_labels, M); by default ``train_counts``. A client without training
        samples of a label gets none, unless no client has any: then all get some.

    Returns
    -------
    The client of each test sample, shape (n,).
    """
    proportions = train_counts.astype(np.float64) if weights is None else weights
    held = np.where(train_counts > 0, proportions, 0.0)
    # The weights of all who have the label may be too small for a number.
    usable = np.where(held.any(axis=1, keepdims=True), held, train_counts > 0)
    totals = np.bincount(test_labels, minlength=len(train_counts))
    counts = apportion(usable, totals, key.child("round").numpy())
    return allocate(test_labels, counts, key.child("deal"))


def count_labels(labels: Integers, owner: Integers, shape: tuple[int, int]) -> Integers:
    """Count each client's samples of each label; ``shape`` is (num_labels, M)."""
    cells = np.ravel_multi_index((labels, owner), shape)
    return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)


def num_labels_of(train_labels: Integers, test_labels: Integers) -> int:
    """Return the smallest number of labels, one at least, that covers both splits."""
    return int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1


@dataclass(frozen=True, kw_only=True)
class PartitionSettings(Settings):
    """Settings of every partition.

    Attributes
    ----------
    unseen_fraction
        Fraction of the clients that arrive only after training, [0, 1); 0.2 in the
        paper's experiment on unseen clients (Marfoq et al. 2022, section 6).
    validation_fraction
        Fraction of each client's training data held out for its own choices, [0, 1);
        0.2 in the paper (section 5). Drawn at random, but of text the last part.
    used_fraction
        Part of both splits of the data set that is used at all, (0, 1], drawn by the
        seed; the rest is nobody's. For small trials with large data.
    evaluate_on
        What takes the place of each client's test split: ``test`` is that split.
        ``validation`` is what it holds out for its own choices; the same part of the
        rest is then held out in its place. So hyper-parameters that are the same for
        all clients are compared without reading a test split.
    proxy_fraction
        Part of the training split that the server keeps and no client has, [0, 1);
        drawn at random before the rest is split. ``dapper`` samples from it.
    unseen_train_fraction
        Part of its training data, and of what it holds out of it, that a client has
        which arrives only after training, (0, 1]; the rest is nobody's. Smaller parts
        lie in larger ones, and nothing else changes with it. 0.5 and 1 are the small
        and the moderate sizes of Chen et al. 2023, appendix B.1.
    """

    unseen_fraction: ProperFraction = 0.0
    validation_fraction: ProperFraction = 0.2
    used_fraction: PositiveFraction = 1.0
    evaluate_on: Literal["test", "validation"] = "test"
    proxy_fraction: ProperFraction = 0.0
    unseen_train_fraction: PositiveFraction = 1.0


@dataclass(frozen=True, kw_only=True)
class CountedSettings(PartitionSettings):
    """Settings of a partition that takes the number of clients.

    Attributes
    ----------
    num_clients
        M; 200 in the paper's CIFAR experiments (table 1).
    """

    num_clients: PositiveInt

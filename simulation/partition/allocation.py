"""The samples of each client, and how labels are allocated to clients."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from knnper.seeding import RandomKey

Integers: TypeAlias = NDArray[np.int64]
ClassWeights: TypeAlias = NDArray[np.float64]

# Remainders that are equal to this many decimals differ by rounding errors only.
_DECIMALS = 9


@dataclass(frozen=True, eq=False)
class Shares(Sequence[Integers]):
    """The samples of each client, in one array for all of them."""

    samples: Integers  # of client 0, then of client 1, ...
    ends: Integers  # the end of each client's samples, shape (M,)

    @classmethod
    def of(cls, parts: Sequence[Integers]) -> "Shares":
        """Concatenate the clients' arrays."""
        if isinstance(parts, Shares):
            return parts
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        nothing = np.empty(0, dtype=np.int64)
        return cls(np.concatenate([nothing, *parts]).astype(np.int64), ends)

    @property
    def sizes(self) -> Integers:
        """The number of samples of each client, shape (M,)."""
        return np.diff(self.ends, prepend=0)

    def within(self, samples: Integers) -> "Shares":
        """Map samples, which are positions in ``samples``, to these samples."""
        return Shares(samples[self.samples], self.ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, client: int) -> Integers: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[Integers]: ...
    def __getitem__(self, client: int | slice) -> Integers | Sequence[Integers]:
        if isinstance(client, slice):
            return [self[number] for number in range(len(self))[client]]
        number = range(len(self))[client]
        start = self.ends[number - 1] if number else 0
        return self.samples[start : self.ends[number]]


@dataclass(frozen=True, eq=False)
class Assignment:
    """The samples of each client: sorted int64 indices into both splits.

    Attributes
    ----------
    seen
        Whether each client may take part in training; None to draw the unseen clients
        by ``unseen_fraction``.
    class_weights
        P_m(y), the weight of a test example of each label for client m, shape (c,);
        None for equal weights.
    names
        The clients' names in the data; empty if it has none.
    """

    train: Sequence[Integers]
    test: Sequence[Integers]
    seen: tuple[bool, ...] | None = None
    class_weights: tuple[ClassWeights, ...] | None = None
    names: tuple[str, ...] = ()


def assignment_of(
    train_owner: Integers, test_owner: Integers, num_clients: int
) -> Assignment:
    """Return the samples of each client from the owner, 0 ... M-1, of each sample."""
    return Assignment(
        _samples_by(train_owner, num_clients), _samples_by(test_owner, num_clients)
    )


def _samples_by(values: Integers, num_values: int) -> Shares:
    """Return the positions of each value 0, 1, ..., ascending."""
    ordered = np.argsort(values, kind="stable")
    return Shares(ordered, np.cumsum(np.bincount(values, minlength=num_values)))


def apportion(
    weights: NDArray[np.float64], totals: Integers, generator: np.random.Generator
) -> Integers:
    """Split each total into whole numbers proportional to a row of weights.

    Largest remainder rounding; equal remainders are ordered at random. An entry of
    weight 0 gets nothing, except in a row of zeros, which counts as equal weights.
    ``weights``, not negative, and the result have shape (rows, M), ``totals`` (rows,).
    """
    rows = zip(weights, totals.tolist(), strict=True)
    return np.array([_apportioned(row, total, generator) for row, total in rows])


def _apportioned(
    weights: NDArray[np.float64], total: int, generator: np.random.Generator
) -> Integers:
    """Split one total, see `apportion`; a row needs no memory but its own."""
    weights = weights if weights.any() else np.ones_like(weights)
    shares = weights / weights.sum() * total
    counts: Integers = np.floor(shares).astype(np.int64)
    # No entry without weight may be rounded up.
    lacking = np.where(weights == 0, 1.0, -np.round(shares - counts, _DECIMALS))
    lots = generator.random(len(shares))
    missing = int(total - counts.sum())
    if missing > 0:
        last = np.partition(lacking, missing - 1)[missing - 1]
        ties = np.flatnonzero(lacking == last)
        counts[lacking < last] += 1
        num_left = missing - np.count_nonzero(lacking < last)
        counts[ties[np.argsort(lots[ties], kind="stable")[:num_left]]] += 1
    return counts


def allocate(labels: Integers, counts: Iterable[Integers], key: RandomKey) -> Integers:
    """Give each client random samples: ``counts[y][m]`` of label y to client m.

    Row y of ``counts`` sums to the number of samples with label y. Returns the client
    of each sample, shape (n,).
    """
    owner = np.full(len(labels), -1)
    samples_of = _samples_by(labels, int(labels.max(initial=-1)) + 1)
    for label, of_label in enumerate(counts):
        if label < len(samples_of):
            samples = samples_of[label]
            shuffled = key.child(label).numpy().permutation(samples)
            owner[shuffled] = np.repeat(np.arange(len(of_label)), of_label)
    if (owner < 0).any():
        raise ValueError("expected a row of counts for each label that samples have")
    return owner


def allocate_test_like_train(
    train_counts: Iterable[Integers],
    test_labels: Integers,
    key: RandomKey,
    weights: NDArray[np.float64] | None = None,
) -> Integers:
    """Split the test samples so that no client is tested on a label it cannot know.

    Each label's are split in proportion to ``weights``, by default ``train_counts``,
    both of shape (num_labels, M). A client without training samples of a label gets
    none, unless no client has any: then all get some. Returns the client of each.
    """
    generator = key.child("round").numpy()

    def counts() -> Iterator[Integers]:
        for label, trained in enumerate(train_counts):
            proportions = trained if weights is None else weights[label]
            held = np.where(trained > 0, proportions, 0.0)
            # The weights of all clients with the label may underflow to 0.
            usable = held if held.any() else (trained > 0).astype(np.float64)
            total = int(np.count_nonzero(test_labels == label))
            yield _apportioned(usable, total, generator)

    return allocate(test_labels, counts(), key.child("deal"))


def assign_counts(
    train_labels: Integers,
    test_labels: Integers,
    counts: Integers,
    key: RandomKey,
    weights: NDArray[np.float64] | None = None,
) -> Assignment:
    """Give client m ``counts[y, m]`` random training samples of each label y.

    Each label's test samples follow its training samples, see
    `allocate_test_like_train`. ``counts`` has shape (num_labels, M).
    """
    train_owner = allocate(train_labels, counts, key.child("train"))
    test_owner = allocate_test_like_train(
        counts, test_labels, key.child("test"), weights
    )
    return assignment_of(train_owner, test_owner, counts.shape[1])


def count_labels(
    labels: Integers, owner: Integers, shape: tuple[int, int]
) -> Iterator[Integers]:
    """Yield for each label the clients' counts, (M,); ``shape`` is (num_labels, M)."""
    for samples in _samples_by(labels, shape[0]):
        yield np.bincount(owner[samples], minlength=shape[1])


def num_labels_of(train_labels: Integers, test_labels: Integers) -> int:
    """Return the smallest number of labels, one at least, that covers both splits."""
    return int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1

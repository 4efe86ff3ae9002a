"""PFLlib's leaderboard: its data, split and network.

Zhang et al., "PFLlib: A Beginner-Friendly and Comprehensive Personalized Federated
Learning Library and Benchmark", JMLR 2025, and its code. Training and test images are
one pool, scaled to [-1, 1]. The pool is partitioned over the clients by label; each
client's part is split at random into three quarters of training and a quarter of test
data.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import nn

from knnper import DataError, Dataset, LabelledArrays
from knnper.data.torchvision_sets import Cifar100Settings
from knnper.simulation.partition.dirichlet import draw_log_dirichlet, normalise
from papers.data import Cifar100Sheets

Places = list[NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class PooledCifar100(Cifar100Settings):
    """CIFAR-100 as one pool, from the official files."""

    def load(self) -> Dataset:
        """Load the pool, scaled to [-1, 1]."""
        return pooled(super().load())


@dataclass(frozen=True, kw_only=True)
class PooledCifar100Sheets(Cifar100Sheets):
    """CIFAR-100 as one pool, from sheets."""

    def load(self) -> Dataset:
        """Load the pool, scaled to [-1, 1]."""
        return pooled(super().load())


def pooled(dataset: Dataset) -> Dataset:
    """Return data in [-1, 1]; training and test split are both the whole pool.

    `pooled_dirichlet` divides the pool.
    """
    splits = dataset.train, dataset.test
    pool = LabelledArrays(
        np.concatenate([split.images for split in splits]),
        np.concatenate([split.labels for split in splits]),
    )
    # (x - 0.5) / 0.5 takes [0, 1] to [-1, 1].
    half = (0.5,) * dataset.spec.image_shape[2]
    spec = replace(dataset.spec, mean=half, std=half)
    return replace(dataset, train=pool, test=pool, spec=spec)


def pooled_dirichlet(
    labels: NDArray[np.int64],
    test_labels: NDArray[np.int64],
    rng: np.random.Generator,
    num_clients: int = 20,
    alpha: float = 0.1,
    test_fraction: float = 0.25,
    min_samples: int = 40,
) -> tuple[Places, Places]:
    """Assign training and test examples, positions in one pool, to the clients.

    For each label, p ~ Dir_M(α) over the clients gives their shares of its examples.
    Clients that already have N / M examples get none; the others get theirs in
    proportion to p. The draw is repeated until every client has ``min_samples``, which
    leaves ten test examples, a mini-batch.
    """
    if not np.array_equal(labels, test_labels):
        raise DataError(
            "expected all data of one pool: choose those of "
            "papers.leaderboard, partition.used_fraction=1 and proxy_fraction=0"
        )
    least = min(min_samples, len(labels) / num_clients / 2)
    owner = np.empty(len(labels), dtype=np.int64)
    sizes = np.zeros(num_clients)
    while sizes.min() < least:
        sizes[:] = 0
        for label in range(labels.max() + 1):
            places = rng.permutation(np.flatnonzero(labels == label))
            # In logarithms, since the weights of all clients with room may underflow.
            log_weights = draw_log_dirichlet(alpha, (num_clients,), rng)
            has_room = sizes < len(labels) / num_clients
            parts = normalise(np.where(has_room, log_weights, -np.inf))
            ends = (np.cumsum(parts)[:-1] * len(places)).astype(np.int64)
            counts = np.diff(ends, prepend=0, append=len(places))
            owner[places] = np.repeat(np.arange(num_clients), counts)
            sizes += counts
    train, test = Places(), Places()
    for client in range(num_clients):
        members = rng.permutation(np.flatnonzero(owner == client))
        first_tested = int((1 - test_fraction) * len(members))
        train.append(np.sort(members[:first_tested]))
        test.append(np.sort(members[first_tested:]))
    return train, test


def four_layer_cnn(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Build two 5x5 convolutions with pooling, 512 hidden units and the head."""
    channels, height, width = input_shape

    def remaining(pixels: int) -> int:
        return ((pixels - 4) // 2 - 4) // 2

    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * remaining(height) * remaining(width), 512), nn.ReLU()),
        nn.Linear(512, num_classes),
    )

"""The leaderboard's protocol of PFLlib: its data, its split and its network.

Zhang et al., "PFLlib: A Beginner-Friendly and Comprehensive Personalized Federated
Learning Library and Benchmark", JMLR 2025, and its code. Training and test images are
one pool, scaled to [-1, 1]. It is split over the clients by labels, and then each
client's part at random, three quarters to learn from.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import nn

from knnper.data.examples import Dataset, LabelledArrays
from knnper.data.torchvision_sets import Cifar100Settings
from knnper.errors import DataError
from knnper.simulation.partition.schemes import draw_log_dirichlet, normalise
from papers.data import Cifar100Sheets

Places = list[NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class PooledCifar100(Cifar100Settings):
    """CIFAR-100 as one pool, from the official files."""

    def load(self) -> Dataset:
        """Return the pool, scaled to [-1, 1]."""
        return pooled(super().load())


@dataclass(frozen=True, kw_only=True)
class PooledCifar100Sheets(Cifar100Sheets):
    """The same from sheets."""

    def load(self) -> Dataset:
        """Return the pool, scaled to [-1, 1]."""
        return pooled(super().load())


def pooled(found: Dataset) -> Dataset:
    """Return data both of whose splits are all images; a partition divides them."""
    splits = found.train, found.test
    pool = LabelledArrays(
        np.concatenate([one.images for one in splits]),
        np.concatenate([one.labels for one in splits]),
    )
    half = (0.5,) * found.spec.image_shape[2]
    spec = replace(found.spec, mean=half, std=half)
    return replace(found, train=pool, test=pool, spec=spec)


def pooled_dirichlet(
    labels: NDArray[np.int64],
    test_labels: NDArray[np.int64],
    rng: np.random.Generator,
    num_clients: int = 20,
    alpha: float = 0.1,
    test_fraction: float = 0.25,
    min_samples: int = 40,
) -> tuple[Places, Places]:
    """Return what each client learns from and is tested on, places in one pool.

    Label after label, p ~ Dir_M(α) over the clients says who gets which part of its
    examples. A client that has its share of the pool already, N / M, gets none, and
    the others in proportion to p. All is drawn anew until everyone has
    ``min_samples``: a mini-batch of ten to be tested on.
    """
    if not np.array_equal(labels, test_labels):
        raise DataError(
            "expected data of one pool, of which nothing is left out: choose those of "
            "papers.leaderboard, partition.used_fraction=1 and proxy_fraction=0"
        )
    least = min(min_samples, len(labels) / num_clients / 2)
    owner = np.empty(len(labels), dtype=np.int64)
    sizes = np.zeros(num_clients)
    while sizes.min() < least:
        sizes[:] = 0
        for label in range(labels.max() + 1):
            places = rng.permutation(np.flatnonzero(labels == label))
            # By logarithms: the weights of all who have room may be too small.
            log_weights = draw_log_dirichlet(alpha, (num_clients,), rng)
            has_room = sizes < len(labels) / num_clients
            parts = normalise(np.where(has_room, log_weights, -np.inf))
            ends = (np.cumsum(parts)[:-1] * len(places)).astype(np.int64)
            counts = np.diff(ends, prepend=0, append=len(places))
            owner[places] = np.repeat(np.arange(num_clients), counts)
            sizes += counts
    train, test = Places(), Places()
    for client in range(num_clients):
        own = rng.permutation(np.flatnonzero(owner == client))
        first_tested = int((1 - test_fraction) * len(own))
        train.append(np.sort(own[:first_tested]))
        test.append(np.sort(own[first_tested:]))
    return train, test


def four_layer_cnn(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Return two 5x5 convolutions with pooling, 512 hidden units and the head."""
    channels, height, width = input_shape

    def remaining(pixels: int) -> int:
        return ((pixels - 4) // 2 - 4) // 2

    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * remaining(height) * remaining(width), 512), nn.ReLU()),
        nn.Linear(512, num_classes),
    )

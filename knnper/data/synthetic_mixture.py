"""Synthetic labels of users in clusters, drawn from a formula."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.data.examples import DataFormat, Dataset, InputSpec, LabelledArrays
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeInt, PositiveInt

_SHARE_OF_CLUSTER = _SHARE_OF_USER = 0.25

_TEST_EXAMPLES_PER_LABEL = 4
"""With 4 d test examples, each probability of D_k is a whole number of examples."""


@dataclass(frozen=True)
class SyntheticMixtureSettings(DataFormat):
    """Settings of users, examples and clusters.

    Attributes
    ----------
    num_users
        p, the number of clients; 100 in the paper.
    num_samples
        m, the training and validation examples of a user. A larger m adds examples
        and keeps the first examples.
    num_classes
        d, the number of labels; 50 in the paper. Must exceed the number of clusters.
    num_clusters
        q, the number of clusters of users; 4 in the paper.
    seed
        Seed of the examples.
    """

    name = "synthetic_mixture"
    title = "Synthetic mixture"
    summary = "labels of users that fall into clusters, and no inputs; made, not loaded"

    num_users: PositiveInt = 100
    num_samples: PositiveInt = 100
    num_classes: Annotated[int, Field(ge=2)] = 50
    num_clusters: PositiveInt = 4
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.num_classes <= self.num_clusters:
            raise ValueError(
                f"found num_classes of {self.num_classes} with num_clusters = "
                f"{self.num_clusters}, expected more classes than clusters; each "
                "cluster has a label of its own, and users have others"
            )

    def load(self) -> Dataset:
        """Draw the users' labels, each with the input 1, shape (1, 1, 1), float32.

        The test split of a user has 4 d examples with exactly the distribution D_k.
        ``client_ids`` hold the user of each example, for the partition ``natural``.
        """
        users = range(self.num_users)
        key = RandomKey(self.seed, ("synthetic_mixture",))
        densities = [density(self, user) for user in users]
        drawn = [
            _draw_labels(densities[user], self.num_samples, key.child(user))
            for user in users
        ]
        exact = [_exact_labels(shares) for shares in densities]
        return Dataset(
            name="synthetic_mixture",
            train=_labelled(drawn),
            test=_labelled(exact),
            spec=InputSpec((1, 1, 1), self.num_classes, (0.0,), (1.0,), "float32"),
            class_names=tuple(str(label) for label in range(self.num_classes)),
            feature_names=("constant",),
        )


def density(settings: SyntheticMixtureSettings, user: int) -> NDArray[np.float64]:
    """Return D_k of user k, shape (d,)."""
    num_classes, num_clusters = settings.num_classes, settings.num_clusters
    uniform = 1 - _SHARE_OF_CLUSTER - _SHARE_OF_USER
    shares = np.full(num_classes, uniform / num_classes)
    shares[user % num_clusters] += _SHARE_OF_CLUSTER
    shares[num_clusters + user % (num_classes - num_clusters)] += _SHARE_OF_USER
    return shares


def _draw_labels(
    shares: NDArray[np.float64], count: int, key: RandomKey
) -> NDArray[np.int64]:
    """Draw labels independently, shape (count,)."""
    upper = np.cumsum(shares)
    drawn = key.numpy().random(count) * upper[-1]
    labels: NDArray[np.int64] = np.searchsorted(upper, drawn, side="right")
    return labels


def _exact_labels(shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return each label in proportion to its share, shape (4 d,)."""
    counts = np.rint(shares * _TEST_EXAMPLES_PER_LABEL * len(shares)).astype(np.int64)
    return np.arange(len(shares), dtype=np.int64).repeat(counts)


def _labelled(of_users: list[NDArray[np.int64]]) -> LabelledArrays:
    labels = np.concatenate(of_users)
    return LabelledArrays(
        images=np.ones((len(labels), 1, 1, 1), dtype=np.float32),
        labels=labels,
        client_ids=np.repeat(np.arange(len(of_users)), list(map(len, of_users))),
    )

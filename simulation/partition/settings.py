"""Settings that several partitions have."""

from dataclasses import dataclass
from typing import Literal

from knnper.settings import (
    PositiveFraction,
    PositiveInt,
    ProperFraction,
    Settings,
)


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
        Fraction of both splits of the data set that is used, (0, 1], drawn by the
        seed. For small trials with large data.
    evaluate_on
        The split that clients are evaluated on. With ``validation`` each client's
        validation split replaces its test split, and the same fraction of the rest
        replaces its validation split: hyper-parameters are compared without reading a
        test split.
    proxy_fraction
        Fraction of the training split that the server keeps, [0, 1), drawn at random
        before the rest is split over the clients. ``dapper`` samples from it.
    unseen_train_fraction
        Fraction of its training and validation data that an unseen client uses, (0,
        1]. A smaller fraction is a subset of a larger one, and nothing else changes.
        0.5 and 1 are the small and the moderate sizes of Chen et al. 2023, appendix
        B.1.
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

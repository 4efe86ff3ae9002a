"""What the partitions' settings have in common."""

from dataclasses import dataclass
from typing import Literal

from knnper.config.ranges import PositiveFraction, PositiveInt, ProperFraction
from knnper.config.sections import Settings


@dataclass(frozen=True, kw_only=True)
class PartitionSettings(Settings):
    """Settings of every partition.

    Attributes
    ----------
    unseen_fraction
        Fraction of the clients that arrive only after training, [0, 1); 0.2 in the
        paper's experiment on unseen clients (knn-per.txt, section 6).
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
        drawn at random before the rest is dealt. ``dapper`` samples from it.
    unseen_train_fraction
        Part of its training data, and of what it holds out of it, that a client has
        which arrives only after training, (0, 1]; the rest is nobody's. Smaller parts
        lie in larger ones, and nothing else changes with it. 0.5 and 1 are the small
        and the moderate sizes of fedbasis-pflbed.txt, appendix B.1.
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

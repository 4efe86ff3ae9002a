"""What the partitions' settings have in common."""

from dataclasses import dataclass

from knnper.config.ranges import PositiveInt, ProperFraction
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
        0.2 in the paper (section 5).
    """

    unseen_fraction: ProperFraction = 0.0
    validation_fraction: ProperFraction = 0.2


@dataclass(frozen=True, kw_only=True)
class CountedSettings(PartitionSettings):
    """Settings of a partition that takes the number of clients.

    Attributes
    ----------
    num_clients
        M; 200 in the paper's CIFAR experiments (table 1).
    """

    num_clients: PositiveInt

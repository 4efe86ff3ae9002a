"""What a partition looks like."""

from dataclasses import dataclass

import numpy as np

from simulation.partition.assignment import Integers
from simulation.partition.split import ClientPart, Partition


@dataclass(frozen=True, eq=False)
class PartitionSummary:
    """Sizes and label counts.

    Attributes
    ----------
    train_sizes, validation_sizes, test_sizes
        Samples of each client, shape (M,).
    class_counts
        Training and validation samples by client and label, shape (M, c).
    num_empty
        Clients without any training or validation samples.
    min_size, median_size, max_size
        Of a client's training and validation samples together.
    """

    train_sizes: Integers
    validation_sizes: Integers
    test_sizes: Integers
    class_counts: Integers
    num_empty: int
    min_size: int
    median_size: float
    max_size: int


def describe_partition(
    partition: Partition, train_labels: Integers, num_classes: int
) -> PartitionSummary:
    """Count what each client has.

    Parameters
    ----------
    train_labels
        Labels of the data set's training split, shape (n,).
    num_classes
        c.
    """
    clients = partition.clients
    counts = [_class_counts(client, train_labels, num_classes) for client in clients]
    class_counts = np.stack(counts)
    sizes = class_counts.sum(axis=1)
    return PartitionSummary(
        train_sizes=np.array([len(client.train) for client in clients]),
        validation_sizes=np.array([len(client.validation) for client in clients]),
        test_sizes=np.array([len(client.test) for client in clients]),
        class_counts=class_counts,
        num_empty=int(np.count_nonzero(sizes == 0)),
        min_size=int(sizes.min()),
        median_size=float(np.median(sizes)),
        max_size=int(sizes.max()),
    )


def _class_counts(
    client: ClientPart, train_labels: Integers, num_classes: int
) -> Integers:
    local = np.concatenate([client.train, client.validation])
    return np.bincount(train_labels[local], minlength=num_classes)

"""Equal random shares."""

from dataclasses import dataclass

import numpy as np

from knnper.config.seeding import RandomKey
from simulation.partition.allocation import (
    count_labels,
    deal_test_like_train,
    num_labels_of,
)
from simulation.partition.assignment import Assignment, Integers, assignment_of
from simulation.partition.settings import CountedSettings


@dataclass(frozen=True, kw_only=True)
class IidSettings(CountedSettings):
    """Only what all partitions have."""


def iid(
    train_labels: Integers,
    test_labels: Integers,
    settings: IidSettings,
    key: RandomKey,
) -> Assignment:
    """Deal the training samples at random; sizes differ by at most one.

    Each label's test samples follow its training samples.

    Parameters
    ----------
    train_labels, test_labels
        Shapes (n_train,) and (n_test,).
    """
    num_clients = settings.num_clients
    places = np.arange(len(train_labels)) % num_clients
    train_owner = key.child("train").numpy().permutation(places)
    shape = (num_labels_of(train_labels, test_labels), num_clients)
    test_owner = deal_test_like_train(
        count_labels(train_labels, train_owner, shape), test_labels, key.child("test")
    )
    return assignment_of(train_owner, test_owner, num_clients)

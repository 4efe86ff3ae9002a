"""Equal random shares, and shares that the data set itself names."""

from dataclasses import dataclass

import numpy as np

from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.simulation.partition.assignment import (
    Assignment,
    CountedSettings,
    Integers,
    PartitionSettings,
    assignment_of,
    count_labels,
    deal_test_like_train,
    num_labels_of,
)


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


@dataclass(frozen=True, kw_only=True)
class NaturalSettings(PartitionSettings):
    """Only what all partitions have; the clients are those found."""


def natural(
    train_client_ids: Integers | None, test_client_ids: Integers | None
) -> Assignment:
    """Give each client its own samples; clients are ordered by their ids.

    Parameters
    ----------
    train_client_ids, test_client_ids
        Whom each sample belongs to, shapes (n_train,) and (n_test,).

    Raises
    ------
    DataError
        If the data set does not say whom its samples belong to.
    """
    if train_client_ids is None or test_client_ids is None:
        raise DataError(
            "the partition natural needs a data set that says whom each sample belongs "
            "to; for a table, set data.client, for an image_folder, "
            "data.client_separator, for a user_csv, leave out a data.test without "
            "users, or choose another partition"
        )
    clients, owner = np.unique(
        np.concatenate([train_client_ids, test_client_ids]), return_inverse=True
    )
    num_train = len(train_client_ids)
    return assignment_of(owner[:num_train], owner[num_train:], len(clients))

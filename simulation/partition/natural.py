"""The clients that the data set itself names."""

from dataclasses import dataclass

import numpy as np

from knnper.config.errors import DataError
from simulation.partition.assignment import Assignment, Integers, assignment_of
from simulation.partition.settings import PartitionSettings


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

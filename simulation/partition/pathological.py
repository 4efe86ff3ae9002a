"""Each client has samples of exactly c labels."""

from dataclasses import dataclass

import numpy as np

from knnper.errors import DataError
from knnper.experiment import PositiveInt
from knnper.seeding import RandomKey
from knnper.simulation.partition.assignment import (
    Assignment,
    CountedSettings,
    Integers,
    apportion,
    assignment_of,
    deal,
    deal_test_like_train,
    num_labels_of,
)


@dataclass(frozen=True, kw_only=True)
class PathologicalSettings(CountedSettings):
    """How many labels a client has.

    Attributes
    ----------
    classes_per_client
        2 for CIFAR-10 (v2) and 10 for CIFAR-100 (v2) in the paper.
    """

    classes_per_client: PositiveInt = 2


def pathological(
    train_labels: Integers,
    test_labels: Integers,
    settings: PathologicalSettings,
    key: RandomKey,
) -> Assignment:
    """Give each client exactly c labels, and each label to as many clients as another.

    The data sets "v2" of knn-per.txt, section 5, after Achituve et al. (2021). The
    clients of a label share its samples evenly.

    Parameters
    ----------
    train_labels, test_labels
        Shapes (n_train,) and (n_test,).

    Raises
    ------
    DataError
        If c exceeds the number of labels, some label would go to nobody, or a label
        has fewer training samples than clients.
    """
    totals = np.bincount(
        train_labels, minlength=num_labels_of(train_labels, test_labels)
    )
    present = np.flatnonzero(totals)
    _require_enough_slots(len(present), settings)
    holders = _choose_labels(present, len(totals), settings, key.child("labels"))
    _require_enough_samples(totals, holders.sum(axis=1), settings)
    counts = apportion(holders.astype(np.float64), totals, key.child("round").numpy())
    train_owner = deal(train_labels, counts, key.child("train"))
    test_owner = deal_test_like_train(counts, test_labels, key.child("test"))
    return assignment_of(train_owner, test_owner, settings.num_clients)


def _choose_labels(
    present: Integers, num_labels: int, settings: PathologicalSettings, key: RandomKey
) -> Integers:
    """Return who holds what, 0 or 1, shape (num_labels, M).

    Labels are handed out in passes over all of them, each in a new random order, so
    all are handed out equally often up to one.
    """
    holders = np.zeros((num_labels, settings.num_clients), dtype=np.int64)
    waiting: list[int] = []
    num_passes = 0
    for client in range(settings.num_clients):
        chosen = waiting[: settings.classes_per_client]
        waiting = waiting[settings.classes_per_client :]
        lacking = settings.classes_per_client - len(chosen)
        if lacking:
            order = key.child(num_passes).numpy().permutation(present).tolist()
            num_passes += 1
            # A client whose labels come from two passes must not get one twice.
            order.sort(key=chosen.__contains__)
            chosen, waiting = chosen + order[:lacking], order[lacking:]
        holders[chosen, client] = 1
    return holders


def _require_enough_slots(num_labels: int, settings: PathologicalSettings) -> None:
    per_client, clients = settings.classes_per_client, settings.num_clients
    if per_client > num_labels:
        raise DataError(
            f"partition.classes_per_client is {per_client}, but the training data has "
            f"only {num_labels} classes; lower it"
        )
    if per_client * clients < num_labels:
        raise DataError(
            f"{clients} clients with {per_client} classes each cannot hold all "
            f"{num_labels} classes; raise partition.num_clients or "
            "partition.classes_per_client"
        )


def _require_enough_samples(
    totals: Integers, num_holders: Integers, settings: PathologicalSettings
) -> None:
    short = np.flatnonzero(totals < num_holders)
    if len(short):
        label = int(short[0])
        raise DataError(
            f"class {label} has {totals[label]} training samples for the "
            f"{num_holders[label]} clients that {settings.num_clients} clients with "
            f"{settings.classes_per_client} classes each give it; lower "
            "partition.num_clients or partition.classes_per_client"
        )

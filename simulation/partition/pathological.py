"""The partition ``pathological``: a fixed number of labels at each client."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.settings import PositiveInt
from knnper.simulation.partition.allocation import (
    Assignment,
    Integers,
    apportion,
    assign_counts,
    num_labels_of,
)
from knnper.simulation.partition.settings import CountedSettings


@dataclass(frozen=True, kw_only=True)
class PathologicalSettings(CountedSettings):
    """The number of labels of a client.

    Attributes
    ----------
    classes_per_client
        2 for CIFAR-10 (v2) and 10 for CIFAR-100 (v2) in the paper.
    shares
        How the clients of a label share its samples: ``even``, or ``uneven`` in
        proportion to draws from U(0.4, 0.6) (Achituve et al. 2021).
    """

    classes_per_client: PositiveInt = 2
    shares: Literal["even", "uneven"] = "even"


def pathological(
    train_labels: Integers,
    test_labels: Integers,
    settings: PathologicalSettings,
    key: RandomKey,
) -> Assignment:
    """Give each client exactly c labels, and each label to as many clients as another.

    The data sets "v2" of Marfoq et al. 2022, section 5, after Achituve et al. (2021).
    """
    totals = np.bincount(
        train_labels, minlength=num_labels_of(train_labels, test_labels)
    )
    present = np.flatnonzero(totals)
    _require_enough_slots(len(present), settings)
    has_label = _choose_labels(present, len(totals), settings, key.child("labels"))
    _require_enough_samples(totals, has_label.sum(axis=1), settings)
    weights = has_label.astype(np.float64)
    if settings.shares == "uneven":
        weights *= key.child("shares").numpy().uniform(0.4, 0.6, weights.shape)
    counts = apportion(weights, totals, key.child("round").numpy())
    return assign_counts(train_labels, test_labels, counts, key)


def _choose_labels(
    present: Integers, num_labels: int, settings: PathologicalSettings, key: RandomKey
) -> Integers:
    """Choose the labels of each client: 0 or 1, shape (num_labels, M).

    Labels are handed out in passes over all of them, each in a new random order, so
    all are handed out equally often up to one.
    """
    has_label = np.zeros((num_labels, settings.num_clients), dtype=np.int64)
    waiting: list[int] = []
    num_passes = 0
    for client in range(settings.num_clients):
        chosen = waiting[: settings.classes_per_client]
        waiting = waiting[settings.classes_per_client :]
        lacking = settings.classes_per_client - len(chosen)
        if lacking:
            order = key.child(num_passes).numpy().permutation(present).tolist()
            num_passes += 1
            # A client with labels from two passes must not get the same label twice.
            order.sort(key=chosen.__contains__)
            chosen, waiting = chosen + order[:lacking], order[lacking:]
        has_label[chosen, client] = 1
    return has_label


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
    totals: Integers, num_owners: Integers, settings: PathologicalSettings
) -> None:
    short = np.flatnonzero(totals < num_owners)
    if len(short):
        label = int(short[0])
        raise DataError(
            f"class {label} has {totals[label]} training samples for the "
            f"{num_owners[label]} clients that {settings.num_clients} clients with "
            f"{settings.classes_per_client} classes each give it; lower "
            "partition.num_clients or partition.classes_per_client"
        )

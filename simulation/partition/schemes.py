"""Partition schemes, which assign every sample to exactly one client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from knnper.data.examples import Dataset
from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.simulation.partition.allocation import (
    Assignment,
    Integers,
    allocate_test_like_train,
    assignment_of,
    count_labels,
    num_labels_of,
)
from knnper.simulation.partition.dirichlet import DirichletSettings, dirichlet
from knnper.simulation.partition.pachinko import PachinkoSettings, pachinko
from knnper.simulation.partition.pathological import PathologicalSettings, pathological
from knnper.simulation.partition.pflbed import PflbedSettings, pflbed
from knnper.simulation.partition.settings import CountedSettings, PartitionSettings


def iid(
    train_labels: Integers,
    test_labels: Integers,
    settings: CountedSettings,
    key: RandomKey,
) -> Assignment:
    """Split the training samples at random; sizes differ by at most one.

    Each label's test samples follow its training samples.
    """
    num_clients = settings.num_clients
    places = np.arange(len(train_labels)) % num_clients
    train_owner = key.child("train").numpy().permutation(places)
    shape = (num_labels_of(train_labels, test_labels), num_clients)
    test_owner = allocate_test_like_train(
        count_labels(train_labels, train_owner, shape), test_labels, key.child("test")
    )
    return assignment_of(train_owner, test_owner, num_clients)


def natural(
    train_client_ids: Integers | None,
    test_client_ids: Integers | None,
    names: Sequence[str] = (),
) -> Assignment:
    """Give each client its own samples; clients are ordered by their ids."""
    if train_client_ids is None or test_client_ids is None:
        raise DataError(
            "the partition natural needs a data set that names the client of each "
            "sample: set data.client of a table, give image folders for each client or "
            "data.client_separator, or arrays named clients; or choose another "
            "partition"
        )
    clients, owner = np.unique(
        np.concatenate([train_client_ids, test_client_ids]), return_inverse=True
    )
    num_train = len(train_client_ids)
    assignment = assignment_of(owner[:num_train], owner[num_train:], len(clients))
    if not names:
        return assignment
    return replace(assignment, names=tuple(names[client] for client in clients))


@dataclass(frozen=True)
class PartitionSpec:
    """A partition scheme in the catalogue; ``split`` takes its settings."""

    title: str
    summary: str
    settings_type: type[PartitionSettings]
    split: Callable[[Dataset, Any, RandomKey], Assignment]


def _by_labels(
    scheme: Callable[[Integers, Integers, Any, RandomKey], Assignment],
) -> Callable[[Dataset, Any, RandomKey], Assignment]:
    """Adapt a scheme that needs only labels to data sets."""
    return lambda data, settings, key: scheme(
        data.train.labels, data.test.labels, settings, key
    )


PARTITIONS: Mapping[str, PartitionSpec] = {
    "iid": PartitionSpec(
        "IID", "equal random shares", CountedSettings, _by_labels(iid)
    ),
    "dirichlet": PartitionSpec(
        "Dirichlet",
        "each label spread over the clients by a Dirichlet draw (alpha)",
        DirichletSettings,
        _by_labels(dirichlet),
    ),
    "pathological": PartitionSpec(
        "Pathological",
        "each client has samples of exactly classes_per_client labels",
        PathologicalSettings,
        _by_labels(pathological),
    ),
    "pachinko": PartitionSpec(
        "Pachinko",
        "Dirichlet over coarse labels (alpha), then over fine labels (beta)",
        PachinkoSettings,
        lambda data, settings, key: pachinko(
            data.train.labels, data.test.labels, data.coarse_of, settings, key
        ),
    ),
    "natural": PartitionSpec(
        "Natural",
        "the clients that the data set names",
        PartitionSettings,
        lambda data, _settings, _key: natural(
            data.train.client_ids, data.test.client_ids, data.client_names
        ),
    ),
    "pflbed": PartitionSpec(
        "pFLBED",
        "clients of several domains; each is tested on all of its domain",
        PflbedSettings,
        pflbed,
    ),
}

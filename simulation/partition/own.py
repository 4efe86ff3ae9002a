"""Users' partitions: functions, and partitioners of flwr_datasets."""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from knnper.data.dividing import clean_names, warn_of_merged
from knnper.data.examples import Dataset
from knnper.errors import KnnPerError, OwnCodeError
from knnper.own import Kind, arguments, explained, given_to
from knnper.process import import_extra
from knnper.seeding import RandomKey
from knnper.settings import Choice, Settings
from knnper.simulation.partition.allocation import (
    Assignment,
    Integers,
    allocate_test_like_train,
    assignment_of,
    count_labels,
    num_labels_of,
)
from knnper.simulation.partition.settings import PartitionSettings

OWN_PARTITION = Kind(
    "a function that returns the places of each client's training examples, or a "
    "partitioner of flwr_datasets",
    base=PartitionSettings,
    supplied=("dataset", "labels", "test_labels", "rng"),
)
"""A user's partition of an experiment.

A function is called with those of these arguments that it has parameters for:
``labels`` and ``test_labels`` of both splits, int64 (n,); the `Dataset`, possibly
without images; and ``rng``, a `numpy.random.Generator` seeded by the experiment. It
returns positions in the training split: a list of arrays, one a client, or a mapping
from clients' names to arrays. Test examples then follow the labels of the training
examples. To assign them too, it returns a tuple of two lists or mappings, or an
`Assignment`.
"""


def own_partition(
    choice: Choice[Settings], dataset: Dataset, key: RandomKey
) -> Assignment:
    """Split a data set with a user's code, see `OWN_PARTITION`."""
    train, test = dataset.train.labels, dataset.test.labels
    values = arguments(choice.settings, PartitionSettings)
    parameters = given_to(
        choice.entry,
        dataset=dataset,
        labels=np.array(train),
        test_labels=np.array(test),
        rng=key.child("own").numpy(),
    )
    with explained(), _without_traceback(choice):
        result = choice.entry(**parameters, **values)
        if hasattr(result, "load_partition"):
            result = _partitioned(result, dataset, choice.name)
    if isinstance(result, Assignment):
        names, _ = _owners(result.train, len(train), choice.name)
        test_names, _ = _owners(result.test, len(test), choice.name)
        if len(names) != len(test_names) or not names:
            raise OwnCodeError(
                f"{choice.name} returned an Assignment of {len(names)} clients for the "
                f"training split and {len(test_names)} for the test split, expected "
                "equal numbers"
            )
        return result
    of_test = None
    if isinstance(result, tuple) and len(result) == 2:
        result, of_test = result
    names, owner = _owners(result, len(train), choice.name)
    if not names:
        raise OwnCodeError(f"{choice.name} returned no clients, expected at least one")
    if of_test is not None:
        tested, test_owner = _owners(of_test, len(test), choice.name)
        if tested != names:
            raise OwnCodeError(
                f"{choice.name} returned other clients for the test split, "
                f"{len(tested)} of them, than the {len(names)} for the training split"
            )
    else:
        has_owner = owner >= 0
        shape = (num_labels_of(train, test), len(names))
        counts = count_labels(train[has_owner], owner[has_owner], shape)
        test_owner = allocate_test_like_train(counts, test, key.child("test"))
    # Examples of no client have the owner -1: they become a first part, left out here.
    assignment = assignment_of(owner + 1, test_owner + 1, len(names) + 1)
    is_named = isinstance(result, Mapping)
    return Assignment(
        assignment.train[1:], assignment.test[1:], names=names if is_named else ()
    )


def _owners(
    clients: object, count: int, source: str
) -> tuple[tuple[str, ...], Integers]:
    """Return the clients' names, and the client of each of ``count`` samples or -1."""
    if isinstance(clients, Mapping):
        named = _by_clean_name(clients, source)
        names, parts = tuple(named), list(named.values())
    elif isinstance(clients, Sequence | np.ndarray):
        names, parts = tuple(map(str, range(len(clients)))), list(clients)
    else:
        raise OwnCodeError(
            f"{source} returned {type(clients).__name__}, expected a list of places in "
            "the training split, one array a client, or a mapping from names to these"
        )
    owner = np.full(count, -1, dtype=np.int64)
    for number, (name, part) in enumerate(zip(names, parts, strict=True)):
        places = np.asarray(part)
        if places.size == 0:
            continue
        if places.ndim != 1 or places.dtype.kind not in "iu":
            raise OwnCodeError(
                f"{source}: client {name}: found {places.dtype} of shape "
                f"{places.shape}, expected whole numbers: places of its examples"
            )
        if places.min() < 0 or places.max() >= count:
            raise OwnCodeError(
                f"{source}: client {name}: found the places {places.min()} to "
                f"{places.max()}, expected those of {count} examples, from 0 on"
            )
        has_owner = owner[places] >= 0
        if has_owner.any() or len(np.unique(places)) < len(places):
            raise OwnCodeError(
                f"{source}: client {name}: found examples that it or another client "
                "already has; expected each at most once"
            )
        owner[places] = number
    return names, owner


def _by_clean_name(parts_by_name: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """Return the positions of each client by its cleaned name; merge equal names."""
    written = tuple(map(str, parts_by_name))
    warn_of_merged(written, "clients", source)
    parts = defaultdict[str, list[Any]](list)
    for name, part in zip(clean_names(written), parts_by_name.values(), strict=True):
        parts[name].append(part)
    return {
        name: some[0] if len(some) == 1 else np.concatenate(some)
        for name, some in parts.items()
    }


@contextlib.contextmanager
def _without_traceback(choice: Choice[Settings]) -> Iterator[None]:
    """Raise errors of flwr_datasets in one line; only users' code needs a traceback."""
    try:
        yield
    except KnnPerError:
        raise
    except Exception as error:
        if not str(getattr(choice.entry, "__module__", "")).startswith(
            "flwr_datasets."
        ):
            raise
        raise OwnCodeError(f"{choice.name} failed: {error}") from error


def _partitioned(partitioner: Any, dataset: Dataset, source: str) -> Any:
    """Return the positions of each partition's examples, by name if it has names."""
    package = import_extra("datasets", "hf", "a partitioner of flwr_datasets")
    labels, clients = dataset.train.labels, dataset.train.client_ids
    columns: dict[str, Iterable[Any]] = {"label": labels, "place": range(len(labels))}
    if clients is not None:
        names = dataset.client_names
        columns["client"] = [
            names[client] if names else str(client) for client in clients
        ]
    partitioner.dataset = package.Dataset.from_dict(columns)
    parts = []
    for number in range(partitioner.num_partitions):
        part = partitioner.load_partition(number)
        if "place" not in getattr(part, "column_names", ("place",)):
            raise OwnCodeError(
                f"{source} gives partition {number} the columns "
                f"{', '.join(part.column_names)} alone; expected a partitioner that "
                "divides rows, such as DirichletPartitioner, since each client has all "
                "features"
            )
        parts.append(part["place"][:])
    natural = getattr(partitioner, "partition_id_to_natural_id", None)
    if not natural:
        return parts
    return {str(natural[number]): part for number, part in enumerate(parts)}

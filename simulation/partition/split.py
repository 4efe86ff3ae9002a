"""A partition: which samples each client trains on, tunes on and is tested on."""

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from knnper.config.errors import DataError
from knnper.config.sections import Choice, Settings
from knnper.config.seeding import RandomKey
from knnper.data.dataset import Dataset
from simulation.partition.assignment import Assignment, ClassWeights, Integers
from simulation.partition.catalogue import PARTITIONS
from simulation.partition.holding_out import HoldOut, hold_out_any, hold_out_for
from simulation.partition.proxy import deal_part, keep_back, used
from simulation.partition.settings import PartitionSettings

_MIN_NAME_WIDTH = 4


@dataclass(frozen=True, eq=False)
class ClientPart:
    """One client's samples; it may have none.

    Attributes
    ----------
    name
        Decimal number, padded so that the order of names is the order of numbers.
    seen
        Whether the client is there during training.
    train, validation
        Sorted, disjoint indices into the data set's training split, int64.
    test
        Sorted indices into its test split, int64.
    class_weights
        What a test example of each label counts, shape (c,); None where all count the
        same.
    """

    name: str
    seen: bool
    train: Integers
    validation: Integers
    test: Integers
    class_weights: ClassWeights | None = None

    @property
    def num_examples(self) -> int:
        """The number of its samples, in all splits."""
        return len(self.train) + len(self.validation) + len(self.test)


@dataclass(frozen=True, eq=False)
class Partition:
    """Who has which samples.

    Attributes
    ----------
    clients
        All clients, in the order of their names.
    proxy
        What the server keeps: sorted indices into the training split, int64.
    """

    clients: tuple[ClientPart, ...]
    proxy: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))


def make_partition(
    dataset: Dataset, choice: Choice[Settings], key: RandomKey
) -> Partition:
    """Deal a data set to clients.

    Parameters
    ----------
    choice
        A name in `PARTITIONS` and settings of its type.
    key
        Fixes every random choice.

    Raises
    ------
    DataError
        If the partition cannot be made of this data set.
    """
    settings = choice.settings
    if not isinstance(settings, PartitionSettings):
        raise TypeError(f"expected PartitionSettings, found {type(settings).__name__}")
    split, part = PARTITIONS[choice.name].split, settings.used_fraction
    train = used(len(dataset.train), part, key.child("used", "train"))
    test = used(len(dataset.test), part, key.child("used", "test"))
    kept, dealt = keep_back(train, settings.proxy_fraction, key.child("proxy"))
    assignment = deal_part(
        dataset, dealt, test, lambda one: split(one, settings, key.child("assignment"))
    )
    hold_out = hold_out_for(dataset.spec.dtype)
    partition = replace(partition_of(assignment, settings, key, hold_out), proxy=kept)
    if settings.evaluate_on == "validation":
        partition = tested_on_validation(partition, settings, key, hold_out)
    return with_less_unseen(partition, settings.unseen_train_fraction, key)


def tested_on_validation(
    partition: Partition,
    settings: PartitionSettings,
    key: RandomKey,
    hold_out: HoldOut,
) -> Partition:
    """Return the clients with their validation samples in place of the test split.

    ``test`` then holds indices into the training split, and ``validation`` samples
    held out of what was left to train on. These have the labels that the client has, as
    often as it has them, so they all count the same.
    """
    clients = []
    for client in partition.clients:
        train, validation = hold_out(
            client.train,
            settings.validation_fraction,
            key.child("second validation", client.name),
        )
        test = client.validation
        clients.append(ClientPart(client.name, client.seen, train, validation, test))
    return replace(partition, clients=tuple(clients))


def with_less_unseen(
    partition: Partition, fraction: float, key: RandomKey
) -> Partition:
    """Return the clients, the unseen ones with a part of what they learn from.

    Parameters
    ----------
    fraction
        Part of the training and of the validation samples that is left, (0, 1]; the
        nearest whole numbers, and one at least where there was one.
    key
        Fixes which. What a smaller fraction leaves, a larger one leaves too.
    """

    def part(samples: Integers, *purpose: str) -> Integers:
        return samples[used(len(samples), fraction, key.child("unseen", *purpose))]

    clients = (
        client
        if client.seen
        else replace(
            client,
            train=part(client.train, "train", client.name),
            validation=part(client.validation, "validation", client.name),
        )
        for client in partition.clients
    )
    return replace(partition, clients=tuple(clients))


def partition_of(
    assignment: Assignment,
    settings: PartitionSettings,
    key: RandomKey,
    hold_out: HoldOut = hold_out_any,
) -> Partition:
    """Name the clients, hold out validation data and choose the unseen clients.

    Raises
    ------
    DataError
        If no client would be left to train with.
    """
    names = client_names(len(assignment.train))
    seen = assignment.seen or _choose_seen(
        len(names), settings.unseen_fraction, key.child("unseen")
    )
    weights = assignment.class_weights or (None,) * len(names)
    clients = []
    for number, name in enumerate(names):
        train, validation = hold_out(
            assignment.train[number],
            settings.validation_fraction,
            key.child("validation", name),
        )
        test = assignment.test[number]
        clients.append(
            ClientPart(name, seen[number], train, validation, test, weights[number])
        )
    return Partition(tuple(clients))


def client_names(num_clients: int) -> tuple[str, ...]:
    """Return "0000", "0001", ...; longer where four digits are too few."""
    width = max(_MIN_NAME_WIDTH, len(str(num_clients - 1)))
    return tuple(f"{number:0{width}d}" for number in range(num_clients))


def fingerprint(partition: Partition) -> str:
    """Return the SHA-256, in hex, of names, seen flags and indices.

    Indices enter as little-endian int64 after their number, so that no two
    partitions give the same bytes; the server's come last, where it keeps any.
    """
    digest = hashlib.sha256()
    for client in partition.clients:
        digest.update(f"{client.name}\n{int(client.seen)}\n".encode())
        for indices in (client.train, client.validation, client.test):
            digest.update(_bytes_of(indices))
    if len(partition.proxy) > 0:
        digest.update(_bytes_of(partition.proxy))
    return digest.hexdigest()


def _bytes_of(indices: Integers) -> bytes:
    return len(indices).to_bytes(8, "little") + indices.astype("<i8").tobytes()


def _choose_seen(num_clients: int, fraction: float, key: RandomKey) -> tuple[bool, ...]:
    count = int(fraction * num_clients + 0.5)
    if count == num_clients:
        raise DataError(
            f"partition.unseen_fraction {fraction} of {num_clients} clients leaves no "
            "client to train with; lower it"
        )
    unseen = set(key.numpy().permutation(num_clients)[:count].tolist())
    return tuple(number not in unseen for number in range(num_clients))

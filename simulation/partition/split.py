"""A partition: the training, validation and test samples of each client."""

import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from knnper.data.examples import Dataset, LabelledArrays
from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.settings import Choice, Settings
from knnper.simulation.partition.allocation import Assignment, Integers, Shares
from knnper.simulation.partition.clients import ClientPart, Clients, Partition
from knnper.simulation.partition.own import own_partition
from knnper.simulation.partition.schemes import PARTITIONS
from knnper.simulation.partition.settings import PartitionSettings

# ``(samples, fraction, key) -> (train, validation)``: splits a client's sorted samples.
# The fraction is rounded, and at least one sample remains for training.
HoldOut: TypeAlias = Callable[[Integers, float, RandomKey], tuple[Integers, Integers]]
_MIN_NAME_WIDTH = 4
_LONGEST_TITLE = 60
_UNFIT = re.compile(r"[^\w.-]")
MOST_DRAWN = 100_000
"""With more clients, a run starts without drawing all samples, which is slow."""


def hold_out_random(
    samples: Integers, fraction: float, key: RandomKey
) -> tuple[Integers, Integers]:
    """Hold out random samples."""
    count = int(_num_held_out(len(samples), fraction))
    shuffled = key.numpy().permutation(samples)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def hold_out_last(
    samples: Integers,
    fraction: float,
    key: RandomKey,  # noqa: ARG001 - nothing is random here
) -> tuple[Integers, Integers]:
    """Hold out the last samples: of text, a client's windows are in its order."""
    end = len(samples) - int(_num_held_out(len(samples), fraction))
    return samples[:end], samples[end:]


def _num_held_out(num_samples: Integers | int, fraction: float) -> Integers:
    """Return the number of samples to hold out, for each number of samples."""
    rounded = np.asarray(fraction * num_samples + 0.5).astype(np.int64)
    return np.minimum(rounded, np.maximum(num_samples - 1, 0))


def part_used(num_samples: int, fraction: float, key: RandomKey) -> Integers:
    """Return the sorted positions of a random fraction of a split."""
    if fraction == 1:
        return np.arange(num_samples)
    count = int(_num_used(num_samples, fraction))
    return np.sort(key.numpy().permutation(num_samples)[:count])


def _num_used(num_samples: Integers | int, fraction: float) -> Integers:
    """Return the number of samples to use, at least one, for each number of samples."""
    rounded = np.asarray(fraction * num_samples + 0.5).astype(np.int64)
    return np.minimum(num_samples, np.maximum(1, rounded))


def keep_back(
    samples: Integers, fraction: float, key: RandomKey
) -> tuple[Integers, Integers]:
    """Draw the server's samples; return them and the clients' samples, both sorted."""
    num_samples = len(samples)
    count = int(fraction * num_samples + 0.5)
    if fraction > 0 and count == 0:
        raise DataError(
            f"partition.proxy_fraction {fraction} of {num_samples} training samples is "
            "none, expected at least one for the server; raise it to "
            f"{1 / max(num_samples, 1):g}, or leave it out to keep none"
        )
    if 0 < num_samples == count:
        raise DataError(
            f"partition.proxy_fraction {fraction} of {num_samples} training samples "
            "leaves none for the clients; lower it"
        )
    shuffled = samples[key.numpy().permutation(num_samples)]
    return np.sort(shuffled[:count]), np.sort(shuffled[count:])


def assign_part(
    dataset: Dataset,
    train: Integers,
    test: Integers,
    split: Callable[[Dataset], Assignment],
) -> Assignment:
    """Assign a part of a data set: the positions ``train`` and ``test``."""
    if len(train) == len(dataset.train) and len(test) == len(dataset.test):
        return split(dataset)
    part = replace(
        dataset,
        train=_labels_at(dataset.train, train),
        test=_labels_at(dataset.test, test),
    )
    assignment = split(part)
    return replace(
        assignment,
        train=Shares.of(assignment.train).within(train),
        test=Shares.of(assignment.test).within(test),
    )


def _labels_at(arrays: LabelledArrays, positions: Integers) -> LabelledArrays:
    """Return labels, clients and domains at positions, without a copy of the images."""
    clients, domains = arrays.client_ids, arrays.domain_ids
    return LabelledArrays(
        arrays.images[:0],
        arrays.labels[positions],
        None if clients is None else clients[positions],
        None if domains is None else domains[positions],
    )


def make_partition(
    dataset: Dataset, choice: Choice[Settings], run_key: RandomKey
) -> Partition:
    """Split an experiment's data set over its clients."""
    settings = choice.settings
    if not isinstance(settings, PartitionSettings):
        raise TypeError(f"expected PartitionSettings, found {type(settings).__name__}")
    fraction = settings.used_fraction
    key = run_key.child("partition")
    train = part_used(len(dataset.train), fraction, key.child("used", "train"))
    test = part_used(len(dataset.test), fraction, key.child("used", "test"))
    proxy, train = keep_back(train, settings.proxy_fraction, key.child("proxy"))
    assignment_key = key.child("assignment")

    def split(part: Dataset) -> Assignment:
        if choice.entry is not None:
            return own_partition(choice, part, assignment_key)
        return PARTITIONS[choice.name].split(part, settings, assignment_key)

    assignment = assign_part(dataset, train, test, split)
    hold_out = hold_out_last if dataset.spec.dtype == "token" else hold_out_random
    return replace(partition_of(assignment, settings, key, hold_out), proxy=proxy)


def partition_of(
    assignment: Assignment,
    settings: PartitionSettings,
    key: RandomKey,
    hold_out: HoldOut = hold_out_random,
) -> Partition:
    """Name the clients, hold out validation data and choose the unseen clients."""
    num_clients = len(assignment.train)
    fraction = settings.validation_fraction
    names, titles = client_names(num_clients), titles_of(assignment.names)
    trained, tested = Shares.of(assignment.train), Shares.of(assignment.test)
    unseen_part, weights = settings.unseen_train_fraction, assignment.class_weights
    seen = (
        _choose_seen(num_clients, settings.unseen_fraction, key.child("unseen"))
        if assignment.seen is None
        else np.array(assignment.seen, dtype=bool)
    )

    def part(number: int) -> ClientPart:
        name, is_seen, test = names[number], bool(seen[number]), tested[number]
        own_weights = None if weights is None else weights[number]
        train, validation = hold_out(
            trained[number], fraction, key.child("validation", name)
        )
        if settings.evaluate_on == "validation":
            # The validation samples replace the test split.
            test, own_weights = validation, None
            again = key.child("second validation", name)
            train, validation = hold_out(train, fraction, again)
        if not is_seen:
            # An unseen client uses only a fraction of its samples.
            train, validation = (
                samples[
                    part_used(len(samples), unseen_part, key.child("unseen", of, name))
                ]
                for of, samples in (("train", train), ("validation", validation))
            )
        title = titles[number] if titles else ""
        return ClientPart(name, is_seen, train, validation, test, own_weights, title)

    sizes = _sizes(trained.sizes, tested.sizes, seen, settings)
    choices = fraction, settings.evaluate_on, unseen_part, hold_out.__name__, key
    arrays = trained.samples, trained.ends, tested.samples, tested.ends
    origin = [repr(choices).encode(), *map(_bytes_of, arrays)]
    return Partition(Clients(names, titles, seen, sizes, part, origin))


def _sizes(
    trained: Integers,
    tested: Integers,
    seen: NDArray[np.bool_],
    settings: PartitionSettings,
) -> Integers:
    """Return `Clients.sizes` without drawing any sample."""
    validation = _num_held_out(trained, settings.validation_fraction)
    train = trained - validation
    if settings.evaluate_on == "validation":
        tested = validation
        validation = _num_held_out(train, settings.validation_fraction)
        train = train - validation
    if settings.unseen_train_fraction != 1:
        train, validation = (
            np.where(seen, sizes, _num_used(sizes, settings.unseen_train_fraction))
            for sizes in (train, validation)
        )
    return np.array([train, validation, tested])


def client_names(num_clients: int) -> tuple[str, ...]:
    """Return "0000", "0001", ...; longer where four digits are too few."""
    width = max(_MIN_NAME_WIDTH, len(str(num_clients - 1)))
    return tuple(f"{number:0{width}d}" for number in range(num_clients))


def titles_of(names: Sequence[str]) -> tuple[str, ...]:
    """Turn clients' names into unique file names, also for case-insensitive systems.

    Letters and digits of any alphabet stay, and so do ``.``, ``_`` and ``-``.
    """
    used = set[str]()
    titles = []
    for name in names:
        fit = _UNFIT.sub("_", name)
        short = fit.lstrip("._-")[:_LONGEST_TITLE] or "client"
        others = (f"{short}-{number}" for number in itertools.count(2))
        title = next(
            candidate
            for candidate in itertools.chain([short], others)
            if candidate.casefold() not in used
        )
        used.add(title.casefold())
        titles.append(title)
    return tuple(titles)


def fingerprint(partition: Partition) -> str:
    """Return the SHA-256, in hex, of names, seen flags and indices.

    For more than `MOST_DRAWN` clients, of `Clients.origin` instead of the indices.
    """
    digest = hashlib.sha256()
    clients = partition.clients
    if clients.origin and len(clients) > MOST_DRAWN:
        digest.update(np.packbits(clients.seen).tobytes())
        for content in clients.origin:
            digest.update(content)
    else:
        for client in clients:
            digest.update(f"{client.name}\n{int(client.seen)}\n".encode())
            for indices in (client.train, client.validation, client.test):
                digest.update(_bytes_of(indices))
    if len(partition.proxy) > 0:
        digest.update(_bytes_of(partition.proxy))
    return digest.hexdigest()


def _bytes_of(indices: Integers) -> bytes:
    return len(indices).to_bytes(8, "little") + indices.astype("<i8").tobytes()


def _choose_seen(num_clients: int, fraction: float, key: RandomKey) -> NDArray[Any]:
    count = int(fraction * num_clients + 0.5)
    if count == num_clients:
        raise DataError(
            f"partition.unseen_fraction {fraction} of {num_clients} clients leaves no "
            "client to train with; lower it"
        )
    seen = np.ones(num_clients, dtype=bool)
    seen[key.numpy().permutation(num_clients)[:count]] = False
    return seen

"""A partition: which samples each client trains on, tunes on and is tested on."""

import bisect
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_jsonable_python

from knnper.data.examples import Dataset, LabelledArrays
from knnper.data.site_data import SITES, sites_settings, task_of
from knnper.errors import DataError
from knnper.experiment import Choice, Settings
from knnper.files import whole_folder
from knnper.seeding import RandomKey
from knnper.simulation.partition.own import own_partition
from knnper.simulation.partition.schemes import (
    PARTITIONS,
    Assignment,
    ClassWeights,
    Integers,
    PartitionSettings,
    Shares,
)

# ``(samples, fraction, key) -> (train, validation)``: a client's samples, split.
# ``samples`` are sorted. As many as the fraction says, rounded, are held out; one at
# least, where there is any, is left to train on.
HoldOut: TypeAlias = Callable[[Integers, float, RandomKey], tuple[Integers, Integers]]
_MIN_NAME_WIDTH = 4
_LONGEST_TITLE = 60
_UNFIT = re.compile(r"[^\w.-]")
MOST_DRAWN = 100_000
"""Clients that are all looked at when a run starts; drawing those of more is slow."""
LABELS_FILE = "labels.json"


def hold_out_random(
    samples: Integers, fraction: float, key: RandomKey
) -> tuple[Integers, Integers]:
    """Hold out samples that are drawn by ``key``."""
    count = int(_num_held_out(len(samples), fraction))
    shuffled = key.numpy().permutation(samples)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def hold_out_last(
    samples: Integers,
    fraction: float,
    key: RandomKey,  # noqa: ARG001 - nothing is random here
) -> tuple[Integers, Integers]:
    """Hold out the last samples: of text, in whose order a client's windows are."""
    end = len(samples) - int(_num_held_out(len(samples), fraction))
    return samples[:end], samples[end:]


def _num_held_out(num_samples: Integers | int, fraction: float) -> Integers:
    """Return how many of each number of samples."""
    rounded = np.asarray(fraction * num_samples + 0.5).astype(np.int64)
    return np.minimum(rounded, np.maximum(num_samples - 1, 0))


def part_used(num_samples: int, fraction: float, key: RandomKey) -> Integers:
    """Return the sorted positions of the part of a split that is used at all."""
    if fraction == 1:
        return np.arange(num_samples)
    count = int(_num_used(num_samples, fraction))
    return np.sort(key.numpy().permutation(num_samples)[:count])


def _num_used(num_samples: Integers | int, fraction: float) -> Integers:
    """Return how many of each number of samples."""
    rounded = np.asarray(fraction * num_samples + 0.5).astype(np.int64)
    return np.minimum(num_samples, np.maximum(1, rounded))


def keep_back(
    samples: Integers, fraction: float, key: RandomKey
) -> tuple[Integers, Integers]:
    """Return the sorted samples that the server keeps, and those for the clients."""
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
    """Return how ``split`` assigns a part of a data set."""
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
    """Return what a split looks at: no images, which are too many to copy."""
    clients, domains = arrays.client_ids, arrays.domain_ids
    return LabelledArrays(
        arrays.images[:0],
        arrays.labels[positions],
        None if clients is None else clients[positions],
        None if domains is None else domains[positions],
    )


@dataclass(frozen=True, eq=False)
class ClientPart:
    """One client's samples; it may have none."""

    name: str  # a decimal number, padded: the order of names is that of the numbers
    seen: bool  # whether the client is there during training
    train: Integers  # sorted int64 indices into the training split, as ``validation``
    validation: Integers
    test: Integers  # sorted int64 indices into the test split
    # What a test example of each label counts, shape (c,); None: all the same.
    class_weights: ClassWeights | None = None
    # What the data calls the client, fit for a file's name; empty where it does not.
    # Nothing random depends on it.
    title: str = ""

    @property
    def shown(self) -> str:
        """What tables and files call the client."""
        return self.title or self.name


@dataclass(frozen=True, eq=False)
class Clients(Sequence[ClientPart]):
    """The clients of a partition, in the order of their names.

    What all have is in columns; a client's samples are found when it is asked for.
    """

    names: Sequence[str]
    titles: Sequence[str]  # see `ClientPart.title`; empty where the data has none
    seen: NDArray[np.bool_]  # shape (M,)
    sizes: Integers  # samples to train, to validate and to test, shape (3, M)
    part: Callable[[int], ClientPart]
    # What the samples follow from, where that is less than what they are.
    origin: Sequence[bytes] = ()

    @classmethod
    def of(cls, parts: Sequence[ClientPart]) -> "Clients":
        """Return the clients with these samples."""
        splits = [(one.train, one.validation, one.test) for one in parts]
        sizes = np.array([[len(part) for part in one] for one in splits]).T
        return cls(
            [one.name for one in parts],
            [one.title for one in parts] if any(one.title for one in parts) else (),
            np.array([one.seen for one in parts], dtype=bool),
            sizes.reshape(3, len(parts)),
            parts.__getitem__,
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, client: int) -> ClientPart: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[ClientPart]: ...
    def __getitem__(self, client: int | slice) -> ClientPart | Sequence[ClientPart]:
        if isinstance(client, slice):
            return [self.part(one) for one in range(len(self))[client]]
        return self.part(range(len(self))[client])


@dataclass(frozen=True, eq=False)
class PartsByName(Mapping[str, ClientPart]):
    """The clients of a partition by name; each is found when it is asked for."""

    clients: Clients

    def place(self, name: str) -> int:
        """Return the position of a client among all."""
        names = self.clients.names
        place = bisect.bisect_left(names, name)
        if place == len(names) or names[place] != name:
            raise KeyError(name)
        return place

    def __getitem__(self, name: str) -> ClientPart:
        return self.clients[self.place(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.clients.names)

    def __len__(self) -> int:
        return len(self.clients)


@dataclass(frozen=True, eq=False)
class Partition:
    """Who has which samples."""

    clients: Clients
    # What the server keeps: sorted int64 indices into the training split.
    proxy: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))


def make_partition(
    dataset: Dataset, choice: Choice[Settings], run_key: RandomKey
) -> Partition:
    """Split an experiment's data set over its clients."""
    settings = choice.settings
    if not isinstance(settings, PartitionSettings):
        raise TypeError(f"expected PartitionSettings, found {type(settings).__name__}")
    part = settings.used_fraction
    key = run_key.child("partition")
    train = part_used(len(dataset.train), part, key.child("used", "train"))
    test = part_used(len(dataset.test), part, key.child("used", "test"))
    kept, rest = keep_back(train, settings.proxy_fraction, key.child("proxy"))
    own = key.child("assignment")

    def split(one: Dataset) -> Assignment:
        if choice.entry is not None:
            return own_partition(choice, one, own)
        return PARTITIONS[choice.name].split(one, settings, own)

    assignment = assign_part(dataset, rest, test, split)
    hold_out = hold_out_last if dataset.spec.dtype == "token" else hold_out_random
    return replace(partition_of(assignment, settings, key, hold_out), proxy=kept)


def partition_of(
    assignment: Assignment,
    settings: PartitionSettings,
    key: RandomKey,
    hold_out: HoldOut = hold_out_random,
) -> Partition:
    """Name the clients, hold out validation data and choose the unseen clients."""
    num_clients, fraction = len(assignment.train), settings.validation_fraction
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
            # Its validation samples take the place of the test split.
            test, own_weights = validation, None
            again = key.child("second validation", name)
            train, validation = hold_out(train, fraction, again)
        if not is_seen:
            # It learns from a part of what it has.
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
    """Return what `Clients.sizes` are, without drawing any sample."""
    validation = _num_held_out(trained, settings.validation_fraction)
    train = trained - validation
    if settings.evaluate_on == "validation":
        tested, validation = (
            validation,
            _num_held_out(train, settings.validation_fraction),
        )
        train = train - validation
    if settings.unseen_train_fraction != 1:
        train, validation = (
            np.where(seen, one, _num_used(one, settings.unseen_train_fraction))
            for one in (train, validation)
        )
    return np.array([train, validation, tested])


def client_names(num_clients: int) -> tuple[str, ...]:
    """Return "0000", "0001", ...; longer where four digits are too few."""
    width = max(_MIN_NAME_WIDTH, len(str(num_clients - 1)))
    return tuple(f"{number:0{width}d}" for number in range(num_clients))


def titles_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return names that files can have and that differ, also where case does not count.

    Letters and digits of any alphabet stay, and so do ``.``, ``_`` and ``-``.
    """
    taken = set[str]()
    titles = []
    for name in names:
        kept = _UNFIT.sub("_", name)
        short = kept.lstrip("._-")[:_LONGEST_TITLE] or "client"
        others = (f"{short}-{number}" for number in itertools.count(2))
        title = next(
            one
            for one in itertools.chain([short], others)
            if one.casefold() not in taken
        )
        taken.add(title.casefold())
        titles.append(title)
    return tuple(titles)


def fingerprint(partition: Partition) -> str:
    """Return the SHA-256, in hex, of names, seen flags and indices.

    Of more than `MOST_DRAWN` clients it is that of what the indices follow from.
    """
    digest, clients = hashlib.sha256(), partition.clients
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


def export_shares(dataset: Dataset, partition: Partition, folder: Path) -> list[str]:
    """Write each client's share of a data set to a file; return the files' names."""
    if folder.exists():
        raise DataError(f"{folder} is there already; expected a new folder")
    task = to_jsonable_python(sites_settings(task_of(dataset)))
    agreement: dict[str, Any] = {"data": {"name": SITES, **task}, "clients": {}}
    names = {"class_names": np.array(dataset.class_names)}
    if dataset.feature_names:
        names["feature_names"] = np.array(dataset.feature_names)
    try:
        with whole_folder(folder) as draft:
            for client in partition.clients:
                arrays: dict[str, Any] = dict(names)
                about: dict[str, Any] = {"seen": client.seen}
                for split, source, positions in (
                    ("train", dataset.train, client.train),
                    ("validation", dataset.train, client.validation),
                    ("test", dataset.test, client.test),
                ):
                    arrays[f"{split}_inputs"] = np.asarray(source.images[positions])
                    arrays[f"{split}_labels"] = np.asarray(source.labels[positions])
                    about[f"num_{split}"] = len(positions)
                np.savez(draft / f"{client.shown}.npz", **arrays)
                agreement["clients"][client.shown] = about
            (draft / LABELS_FILE).write_text(json.dumps(agreement, indent=2))
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from error
    return [f"{client.shown}.npz" for client in partition.clients]

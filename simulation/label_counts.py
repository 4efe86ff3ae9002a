"""How many examples of each label the virtual clients have, kept beside a run."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from knnper.config.errors import RunError
from knnper.data.dataset import LabelledArrays
from knnper.durable_files import write_atomically
from simulation.partition.assignment import Integers
from simulation.virtual_clients import VirtualClients

PARTITION = "partition.json"
"""In the folder of a run over virtual clients."""

Counts = tuple[int, ...]


@dataclass(frozen=True)
class ClientCounts:
    """One client's examples by label.

    Attributes
    ----------
    client, seen
        Its name, and whether it could take part in training.
    train, validation, test
        Examples of each class in that split, c numbers.
    """

    client: str
    seen: bool
    train: Counts
    validation: Counts
    test: Counts


@dataclass(frozen=True)
class LabelCounts:
    """A partition as counts.

    Attributes
    ----------
    class_names
        c of them, in the order of the labels.
    clients
        In the order of their names.
    """

    class_names: tuple[str, ...]
    clients: tuple[ClientCounts, ...]


_LABEL_COUNTS = TypeAdapter(LabelCounts)


def count_labels(clients: VirtualClients) -> LabelCounts:
    """Return what each client has of each label."""
    data = clients.dataset
    num_classes = data.spec.num_classes
    counted = [
        ClientCounts(
            part.name,
            part.seen,
            train=_counts(data.train, part.train, num_classes),
            validation=_counts(data.train, part.validation, num_classes),
            test=_counts(data.test, part.test, num_classes),
        )
        for part in clients.parts.values()
    ]
    return LabelCounts(tuple(data.class_names), tuple(counted))


def keep_label_counts(clients: VirtualClients, run_folder: Path) -> None:
    """Write ``partition.json``, unless the run has it."""
    path = run_folder / PARTITION
    if not path.exists():
        write_atomically(path, f"{json.dumps(asdict(count_labels(clients)))}\n")


def read_label_counts(run_folder: Path) -> LabelCounts | None:
    """Return the content of ``partition.json``; None where a run has none.

    Raises
    ------
    RunError
        If the file is damaged.
    """
    path = run_folder / PARTITION
    try:
        return _LABEL_COUNTS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise RunError(
            f"{path} is damaged, expected the label counts of a simulation; remove it, "
            "and reports leave the picture of the split out"
        ) from error


def _counts(split: LabelledArrays, indices: Integers, num_classes: int) -> Counts:
    found = np.bincount(split.labels[indices], minlength=num_classes)
    return tuple(found.tolist())

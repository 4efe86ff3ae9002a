"""The label counts of every client, kept in a run's folder as ``partition.json``."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from knnper.data.examples import LabelledArrays
from knnper.files import read_document, write_atomically
from knnper.settings import LARGEST_COUNT
from knnper.simulation.partition.allocation import Integers
from knnper.simulation.partition.split import MOST_DRAWN
from knnper.simulation.virtual_clients import VirtualClients

log = logging.getLogger(__name__)
PARTITION = "partition.json"  # in the folder of a run over virtual clients
Counts = tuple[Annotated[int, Field(ge=0, le=LARGEST_COUNT)], ...]


@dataclass(frozen=True)
class ClientCounts:
    """One client's examples by label."""

    client: str
    seen: bool
    train: Counts
    validation: Counts
    test: Counts


@dataclass(frozen=True)
class LabelCounts:
    """A partition as counts."""

    class_names: tuple[str, ...]
    clients: tuple[ClientCounts, ...]
    num_skipped: int = 0  # examples that could not be read

    def __post_init__(self) -> None:
        """Reject counts for another number of labels."""
        for client in self.clients:
            for counts in (client.train, client.validation, client.test):
                if len(counts) != len(self.class_names):
                    raise ValueError(
                        f"{client.client} has {len(counts)} counts for "
                        f"{len(self.class_names)} labels"
                    )

    @property
    def local(self) -> Integers:
        """Training and validation examples by client and label, shape (M, c)."""
        counts = [np.add(client.train, client.validation) for client in self.clients]
        return np.array(counts, dtype=np.int64)


def count_labels(clients: VirtualClients) -> LabelCounts:
    """Count each client's examples of each label."""
    data = clients.dataset

    def counts(split: LabelledArrays, indices: Integers) -> Counts:
        labels = split.labels[indices]
        return tuple(np.bincount(labels, minlength=data.spec.num_classes).tolist())

    counted = [
        ClientCounts(
            part.shown,
            part.seen,
            train=counts(data.train, part.train),
            validation=counts(data.train, part.validation),
            test=counts(data.test, part.test),
        )
        for part in clients.parts.values()
    ]
    return LabelCounts(tuple(data.class_names), tuple(counted), data.num_skipped)


def keep_label_counts(clients: VirtualClients, run_folder: Path) -> None:
    """Write ``partition.json`` unless the run has it, and warn of skipped examples.

    Partitions of more than `MOST_DRAWN` clients have no such file.
    """
    if clients.dataset.num_skipped:
        log.warning(
            "examples that cannot be read are skipped: %d; "
            "data.on_error=refuse lists them",
            clients.dataset.num_skipped,
        )
    path = run_folder / PARTITION
    if not path.exists() and len(clients.parts) <= MOST_DRAWN:
        write_atomically(path, f"{json.dumps(asdict(count_labels(clients)))}\n")


def read_label_counts(run_folder: Path) -> LabelCounts | None:
    """Return the content of ``partition.json``; None where a run has none."""
    fix = "remove it, and reports leave out the chart of the partition"
    return read_document(LabelCounts, run_folder / PARTITION, fix)

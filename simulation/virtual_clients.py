"""Virtual clients: the shares of a central data set, made on demand."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from knnper.data.dataset import Dataset
from knnper.data.examples import ClientData, Examples
from server.roster import Member
from simulation.partition.split import ClientPart, Partition


@dataclass(frozen=True)
class VirtualClients:
    """The data source of a simulation.

    Attributes
    ----------
    dataset
        The central data, memory-mapped and shared by all workers.
    parts
        Each client's share, by name.
    """

    dataset: Dataset
    parts: dict[str, ClientPart]

    @classmethod
    def of(cls, dataset: Dataset, partition: Partition) -> "VirtualClients":
        """Return the virtual clients of ``partition``."""
        return cls(dataset, {part.name: part for part in partition.clients})

    def data(self, client: str) -> ClientData:
        """Return what ``client`` learns from, copied out of the memory map."""
        part = self.parts[client]
        return ClientData(
            train=self.dataset.train.examples_at(part.train),
            validation=self.dataset.train.examples_at(part.validation),
        )

    def test(self, client: str) -> Examples:
        """Return the test split of ``client``, copied out of the memory map."""
        return self.dataset.test.examples_at(self.parts[client].test)

    def class_weights(self, client: str) -> Tensor | None:
        """Return what a test example of each label counts, float64 (c,), or None."""
        weights = self.parts[client].class_weights
        return None if weights is None else torch.from_numpy(weights)

    def is_seen(self, client: str) -> bool:
        """Return whether ``client`` may take part in training."""
        return self.parts[client].seen

    def members(self) -> Iterator[Member]:
        """Yield what the server knows of each client."""
        for part in self.parts.values():
            yield Member(
                name=part.name,
                seen=part.seen,
                num_train=len(part.train),
                num_validation=len(part.validation),
                num_test=len(part.test),
            )

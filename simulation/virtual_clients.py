"""The clients of a simulation: their data, and their entries in the roster."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from knnper.data.examples import ClientData, Dataset, Examples
from knnper.server.roster import Member
from knnper.simulation.partition.allocation import Integers
from knnper.simulation.partition.clients import Clients, Partition, PartsByName


@dataclass(frozen=True)
class VirtualClients:
    """The data source of a simulation."""

    dataset: Dataset
    parts: PartsByName

    @classmethod
    def of(cls, dataset: Dataset, partition: Partition) -> "VirtualClients":
        """Return the virtual clients of ``partition``."""
        return cls(dataset, PartsByName(partition.clients))

    def data(self, client: str) -> ClientData:
        """Return the training and validation data, copied out of the memory map."""
        part = self.parts[client]
        return ClientData(
            train=self.dataset.train.examples_at(part.train),
            validation=self.dataset.train.examples_at(part.validation),
        )

    def test(self, client: str) -> Examples:
        """Return the test split of ``client``, copied out of the memory map."""
        return self.dataset.test.examples_at(self.parts[client].test)

    def test_names(self, client: str) -> Integers:
        """Return the indices into the data set's test split."""
        return self.parts[client].test

    def class_weights(self, client: str) -> Tensor | None:
        """Return the weight of a test example of each label, float64 (c,), or None."""
        weights = self.parts[client].class_weights
        return None if weights is None else torch.from_numpy(weights)

    def is_seen(self, client: str) -> bool:
        """Return whether ``client`` may take part in training."""
        return bool(self.parts.clients.seen[self.parts.place(client)])


@dataclass(frozen=True, eq=False)
class VirtualMembers(Iterable[Member]):
    """Roster entries, computed on access: there may be a million clients."""

    clients: Clients

    def __iter__(self) -> Iterator[Member]:
        clients = self.clients
        yield from map(
            Member,
            clients.names,
            clients.seen.tolist(),
            *clients.sizes.tolist(),
            [False] * len(clients),
            clients.titles or [""] * len(clients),
        )

"""Virtual clients: the shares of a central data set, made on demand."""

from dataclasses import dataclass

from knnper.data.dataset import Dataset
from knnper.data.examples import ClientData, Examples
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

    def is_seen(self, client: str) -> bool:
        """Return whether ``client`` may take part in training."""
        return self.parts[client].seen

    def names(self) -> list[str]:
        """Return all clients, sorted."""
        return sorted(self.parts)

    def trainable(self) -> dict[str, int]:
        """Return the number of training examples of each client that may take part.

        These are the seen ones with data, sorted by name.
        """
        sizes = {name: len(self.parts[name].train) for name in self.names()}
        return {
            name: size
            for name, size in sizes.items()
            if self.parts[name].seen and size > 0
        }

    def num_validation(self) -> dict[str, int]:
        """Return the number of validation examples of each `trainable` client."""
        return {name: len(self.parts[name].validation) for name in self.trainable()}

    def sizes(self) -> dict[str, int]:
        """Return the number of images of each client, in all splits; sorted by name."""
        return {name: self.parts[name].num_examples for name in self.names()}

    def seen(self) -> frozenset[str]:
        """Return the clients that are not held out."""
        return frozenset(name for name, part in self.parts.items() if part.seen)

"""Gaussian clusters, one a label, and a memory that compares everything."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from knnper.datastore.examples import Contents, Ids, Neighbors
from knnper.seeding import RandomKey

CENTERS = 4.0 * np.eye(8)


@dataclass(frozen=True)
class ListedMemory:
    """Examples with the ids 1, 2, ..."""

    embeddings: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def contents(self) -> Contents:
        ids = np.arange(1, len(self) + 1)
        return Contents(ids, self.labels.numpy(), ids.astype(np.float64))

    def vectors(self, ids: Ids) -> Tensor:
        return self.embeddings[torch.from_numpy(ids) - 1]

    def search(self, queries: Tensor, num_neighbors: int) -> Neighbors:
        differences = queries.double()[:, None] - self.embeddings.double()
        squared = differences.square().sum(dim=2)
        positions = squared.argsort(dim=1, stable=True)[:, :num_neighbors]
        return Neighbors(
            squared.gather(1, positions), self.labels[positions], positions + 1
        )


def draw(num_examples: int, labels: list[int], key: RandomKey) -> tuple[Tensor, Tensor]:
    """Return embeddings and labels, each equally likely one of ``labels``."""
    rng = key.numpy()
    drawn = rng.choice(labels, size=num_examples)
    noise = rng.normal(size=(num_examples, CENTERS.shape[1]))
    embeddings = CENTERS[drawn] + noise * (drawn[:, None] + 1) / 4
    return torch.from_numpy(embeddings).float(), torch.from_numpy(drawn)

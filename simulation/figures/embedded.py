"""Images as the global model of a run sees them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from knnper.data.dataset import LabelledArrays
from simulation.partition.assignment import Integers
from simulation.trained_model import TrainedModel


@dataclass(frozen=True, eq=False)
class Embedded:
    """n images, embedded.

    Attributes
    ----------
    embeddings
        φ(x), float32 of shape (n, p).
    probabilities
        The global model's, shape (n, c).
    labels
        int64, shape (n,).
    """

    embeddings: Tensor
    probabilities: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def slice(self, start: int, stop: int) -> "Embedded":
        """Return the images at ``start`` to ``stop``, less that."""
        return Embedded(
            self.embeddings[start:stop],
            self.probabilities[start:stop],
            self.labels[start:stop],
        )

    def at(self, positions: Integers) -> "Embedded":
        """Return the images at ``positions``, int64 of shape (m,)."""
        chosen = torch.from_numpy(positions)
        return Embedded(
            self.embeddings[chosen], self.probabilities[chosen], self.labels[chosen]
        )

    def followed_by(self, other: "Embedded") -> "Embedded":
        """Return these images and then ``other``'s."""
        return Embedded(
            torch.cat([self.embeddings, other.embeddings]),
            torch.cat([self.probabilities, other.probabilities]),
            torch.cat([self.labels, other.labels]),
        )

    def num_correct(self) -> int:
        """Return how many the global model gets right."""
        return int((self.probabilities.argmax(dim=1) == self.labels).sum())


@dataclass(frozen=True)
class Embedder:
    """Embeds images of a run's data set.

    Attributes
    ----------
    model
        The run's global model.
    """

    model: TrainedModel

    def train(self, indices: Integers) -> Embedded:
        """Return the images of the training split at ``indices``, shape (n,)."""
        return self._embedded(self.model.dataset.train, indices)

    def test(self, indices: Integers) -> Embedded:
        """Return the images of the test split at ``indices``, shape (n,)."""
        return self._embedded(self.model.dataset.test, indices)

    def train_in_parts(self, parts: Sequence[Integers]) -> Iterator[Embedded]:
        """Yield `train` of each part; embedded together, which is faster."""
        whole = self.train(np.concatenate(parts))
        start = 0
        for part in parts:
            yield whole.slice(start, start + len(part))
            start += len(part)

    def _embedded(self, split: LabelledArrays, indices: Integers) -> Embedded:
        examples = split.examples_at(indices)
        embeddings = self.model.embed(examples.images)
        return Embedded(embeddings, self.model.head(embeddings), examples.labels)

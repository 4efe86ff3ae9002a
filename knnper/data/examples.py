"""Labelled images as every method sees them, and a client's share of a data set."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Examples:
    """Some labelled images, in memory.

    Attributes
    ----------
    images
        uint8, shape (n, height, width, channels).
    labels
        int64, shape (n,).
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def take(self, positions: Tensor) -> "Examples":
        """Return the examples at ``positions``, int64 of shape (m,)."""
        return Examples(self.images[positions], self.labels[positions])

    def join(self, other: "Examples") -> "Examples":
        """Return these examples followed by ``other``'s."""
        return Examples(
            torch.cat([self.images, other.images]),
            torch.cat([self.labels, other.labels]),
        )


@dataclass(frozen=True)
class ClientData:
    """What a method may see of a client's data: never the test split.

    Attributes
    ----------
    train
        What the client trains on.
    validation
        Held out from training; every hyper-parameter is chosen on it.
    """

    train: Examples
    validation: Examples

    def train_and_validation(self) -> Examples:
        """Return both splits, train first: what is left to learn from once tuned."""
        return self.train.join(self.validation)


@dataclass(frozen=True)
class InputSpec:
    """What a model must know about the data.

    Attributes
    ----------
    image_shape
        (height, width, channels).
    num_classes
        c, the number of labels.
    mean, std
        Per channel, of pixel values scaled to [0, 1]; used to normalise.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def no_examples(spec: InputSpec) -> Examples:
    """Return an empty set of examples of the data set described by ``spec``."""
    return Examples(
        torch.empty((0, *spec.image_shape), dtype=torch.uint8),
        torch.empty((0,), dtype=torch.int64),
    )

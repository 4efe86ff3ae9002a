"""Labelled inputs as every method sees them, and a client's share of a data set."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

InputDtype: TypeAlias = Literal["uint8", "float32", "token"]
StoredDtype: TypeAlias = Literal["uint8", "float32"]

_STORED_DTYPES: Mapping[InputDtype, StoredDtype] = MappingProxyType(
    {"uint8": "uint8", "float32": "float32", "token": "uint8"}
)
TORCH_DTYPES: Mapping[InputDtype, torch.dtype] = MappingProxyType(
    {"uint8": torch.uint8, "float32": torch.float32, "token": torch.uint8}
)

KINDS_OF_INPUT: Mapping[InputDtype, str] = MappingProxyType(
    {
        "uint8": "images (uint8)",
        "float32": "rows of features (float32)",
        "token": "text (token)",
    }
)
"""What inputs of each type are called where they are refused."""


@dataclass(frozen=True)
class Examples:
    """Some labelled images, rows of features or windows of text, in memory.

    Attributes
    ----------
    images
        Shape (n, height, width, channels), of the type that `InputSpec.stored_dtype`
        says. A row of d features is an image of shape (1, 1, d), and so is a window of
        d characters.
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
        (height, width, channels); (1, 1, d) for rows of d features, and for windows of
        d characters.
    num_classes
        c, the number of labels.
    mean, std
        Per channel; used to normalise. For ``uint8`` they are those of pixel values
        scaled to [0, 1], for ``float32`` those of the values as they are. Empty for
        ``token``.
    dtype
        ``uint8`` for images, ``float32`` for features, ``token`` for text: ids from 0
        to c - 1, of what the labels are also of.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: InputDtype = "uint8"

    @property
    def stored_dtype(self) -> StoredDtype:
        """The type of the numbers that an input is made of: ids of text are uint8."""
        return _STORED_DTYPES[self.dtype]


def no_examples(spec: InputSpec) -> Examples:
    """Return an empty set of examples of the data set described by ``spec``."""
    return Examples(
        torch.empty((0, *spec.image_shape), dtype=TORCH_DTYPES[spec.dtype]),
        torch.empty((0,), dtype=torch.int64),
    )

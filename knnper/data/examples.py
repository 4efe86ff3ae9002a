"""Labelled inputs as every method sees them, and the description of a data set."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.settings import NonNegativeInt, PositiveInt, Settings

InputDtype: TypeAlias = Literal["uint8", "float32", "token", "ids"]
StoredDtype: TypeAlias = Literal["uint8", "float32", "int32"]
KINDS_OF_INPUT: Mapping[InputDtype, str] = {
    "uint8": "images (uint8)",
    "float32": "rows of features (float32)",
    "token": "text (token)",
    "ids": "tokenised text (ids)",
}
"""Name of each input type in error messages."""
TEXTS: tuple[InputDtype, ...] = ("token", "ids")
"""Input types made of ids, which have no mean and standard deviation."""
LARGEST_PIXEL = 255
_STORED: Mapping[InputDtype, StoredDtype] = {
    "uint8": "uint8",
    "float32": "float32",
    "token": "uint8",
    "ids": "int32",
}


@dataclass(frozen=True)
class Examples:
    """Labelled images, rows of features or windows of text, in memory.

    Attributes
    ----------
    images
        Shape (n, height, width, channels), of type `InputSpec.stored_dtype`. A row of
        d features is stored as an image of shape (1, 1, d), and so is a window of d
        characters.
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
        """Concatenate these examples and those of ``other``."""
        return Examples(
            torch.cat([self.images, other.images]),
            torch.cat([self.labels, other.labels]),
        )


@dataclass(frozen=True)
class ClientData:
    """The part of a client's data that a method may read: all but the test split.

    Attributes
    ----------
    train
        Training split.
    validation
        Validation split, on which hyper-parameters are chosen.
    """

    train: Examples
    validation: Examples

    @property
    def num_examples(self) -> int:
        """Number of examples in both splits."""
        return len(self.train) + len(self.validation)

    def train_and_validation(self) -> Examples:
        """Concatenate both splits, train first, for the final model after tuning."""
        return self.train.join(self.validation)


@dataclass(frozen=True)
class Vocabulary(Settings):
    """Size, padding id and tokenizer of tokenised text.

    Attributes
    ----------
    size
        Ids go from 0 to size - 1.
    padding_id
        Id appended to texts of fewer than T ids. Models attend to positions where
        ``ids != padding_id``.
    tokenizer
        Digest of the tokenizer; empty if unknown. Sites with a tokenizer of another
        digest are rejected.
    """

    size: PositiveInt
    padding_id: NonNegativeInt
    tokenizer: str = ""

    def __post_init__(self) -> None:
        if self.padding_id >= self.size:
            raise ValueError(
                f"found the padding_id {self.padding_id}, expected one of the "
                f"{self.size} ids from 0 to {self.size - 1}"
            )


@dataclass(frozen=True)
class InputSpec:
    """Form of the inputs and number of classes, from which a model is built.

    Attributes
    ----------
    image_shape
        (height, width, channels); (1, 1, d) for rows of d features, for windows of d
        characters, and for texts of d ids.
    num_classes
        Number of labels, c.
    mean, std
        Per channel, for normalisation. For ``uint8`` they are computed on pixels
        scaled to [0, 1], for ``float32`` on the values themselves. Empty for text.
    dtype
        ``uint8`` for images, ``float32`` for features, ``token`` for characters with
        the next character as label (inputs and labels are ids from 0 to c - 1),
        ``ids`` for tokenised text with classes as labels. Models receive both kinds of
        text as int64 of shape (n, T, 1, 1), see `TokenIds`.
    vocabulary
        Vocabulary of ``ids``; None for all other types.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: InputDtype = "uint8"
    vocabulary: Vocabulary | None = None

    def __post_init__(self) -> None:
        if (self.dtype == "ids") != (self.vocabulary is not None):
            raise ValueError(
                f"found dtype {self.dtype!r} with the vocabulary {self.vocabulary}, "
                "expected a vocabulary with 'ids', and with 'ids' alone"
            )

    @property
    def stored_dtype(self) -> StoredDtype:
        """Type in which inputs are stored."""
        return _STORED[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        """`stored_dtype` as a type of torch."""
        dtype: torch.dtype = getattr(torch, self.stored_dtype)
        return dtype

    @property
    def largest_whole(self) -> int:
        """Largest value of inputs that are whole numbers from 0 on."""
        if self.vocabulary is not None:
            return self.vocabulary.size - 1
        return LARGEST_PIXEL if self.dtype == "uint8" else self.num_classes - 1


def no_examples(spec: InputSpec) -> Examples:
    """Return zero examples with the input form of ``spec``."""
    images = torch.empty((0, *spec.image_shape), dtype=spec.torch_dtype)
    return Examples(images, torch.empty((0,), dtype=torch.int64))


def blank_input(spec: InputSpec) -> Tensor:
    """Return one input of zeros, shape (1, *image_shape), to try a model with."""
    return torch.zeros((1, *spec.image_shape), dtype=spec.torch_dtype)


@dataclass(frozen=True, eq=False)
class LabelledArrays:
    """One split of a data set, read-only.

    Attributes
    ----------
    images
        Shape (n, height, width, channels), of the spec's stored type; images (uint8)
        are memory-mapped.
    labels
        int64, shape (n,).
    client_ids
        int64, shape (n,): the client of each image; None if the data names no clients.
    domain_ids
        int64, shape (n,): the domain of each image; None if the data has no domains.
    """

    images: NDArray[np.uint8 | np.float32]
    labels: NDArray[np.int64]
    client_ids: NDArray[np.int64] | None = None
    domain_ids: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def examples_at(self, indices: NDArray[np.int64]) -> Examples:
        """Copy the examples at ``indices``, int64 of shape (m,)."""
        return Examples(
            torch.from_numpy(np.asarray(self.images[indices])),
            torch.from_numpy(np.asarray(self.labels[indices])),
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """A central data set, before it is partitioned over clients.

    Attributes
    ----------
    name
        The name in the catalogue.
    train, test
        The two splits of the data set.
    spec
        Form of the inputs and number of classes.
    class_names
        Name of each of the ``spec.num_classes`` labels.
    coarse_of
        Coarse label of each label (CIFAR-100's superclasses); None if labels have one
        level.
    feature_names
        Name of each feature, for rows of features that are named.
    domain_names
        Name of each domain; empty if the data set has no domains.
    client_names
        Name of each client that ``client_ids`` refer to; empty if the data names none.
    num_skipped
        Number of examples that could not be read and were skipped.
    """

    name: str
    train: LabelledArrays
    test: LabelledArrays
    spec: InputSpec
    class_names: tuple[str, ...]
    coarse_of: tuple[int, ...] | None = None
    feature_names: tuple[str, ...] = ()
    domain_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    num_skipped: int = 0


@dataclass(frozen=True)
class DataFormat(Settings, ABC):
    """Base class of the data formats of an experiment: settings with a loader.

    A subclass is a frozen dataclass in a file of its own, listed in the catalogue.

    Attributes
    ----------
    name
        Name of the format in experiment files.
    title, summary
        Title and one-line description for listings.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    settings_type: ClassVar[type[Settings]]

    def __init_subclass__(cls) -> None:
        cls.settings_type = cls

    @abstractmethod
    def load(self) -> Dataset:
        """Load the data set; raise a `DataError` if its files are not valid."""

"""Labelled inputs as every method sees them, and the description of a data set."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.experiment import NonNegativeInt, PositiveInt, Settings

InputDtype: TypeAlias = Literal["uint8", "float32", "token", "ids"]
StoredDtype: TypeAlias = Literal["uint8", "float32", "int32"]
KINDS_OF_INPUT: Mapping[InputDtype, str] = {
    "uint8": "images (uint8)",
    "float32": "rows of features (float32)",
    "token": "text (token)",
    "ids": "tokenised text (ids)",
}
"""What inputs of each type are called where they are refused."""
TEXTS: tuple[InputDtype, ...] = ("token", "ids")
"""The types that are whole numbers without a mean and a deviation."""
LARGEST_PIXEL = 255
_STORED: Mapping[InputDtype, StoredDtype] = {
    "uint8": "uint8",
    "float32": "float32",
    "token": "uint8",
    "ids": "int32",
}


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

    @property
    def num_examples(self) -> int:
        """Examples in both splits."""
        return len(self.train) + len(self.validation)

    def train_and_validation(self) -> Examples:
        """Return both splits, train first: what is left to learn from once tuned."""
        return self.train.join(self.validation)


@dataclass(frozen=True)
class Vocabulary(Settings):
    """What the ids of tokenised text mean.

    Attributes
    ----------
    size
        Ids go from 0 to size - 1.
    padding_id
        The id that fills up a text of fewer than T ids, behind it. What a model attends
        to is ``ids != padding_id``.
    tokenizer
        A digest of the tokenizer: sites whose tokenizer has another one are refused.
        Empty where it is not known.
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
    """What a model must know about the data.

    Attributes
    ----------
    image_shape
        (height, width, channels); (1, 1, d) for rows of d features, for windows of d
        characters, and for texts of d ids.
    num_classes
        c, the number of labels.
    mean, std
        Per channel; used to normalise. For ``uint8`` they are those of pixel values
        scaled to [0, 1], for ``float32`` those of the values as they are. Empty for
        text.
    dtype
        ``uint8`` for images, ``float32`` for features, ``token`` for text of which the
        next character is learned: ids from 0 to c - 1, of what the labels are also of.
        ``ids`` for text that a tokenizer has made ids of, int32, whose labels are
        classes; models get them as int64 of shape (n, T, 1, 1), see `TokenIds`.
    vocabulary
        What the ids of ``ids`` mean: how many there are and which is padding. None for
        all other types.
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
        """The type of the numbers that an input is made of."""
        return _STORED[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same, as torch calls it."""
        found: torch.dtype = getattr(torch, self.stored_dtype)
        return found

    @property
    def largest_whole(self) -> int:
        """The largest of the whole numbers, from 0 on, that an input is made of."""
        if self.vocabulary is not None:
            return self.vocabulary.size - 1
        return LARGEST_PIXEL if self.dtype == "uint8" else self.num_classes - 1


def no_examples(spec: InputSpec) -> Examples:
    """Return an empty set of examples of the data set described by ``spec``."""
    images = torch.empty((0, *spec.image_shape), dtype=spec.torch_dtype)
    return Examples(images, torch.empty((0,), dtype=torch.int64))


@dataclass(frozen=True, eq=False)
class LabelledArrays:
    """One split of a data set, read-only.

    Attributes
    ----------
    images
        Shape (n, height, width, channels), of the type that the spec says; images
        (uint8) are memory-mapped.
    labels
        int64, shape (n,).
    client_ids
        int64, shape (n,): who each image belongs to, where the data set says so.
    domain_ids
        int64, shape (n,): which domain each image is from, where the data set says so.
    """

    images: NDArray[np.uint8 | np.float32]
    labels: NDArray[np.int64]
    client_ids: NDArray[np.int64] | None = None
    domain_ids: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def examples_at(self, indices: NDArray[np.int64]) -> Examples:
        """Return copies of the examples at ``indices``, int64 of shape (m,)."""
        return Examples(
            torch.from_numpy(np.asarray(self.images[indices])),
            torch.from_numpy(np.asarray(self.labels[indices])),
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """A central data set, before it is split over clients.

    Attributes
    ----------
    name
        The name in the catalogue.
    train, test
        The two official splits.
    spec
        What a model must know about the data.
    class_names
        One for each of the ``spec.num_classes`` labels.
    coarse_of
        For each label, the coarse label it belongs to (CIFAR-100's superclasses);
        None where the data set has one level of labels.
    feature_names
        For rows of features, what each of them is called.
    domain_names
        One for each of the domains that the images are from; empty where the data set
        says nothing of them.
    client_names
        What the data calls each of the clients that ``client_ids`` number; empty where
        it names none.
    num_skipped
        How many examples could not be read, and were left out.
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
    """Base of what the section ``data`` of an experiment can name: settings that load.

    A subclass is a frozen dataclass in a file of its own, listed in the catalogue.

    Attributes
    ----------
    name
        In experiments.
    title, summary
        For people.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    settings_type: ClassVar[type[Settings]]

    def __init_subclass__(cls) -> None:
        cls.settings_type = cls

    @abstractmethod
    def load(self) -> Dataset:
        """Return the data set; a `DataError` says what is wrong with its files."""

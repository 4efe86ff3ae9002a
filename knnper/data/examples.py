"""Labelled inputs as every method sees them, and a client's share of a data set."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from knnper.errors import ConfigError, DataError, Problem
from knnper.experiment import (
    Augmentation,
    NonNegativeInt,
    PositiveInt,
    Settings,
)

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


LARGEST_PIXEL = 255
_STORED: Mapping[InputDtype, StoredDtype] = {
    "uint8": "uint8",
    "float32": "float32",
    "token": "uint8",
    "ids": "int32",
}


def no_examples(spec: InputSpec) -> Examples:
    """Return an empty set of examples of the data set described by ``spec``."""
    images = torch.empty((0, *spec.image_shape), dtype=spec.torch_dtype)
    return Examples(images, torch.empty((0,), dtype=torch.int64))


FRAME = 4
"""Pixels by which a crop is moved at most; never so far that it holds no image."""


def flip(images: Tensor, mirrored: Tensor) -> Tensor:
    """Return the images, those that are ``mirrored``, bool (n,), left to right."""
    return torch.where(mirrored[:, None, None, None], images.flip(2), images)


def crop(images: Tensor, tops: Tensor, lefts: Tensor) -> Tensor:
    """Return a crop of each image's own size from the image in a black frame.

    ``tops`` and ``lefts`` are where in the framed image each crop begins, int64 of
    shape (n,): from 0 to twice the frame's width, see `frame_of`.
    """
    num_images, height, width, _ = images.shape
    rows, columns = frame_of(height), frame_of(width)
    framed = functional.pad(images, (0, 0, columns, columns, rows, rows))
    # A view of every crop there is; only the chosen ones are copied.
    crops = framed.unfold(1, height, 1).unfold(2, width, 1)
    which = torch.arange(num_images, device=images.device)
    return crops[which, tops, lefts].permute(0, 2, 3, 1)


def frame_of(length: int) -> int:
    """Return how many black pixels are added at both ends of a side of ``length``."""
    return min(FRAME, length - 1)


def require_augmentable(augmentation: Augmentation, spec: InputSpec) -> None:
    """Refuse, with a `ConfigError`, random changes to inputs that are no images."""
    problems = list(augmentation_problems(augmentation, spec.dtype))
    if problems:
        raise ConfigError(problems)


def augmentation_problems(
    augmentation: Augmentation, dtype: InputDtype
) -> Iterator[Problem]:
    """Yield why inputs of this type cannot be changed so."""
    if dtype != "uint8" and augmentation != "none":
        message = (
            f"found {augmentation!r}, but the inputs are {KINDS_OF_INPUT[dtype]}, "
            "which cannot be flipped or cropped; expected 'none'"
        )
        yield Problem("training.augmentation", message)


def _random_flip(images: Tensor, generator: np.random.Generator) -> Tensor:
    mirrored = generator.integers(0, 2, len(images)).astype(bool)
    return flip(images, torch.from_numpy(mirrored).to(images.device))


def _random_crop_flip(images: Tensor, generator: np.random.Generator) -> Tensor:
    num_images, height, width, _ = images.shape
    tops, lefts = (
        torch.from_numpy(generator.integers(0, 2 * frame_of(side) + 1, num_images))
        for side in (height, width)
    )
    cropped = crop(images, tops.to(images.device), lefts.to(images.device))
    return _random_flip(cropped, generator)


AUGMENTATIONS: Mapping[
    Augmentation, Callable[[Tensor, np.random.Generator], Tensor]
] = {
    "none": lambda images, generator: images,  # noqa: ARG005
    "flip": _random_flip,
    "crop_flip": _random_crop_flip,
}
"""``(images, generator) -> images`` by name.

Images are uint8 of shape (n, height, width, channels) on any device; the generator
alone decides what happens to them.
"""


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


_PIXELS_AT_ONCE = 2**20


def channel_statistics(
    parts: Iterable[NDArray[np.uint8]],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of pixels scaled to [0, 1].

    ``parts`` are some of the images each, uint8 of shape (n, height, width, channels).
    Computed from exact histograms, so that it does not depend on the parts. A channel
    that never varies gets a standard deviation of 1, so that it can be divided by.
    """
    histograms = np.sum([_histograms(part) for part in parts], axis=0)
    weights = histograms / histograms.sum(axis=1, keepdims=True)
    values = np.arange(256) / 255.0
    means = weights @ values
    variances = (weights * (values - means[:, None]) ** 2).sum(axis=1)
    constant = np.count_nonzero(histograms, axis=1) == 1
    deviations = np.where(constant, 1.0, np.sqrt(variances))
    return tuple(means.tolist()), tuple(deviations.tolist())


def statistics_of(
    images: NDArray[Any],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, in the unit of `InputSpec`."""
    if images.dtype == np.uint8:
        return channel_statistics([images])
    return real_statistics([images])


def real_statistics(
    parts: Iterable[NDArray[np.float32]],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, as `channel_statistics`.

    ``parts`` are float32 of shape (n, height, width, channels).
    """
    count, total, squares = 0, np.zeros(1), np.zeros(1)
    smallest, largest = np.full(1, np.inf), np.full(1, -np.inf)
    for part in parts:
        rows = part.reshape(-1, part.shape[-1]).astype(np.float64)
        # Sums of squares of deviations, joined as Chan, Golub and LeVeque (1979) do.
        apart = rows.sum(axis=0) / len(rows) - total / max(count, 1)
        both = count + len(rows)
        squares = squares + ((rows - rows.mean(axis=0)) ** 2).sum(axis=0)
        squares = squares + apart**2 * count * len(rows) / both
        count, total = both, total + rows.sum(axis=0)
        smallest = np.minimum(smallest, rows.min(axis=0))
        largest = np.maximum(largest, rows.max(axis=0))
    deviations = np.where(smallest == largest, 1.0, np.sqrt(squares / count))
    return tuple((total / count).tolist()), tuple(deviations.tolist())


def _histograms(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Count each of the 256 values in each channel; shape (channels, 256)."""
    channels = images.shape[-1]
    counts = np.zeros((channels, 256), dtype=np.int64)
    for channel in range(channels):
        pixels = images[..., channel].ravel()
        # NumPy counts a copy in which each pixel takes eight bytes.
        for start in range(0, len(pixels), _PIXELS_AT_ONCE):
            some = pixels[start : start + _PIXELS_AT_ONCE]
            counts[channel] += np.bincount(some, minlength=256)
    return counts


def normalizer(
    spec: InputSpec, device: torch.device = torch.device("cpu")
) -> Callable[[Tensor], Tensor]:
    """Return what brings stored inputs to the form that models take."""
    return TokenIds(spec) if spec.dtype in TEXTS else Normalizer(spec, device)


def require_tensor(inputs: object, num_dimensions: int | None = None) -> None:
    """Refuse tables, arrays and rows that are not in the form of stored inputs."""
    kind = type(inputs).__name__
    if isinstance(inputs, Tensor):
        if num_dimensions in (None, inputs.ndim):
            return
        kind = f"tensor of shape {tuple(inputs.shape)}"
    raise DataError(
        f"found a {kind}, expected a tensor of inputs (n, height, width, channels), "
        "rows as (n, 1, 1, features); knnper.Run.inputs makes one of a table or an "
        "array"
    )


class TokenIds:
    """Passes the ids of text on as they are, in the order of axes that models take."""

    def __init__(self, spec: InputSpec) -> None:
        self._largest = spec.largest_whole
        is_tokenised = spec.vocabulary is not None
        self._maker = "the tokenizer" if is_tokenised else "knnper.data.text.encode"

    def __call__(self, windows: Tensor) -> Tensor:
        """Return int64 of shape (n, T, 1, 1) from stored ids of shape (n, 1, 1, T)."""
        wrong = (windows < 0) | (windows > self._largest)
        if wrong.any():
            raise DataError(
                f"found the id {windows[wrong][0]} in a text, expected ids from 0 to "
                f"{self._largest}, as {self._maker} makes them"
            )
        return windows.to(torch.int64).permute(0, 3, 1, 2)


class Normalizer:
    """Standardises each channel; uint8 images are scaled to [0, 1] before."""

    def __init__(
        self, spec: InputSpec, device: torch.device = torch.device("cpu")
    ) -> None:
        mean = torch.tensor(spec.mean, dtype=torch.float32, device=device)
        std = torch.tensor(spec.std, dtype=torch.float32, device=device)
        largest = 255.0 if spec.dtype == "uint8" else 1.0
        self._scale = 1.0 / (largest * std)
        self._shift = -mean / std

    def __call__(self, images: Tensor) -> Tensor:
        """Return float32 of shape (n, channels, height, width) from stored images.

        The result keeps the channels innermost in memory (``channels_last``), which
        is how convolutions are fastest, at no cost of a copy.
        """
        require_tensor(images, num_dimensions=4)
        scaled = images.to(torch.float32, copy=True).mul_(self._scale)
        return scaled.add_(self._shift).permute(0, 3, 1, 2)

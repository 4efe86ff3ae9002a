"""The task that server and sites agree on, and the data of a site."""

import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import override

from knnper.data.dividing import SPLITS, FractionSettings, Split, clean_name
from knnper.data.examples import (
    KINDS_OF_INPUT,
    LARGEST_PIXEL,
    TEXTS,
    ClientData,
    Dataset,
    Examples,
    InputDtype,
    InputSpec,
    Vocabulary,
)
from knnper.data.split_names import split_of
from knnper.errors import DataError
from knnper.reasons import Code, SafeReason
from knnper.settings import (
    PositiveFloat,
    PositiveInt,
    Settings,
    alternatives,
)

SITES = "sites"
"""Name in an experiment's section ``data`` for data that stays at the sites."""

OnError = Literal["refuse", "skip"]
"""Handling of unreadable examples."""

ImageShape = tuple[PositiveInt, PositiveInt, PositiveInt]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
ClassName = Annotated[str, AfterValidator(clean_name), Field(min_length=1)]
FeatureName = Annotated[str, Field(min_length=1)]
MOST_NUMBERS = 2**26
"""Largest number of values of an input: 4,700 x 4,700 colour pixels, 256 MB float32."""
_TASK_KEYS = ("spec", "class_names", "feature_names")
InputForm = tuple[tuple[int, int, int], InputDtype]
"""Shape of one input, and type."""
_NUMBERS = "biuf"  # NumPy's letters for truth values, integers and floats


@dataclass(frozen=True)
class SiteTask:
    """Form of the inputs, and names of the classes and features."""

    spec: InputSpec
    class_names: tuple[str, ...]  # by label; sites match their labels by name
    feature_names: tuple[str, ...] = ()  # of rows of features, in order; may be empty

    def __post_init__(self) -> None:
        require_input_size(self.spec)


def require_input_size(spec: InputSpec) -> None:
    """Reject a huge declared shape before memory is allocated for it."""
    if min(spec.image_shape) < 1 or math.prod(spec.image_shape) > MOST_NUMBERS:
        raise ValueError(
            f"found inputs of shape {spec.image_shape}, expected positive numbers "
            f"whose product is at most {MOST_NUMBERS}"
        )


@dataclass(frozen=True)
class SitesSettings(Settings):
    """Settings of data that stays at the sites: the agreed task.

    Attributes
    ----------
    image_shape
        (height, width, channels) to which every site resizes its images; (1, 1, d) for
        rows of d features.
    class_names
        Names of the classes in the order of the labels.
    mean, std
        Per channel, of pixels scaled to [0, 1] or of features as they are. Empty for
        text.
    dtype
        ``uint8`` for images, ``float32`` for features, ``token`` for characters of
        text, ``ids`` for tokenised text.
    feature_names
        Names of the features in order, by which sites find the columns of tables. Empty
        if every site lists its columns in the agreed order.
    vocabulary
        Vocabulary of ``ids``: number of ids (``size``), id for padding (``padding_id``)
        and digest of the ``tokenizer``.
    """

    image_shape: ImageShape
    class_names: Annotated[tuple[ClassName, ...], Field(min_length=2)]
    mean: tuple[FiniteFloat, ...]
    std: tuple[PositiveFloat, ...]
    dtype: InputDtype = "uint8"
    feature_names: tuple[FeatureName, ...] = ()
    vocabulary: Vocabulary | None = None

    def __post_init__(self) -> None:
        self.task()  # rejects a vocabulary that does not fit the type
        height, width, channels = self.image_shape
        expected, why = channels, f"one for each of the {channels} channels of "
        if self.dtype in TEXTS:
            expected, why = 0, "none, since text is not normalised whatever its "
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != expected:
                raise ValueError(
                    f"found {len(values)} values of {name}, expected {why}image_shape"
                )
        num_values = height * width * channels
        if self.feature_names and len(self.feature_names) != num_values:
            raise ValueError(
                f"found {len(self.feature_names)} feature_names, expected one for "
                f"each of the {num_values} values of an input"
            )
        _require_unique("class_names", self.class_names)
        _require_unique("feature_names", self.feature_names)

    def task(self) -> SiteTask:
        """Return the agreed task."""
        spec = InputSpec(
            self.image_shape,
            len(self.class_names),
            self.mean,
            self.std,
            self.dtype,
            self.vocabulary,
        )
        return SiteTask(spec, self.class_names, self.feature_names)


def task_of(dataset: Dataset) -> SiteTask:
    """Return the task of a data set."""
    return SiteTask(dataset.spec, dataset.class_names, dataset.feature_names)


def sites_settings(task: SiteTask) -> SitesSettings:
    """Return the settings of ``task``; the inverse of `SitesSettings.task`."""
    return SitesSettings(
        image_shape=task.spec.image_shape,
        class_names=task.class_names,
        mean=task.spec.mean,
        std=task.spec.std,
        dtype=task.spec.dtype,
        feature_names=task.feature_names,
        vocabulary=task.spec.vocabulary,
    )


def parse_task(document: Mapping[str, Any], source: str) -> SiteTask:
    """Parse the task in an exported model's description, under `_TASK_KEYS`."""
    known = {key: document[key] for key in _TASK_KEYS if key in document}
    try:
        task = TypeAdapter(SiteTask).validate_python(known)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in detail["loc"])
        raise DataError(
            f"{source} describes no task: {place}: {detail['msg']}; expected spec and "
            "class_names, as an exported model has them"
        ) from error
    if len(task.class_names) != task.spec.num_classes:
        raise DataError(
            f"{source} names {len(task.class_names)} classes of "
            f"{task.spec.num_classes}; it is damaged, export the model again"
        )
    return task


def _require_unique(setting: str, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{setting} holds {twice[0]!r} more than once")


def place_of(base: Path, path: str) -> Path:
    """Resolve ``path`` relative to the folder ``base``, without ``..`` if possible."""
    joined = base / Path(path).expanduser()
    short = Path(os.path.normpath(joined))
    # Behind a symbolic link, .. has another meaning. `Path.resolve` raises for loops.
    is_same = os.path.realpath(short) == os.path.realpath(joined)
    return short if is_same else joined


@dataclass(frozen=True)
class NamedExamples:
    """Examples and their names at the site."""

    examples: Examples
    # Unique over all splits and stable: a path relative to the data folder, a value of
    # an id column, or a position such as ``train/00012``.
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.examples)


@dataclass(frozen=True)
class SiteData:
    """All data of a site, in memory."""

    train: NamedExamples
    validation: NamedExamples
    test: NamedExamples
    task: SiteTask
    # Number of dropped examples by label that the federation does not know.
    dropped: Mapping[str, int] = field(default_factory=dict)
    num_ignored: int = 0  # files beside the images with other suffixes
    warnings: tuple[str, ...] = ()  # sentences without full stop
    # Errors by example name
    unreadable: Mapping[str, str] = field(default_factory=dict)
    skips: bool = False  # whether `open_site` skips unreadable examples

    def splits(self) -> Iterator[tuple[Split, NamedExamples]]:
        """Yield the splits with their names: train, validation, test."""
        for split in SPLITS:
            yield split, getattr(self, split)

    def client_data(self) -> ClientData:
        """Return the part of the data that methods may read: all but the test split."""
        return ClientData(self.train.examples, self.validation.examples)


@dataclass(frozen=True, kw_only=True)
class LabelSettings(Settings):
    """Settings of all formats of a site's data.

    Attributes
    ----------
    label_map
        From the site's name of a label to the federation's, where they differ.
    unknown_labels
        ``error`` rejects data with labels that the federation does not know, ``drop``
        leaves these examples out.
    fractions
        Fractions of the splits of data without splits.
    on_error
        ``refuse`` raises an error that lists all unreadable examples, ``skip`` leaves
        them out and logs their number.
    """

    label_map: dict[str, str] = field(default_factory=dict)
    unknown_labels: Literal["error", "drop"] = "error"
    fractions: FractionSettings = field(default_factory=FractionSettings)
    on_error: OnError = "refuse"


@dataclass(frozen=True, kw_only=True)
class SiteSettings(LabelSettings, ABC):
    """Base class of the formats of a site's data."""

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def collect(self, base: Path, task: SiteTask | None) -> "CollectedExamples":
        """Collect the examples; paths are relative to ``base``."""


class ReadInputs(NamedTuple):
    """Inputs in memory."""

    # The readable inputs in the order of the request, (m, height, width, channels), of
    # the task's type.
    images: Tensor
    unreadable: Mapping[int, str] = {}  # errors of the others by position in the data


class SiteInputs(ABC):
    """Inputs that are read later, once labels and splits are known."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Vocabulary of tokenised text; None for other inputs."""
        return None

    @abstractmethod
    def form(self) -> InputForm:
        """Return shape and type of the inputs as they are, for data without a task."""

    @abstractmethod
    def read(
        self, positions: Sequence[int], task: SiteTask, cache: Path | None = None
    ) -> ReadInputs:
        """Read the inputs at ``positions`` in the form of ``task``."""


@dataclass(frozen=True, eq=False)
class CollectedExamples:
    """The n examples of a site before they are matched with the task."""

    source: str  # the file or folder, for errors
    names: tuple[str, ...]  # of the examples, unique
    labels: tuple[str, ...]  # of the examples, by the site's names
    inputs: SiteInputs
    splits: tuple[Split, ...] | None = None  # of the examples; None if not given
    given_splits: frozenset[Split] = frozenset()  # splits in the data, even if empty
    numbered: bool = False  # whether labels are numbers without class names
    num_ignored: int = 0  # files beside the images with other suffixes
    warnings: tuple[str, ...] = ()  # sentences without full stop
    feature_names: tuple[str, ...] = ()  # of rows of features; may be empty


@dataclass(frozen=True, eq=False)
class ArrayInputs(SiteInputs):
    """Inputs in one array of numbers, shape (n, ...); ``source`` is for errors."""

    source: str
    array: NDArray[Any]

    def form(self) -> InputForm:
        """Infer (height, width, channels) from the number of dimensions."""
        dtype: InputDtype = "uint8" if self.array.dtype == np.uint8 else "float32"
        match self.array.shape[1:]:
            case (num_features,):
                return (1, 1, num_features), dtype
            case (height, width):
                return (height, width, 1), dtype
            case (height, width, channels):
                return (height, width, channels), dtype
        raise DataError(
            f"{self.source}: found inputs of shape {_format_shape(self.array.shape)}, "
            "expected (n, height, width, channels), (n, height, width) or (n, "
            "features)",
            reason=SafeReason(Code.WRONG_SHAPE),
        )

    def select(self, features: Sequence[int]) -> "ArrayInputs":
        """Return rows (n, d) with only the features at these positions, in order."""
        rows = self.array.reshape(len(self.array), -1)
        return replace(self, array=rows[:, list(features)])

    @override
    def read(
        self,
        positions: Sequence[int],
        task: SiteTask,
        cache: Path | None = None,
    ) -> ReadInputs:
        chosen = self.array[np.asarray(positions, dtype=np.int64)]
        fitted = fit_inputs(chosen, task.spec, self.source)
        return ReadInputs(torch.from_numpy(fitted))


def fit_inputs(array: NDArray[Any], spec: InputSpec, source: str) -> NDArray[Any]:
    """Convert numbers to the form of ``spec``, without a copy if they have it.

    ``array`` has shape (n, height, width, channels), (n, height, width) for one
    channel, or (n, height * width * channels). Values must be finite for ``float32``,
    else whole numbers from 0 to `InputSpec.largest_whole`.
    """
    height, width, channels = spec.image_shape
    shapes = {(height, width, channels), (math.prod(spec.image_shape),)}
    if channels == 1:
        shapes.add((height, width))
    if array.dtype.kind not in _NUMBERS or array.shape[1:] not in shapes:
        raise DataError(
            f"{source}: found inputs {array.dtype} of shape "
            f"{_format_shape(array.shape)}, expected {spec.dtype} of shape "
            f"{_format_shape(('n', *spec.image_shape))}, as the federation agreed",
            reason=SafeReason(Code.WRONG_SHAPE),
        )
    shaped = array.reshape(len(array), *spec.image_shape)
    if spec.dtype == "float32":
        return _require_finite(shaped, source)
    largest = spec.largest_whole
    if array.dtype != np.uint8 or largest < LARGEST_PIXEL:
        with np.errstate(invalid="ignore"):
            wrong = ~((shaped >= 0) & (shaped <= largest) & (shaped % 1 == 0))
        if wrong.any():
            raise DataError(
                f"{source}: found {int(wrong.sum())} values in the inputs such as "
                f"{shaped[wrong][0]}, expected whole numbers from 0 to {largest}: the "
                f"federation agreed on {KINDS_OF_INPUT[spec.dtype]}",
                reason=SafeReason(Code.VALUE_NOT_ALLOWED, count=int(wrong.sum())),
            )
    return shaped.astype(spec.stored_dtype, copy=False)


def _require_finite(array: NDArray[Any], source: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        reals = array.astype(np.float32, copy=False)
    wrong = int((~np.isfinite(reals)).sum())
    if wrong:
        raise DataError(
            f"{source}: {wrong} values in the inputs are missing, infinite or too "
            "large for float32; fill them in, or leave these examples out",
            reason=SafeReason(Code.VALUE_NOT_ALLOWED, count=wrong),
        )
    return reals


def _format_shape(shape: Sequence[object]) -> str:
    return f"({', '.join(map(str, shape))})"


def split_texts(texts: Sequence[str], source: str) -> tuple[Split, ...]:
    """Parse the split of each example with `split_of`."""
    splits = {text: split_of(text) for text in texts}
    wrong = Counter(text for text in texts if splits[text] is None)
    if wrong:
        text, count = wrong.most_common(1)[0]
        raise DataError(
            f"{source}: found the split {text!r} in {count} examples; "
            f"{alternatives(text, SPLITS)}",
            reason=SafeReason(Code.UNKNOWN_SPLIT, count=wrong.total()),
        )
    return tuple(cast("Split", splits[text]) for text in texts)

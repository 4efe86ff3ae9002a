"""What the server and the sites agree on, and the data of a site."""

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
from knnper.experiment import PositiveFloat, PositiveInt, Settings, alternatives
from knnper.reasons import Code, SafeReason

SITES = "sites"
"""The name, in an experiment's section ``data``, of data that stays where it is."""

OnError = Literal["refuse", "skip"]
"""What happens to data of which some cannot be read."""

ImageShape = tuple[PositiveInt, PositiveInt, PositiveInt]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
ClassName = Annotated[str, AfterValidator(clean_name), Field(min_length=1)]
FeatureName = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class SiteTask:
    """What is learned from inputs of which form."""

    spec: InputSpec  # form of the inputs, and how they are normalised
    # One for each of the ``spec.num_classes`` labels; sites agree by these names.
    class_names: tuple[str, ...]
    # For rows of features, what each of them is called, in order; may be empty.
    feature_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_input_size(self.spec)


MOST_NUMBERS = 2**26
"""In an input: images of 4,700 x 4,700 pixels in colour; 256 MB as float32."""


def require_input_size(spec: InputSpec) -> None:
    """Refuse a shape that no file proves, and for which memory would be taken."""
    if min(spec.image_shape) < 1 or math.prod(spec.image_shape) > MOST_NUMBERS:
        raise ValueError(
            f"found inputs of shape {spec.image_shape}, expected positive numbers "
            f"whose product is at most {MOST_NUMBERS}"
        )


@dataclass(frozen=True)
class SitesSettings(Settings):
    """Data that stays with the sites; here is what they agreed on.

    Attributes
    ----------
    image_shape
        (height, width, channels) that every site brings its images to; (1, 1, d) for
        rows of d features.
    class_names
        The names of the labels, in their order.
    mean, std
        Per channel; of pixel values scaled to [0, 1], or of features as they are. Empty
        for text.
    dtype
        ``uint8`` for images, ``float32`` for features, ``token`` for the characters of
        text, ``ids`` for text that a tokenizer has made ids of.
    feature_names
        What the features are called, in order: sites with tables then find their
        columns by name. Empty where every site lists its columns in the agreed order.
    vocabulary
        Of ``ids``: how many ids there are (``size``), which of them fills up short
        texts (``padding_id``), and the digest of the ``tokenizer``.
    """

    later = ("vocabulary",)

    image_shape: ImageShape
    class_names: Annotated[tuple[ClassName, ...], Field(min_length=2)]
    mean: tuple[FiniteFloat, ...]
    std: tuple[PositiveFloat, ...]
    dtype: InputDtype = "uint8"
    feature_names: tuple[FeatureName, ...] = ()
    vocabulary: Vocabulary | None = None

    def __post_init__(self) -> None:
        self.task()  # refuses a vocabulary that does not go with the type
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
        """Return what is learned."""
        num_classes = len(self.class_names)
        described = (self.mean, self.std, self.dtype, self.vocabulary)
        spec = InputSpec(self.image_shape, num_classes, *described)
        return SiteTask(spec, self.class_names, self.feature_names)


def task_of(dataset: Dataset) -> SiteTask:
    """Return what is learned from a data set."""
    return SiteTask(dataset.spec, dataset.class_names, dataset.feature_names)


def sites_settings(task: SiteTask) -> SitesSettings:
    """Return the settings of which `SitesSettings.task` makes ``task``."""
    it, names = task.spec, task.class_names
    described = (it.image_shape, names, it.mean, it.std, it.dtype)
    return SitesSettings(*described, task.feature_names, it.vocabulary)


def parse_task(document: Mapping[str, Any], source: str) -> SiteTask:
    """Return the task that an exported model's description holds: `_TASK_KEYS`."""
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


_TASK_KEYS = ("spec", "class_names", "feature_names")


def _require_unique(setting: str, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{setting} holds {twice[0]!r} more than once")


def place_of(base: Path, path: str) -> Path:
    """Return where ``path`` leads from the folder ``base``, with no way back in it."""
    joined = base / Path(path).expanduser()
    short = Path(os.path.normpath(joined))
    # From behind a symbolic link, .. leads elsewhere. `Path.resolve` raises for a loop.
    is_same = os.path.realpath(short) == os.path.realpath(joined)
    return short if is_same else joined


@dataclass(frozen=True)
class NamedExamples:
    """Examples with their owner's names for them."""

    examples: Examples  # n of them
    # One each, unique over all of the site's splits and the same whenever the data is
    # opened: a path relative to the data folder, a value of an id column, or a place
    # such as ``train/00012``.
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.examples)


@dataclass(frozen=True)
class SiteData:
    """All of a site's data, in memory."""

    # The splits; labels are those of ``task``.
    train: NamedExamples
    validation: NamedExamples
    test: NamedExamples
    task: SiteTask  # what the data was read for
    # How many examples have each label that the federation does not know, where the
    # site chose to leave these out.
    dropped: Mapping[str, int] = field(default_factory=dict)
    num_ignored: int = 0  # files beside the images that are no images by their names
    warnings: tuple[
        str, ...
    ] = ()  # sentences on what may be missing, without full stop
    # Why, by name, of the images that cannot be read; `open_site` refuses them, unless
    # the site skips them.
    unreadable: Mapping[str, str] = field(default_factory=dict)
    skips: bool = False

    def splits(self) -> Iterator[tuple[Split, NamedExamples]]:
        """Yield each split with its name: train, validation, test."""
        for split in SPLITS:
            yield split, getattr(self, split)

    def client_data(self) -> ClientData:
        """Return what a method may see of it: all but the test split."""
        return ClientData(self.train.examples, self.validation.examples)


@dataclass(frozen=True, kw_only=True)
class LabelSettings(Settings):
    """What can be set for all kinds of a site's own data.

    Attributes
    ----------
    label_map
        From what this site calls a label to what the federation calls it, where the
        two differ.
    unknown_labels
        ``error`` refuses data with labels that the federation does not know, ``drop``
        leaves their examples out.
    fractions
        How the examples are split where the data does not say it.
    on_error
        ``refuse`` refuses data of which some cannot be read, and lists it, ``skip``
        leaves it out and logs how much it is.
    """

    label_map: dict[str, str] = field(default_factory=dict)
    unknown_labels: Literal["error", "drop"] = "error"
    fractions: FractionSettings = field(default_factory=FractionSettings)
    on_error: OnError = "refuse"


@dataclass(frozen=True, kw_only=True)
class SiteSettings(LabelSettings, ABC):
    """Base of a kind of a site's own data."""

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def collect(self, base: Path, task: SiteTask | None) -> "CollectedExamples":
        """Return the examples; relative paths start at ``base``."""


InputForm = tuple[tuple[int, int, int], InputDtype]
"""What inputs look like by themselves: shape of one, and type."""


class ReadInputs(NamedTuple):
    """Inputs in memory."""

    # Of the readable ones among those that were asked for, in order: shape (m, height,
    # width, channels), of the task's type.
    images: Tensor
    unreadable: Mapping[int, str] = {}  # why, by position in the data, of the others


class Inputs(ABC):
    """Inputs that are read when labels and splits are known."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """What the ids of tokenised text mean; None of other inputs."""
        return None

    @abstractmethod
    def form(self) -> InputForm:
        """Return what they look like, where no task says what they should."""

    @abstractmethod
    def read(
        self, positions: Sequence[int], task: SiteTask, cache: Path | None = None
    ) -> ReadInputs:
        """Return the inputs at ``positions`` as ``task`` wants them."""


@dataclass(frozen=True, eq=False)
class CollectedExamples:
    """n examples as the site has them."""

    source: str  # the file or folder; named in errors
    names: tuple[str, ...]  # of the examples, unique
    labels: tuple[str, ...]  # what the site calls each example's label
    inputs: Inputs  # of the examples
    # Of each example, or None where the data does not say it.
    splits: tuple[Split, ...] | None = None
    # Those that the data has, be they empty.
    given_splits: frozenset[Split] = frozenset()
    numbered: bool = False  # whether labels are numbers that no class names belong to
    num_ignored: int = 0  # files beside them that are no images by their names
    warnings: tuple[
        str, ...
    ] = ()  # sentences on what may be missing, without full stop
    feature_names: tuple[str, ...] = ()  # of rows that name them


_NUMBERS = "biuf"  # NumPy's letters for truth values, integers and floats


@dataclass(frozen=True, eq=False)
class ArrayInputs(Inputs):
    """Inputs as one array of numbers, shape (n, ...); ``source`` is named in errors."""

    source: str
    array: NDArray[Any]

    def form(self) -> InputForm:
        """Return (height, width, channels), as the number of dimensions suggests."""
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
        """Return rows of features (n, d) with those at these positions, in order."""
        rows = self.array.reshape(len(self.array), -1)
        return replace(self, array=rows[:, list(features)])

    def read(
        self,
        positions: Sequence[int],
        task: SiteTask,
        cache: Path | None = None,  # noqa: ARG002 - quick to read
    ) -> ReadInputs:
        """See `Inputs`."""
        chosen = self.array[np.asarray(positions, dtype=np.int64)]
        fitted = fit_inputs(chosen, task.spec, self.source)
        return ReadInputs(torch.from_numpy(fitted))


def fit_inputs(array: NDArray[Any], spec: InputSpec, source: str) -> NDArray[Any]:
    """Return numbers in the form that ``spec`` asks for; themselves where they have it.

    ``array`` has shape (n, height, width, channels), without the channels where there
    is one, or (n, height * width * channels). The values must fit: whole numbers from 0
    to `InputSpec.largest_whole`, or finite ones for ``float32``.
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
            "large for float32; fill them in, or leave their examples out",
            reason=SafeReason(Code.VALUE_NOT_ALLOWED, count=wrong),
        )
    return reals


def _format_shape(shape: Sequence[object]) -> str:
    return f"({', '.join(map(str, shape))})"


def split_texts(texts: Sequence[str], source: str) -> tuple[Split, ...]:
    """Return the split that each of ``texts`` stands for; see `split_of`."""
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

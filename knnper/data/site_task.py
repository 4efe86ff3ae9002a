"""The task that server and sites agree on: form of inputs, classes and features."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from knnper.data.dividing import clean_name
from knnper.data.examples import TEXTS, Dataset, InputDtype, InputSpec, Vocabulary
from knnper.errors import DataError
from knnper.settings import PositiveFloat, PositiveInt, Settings

SITES = "sites"
"""Name in an experiment's section ``data`` for data that stays at the sites."""
ImageShape = tuple[PositiveInt, PositiveInt, PositiveInt]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
ClassName = Annotated[str, AfterValidator(clean_name), Field(min_length=1)]
FeatureName = Annotated[str, Field(min_length=1)]
MOST_NUMBERS = 2**26
"""Largest number of values of an input: 4,700 x 4,700 colour pixels, 256 MB float32."""
_TASK_KEYS = ("spec", "class_names", "feature_names")


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
            f"with a product of at most {MOST_NUMBERS}"
        )


@dataclass(frozen=True)
class SitesSettings(Settings):
    """Settings of data that stays at the sites: the agreed task.

    Attributes
    ----------
    image_shape
        (height, width, channels); every site resizes its images to it. (1, 1, d) for
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

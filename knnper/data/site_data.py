"""What the server and the sites agree on before anything is learned."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from knnper.data.dividing import SPLITS, Split
from knnper.data.examples import ClientData, Dataset, Examples, InputDtype, InputSpec
from knnper.errors import DataError
from knnper.experiment import PositiveFloat, PositiveInt, Settings

SITES = "sites"
"""The name, in an experiment's section ``data``, of data that stays where it is."""

ImageShape = tuple[PositiveInt, PositiveInt, PositiveInt]

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]

ClassName = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class SiteTask:
    """What is learned from inputs of which form.

    Attributes
    ----------
    spec
        Form of the inputs, and how they are normalised.
    class_names
        One for each of the ``spec.num_classes`` labels; sites agree by these names.
    feature_names
        For rows of features, what each of them is called, in order; may be empty.
    """

    spec: InputSpec
    class_names: tuple[str, ...]
    feature_names: tuple[str, ...] = ()


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
        ``uint8`` for images, ``float32`` for features, ``token`` for the ids of text.
    feature_names
        What the features are called, in order: sites with tables then find their
        columns by name. Empty where every site lists its columns in the agreed order.
    """

    image_shape: ImageShape
    class_names: Annotated[tuple[ClassName, ...], Field(min_length=2)]
    mean: tuple[FiniteFloat, ...]
    std: tuple[PositiveFloat, ...]
    dtype: InputDtype = "uint8"
    feature_names: tuple[ClassName, ...] = ()

    def __post_init__(self) -> None:
        height, width, channels = self.image_shape
        expected, why = channels, f"one for each of the {channels} channels of "
        if self.dtype == "token":
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
        spec = InputSpec(
            image_shape=self.image_shape,
            num_classes=len(self.class_names),
            mean=self.mean,
            std=self.std,
            dtype=self.dtype,
        )
        return SiteTask(spec, self.class_names, self.feature_names)


def task_of(dataset: Dataset) -> SiteTask:
    """Return what is learned from a data set."""
    return SiteTask(dataset.spec, dataset.class_names, dataset.feature_names)


def sites_settings(task: SiteTask) -> SitesSettings:
    """Return the settings of which `SitesSettings.task` makes ``task``."""
    spec = task.spec
    return SitesSettings(
        spec.image_shape,
        task.class_names,
        spec.mean,
        spec.std,
        spec.dtype,
        task.feature_names,
    )


def site_task_of(document: Mapping[str, Any], source: str) -> SiteTask:
    """Return the task that an exported model's description holds.

    Parameters
    ----------
    document
        Plain values with the keys ``spec`` (as `InputSpec`), ``class_names`` and
        optionally ``feature_names``; others are left alone.
    source
        Where it is from; named in errors.

    Raises
    ------
    DataError
        If a key is missing or holds something else.
    """
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


def _require_unique(what: str, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{what} holds {twice[0]!r} more than once")


def place_of(base: Path, path: str) -> Path:
    """Return where ``path`` leads from the folder ``base``, with no way back in it.

    Parameters
    ----------
    base
        Where a relative path starts.
    path
        As in a client's file; ``~`` is the home of its owner.
    """
    given = base / Path(path).expanduser()
    short = Path(os.path.normpath(given))
    # From behind a symbolic link, .. leads elsewhere.
    return short if short.resolve() == given.resolve() else given


@dataclass(frozen=True)
class NamedExamples:
    """Examples with their owner's names for them.

    Attributes
    ----------
    examples
        n of them.
    names
        One each, unique over all of the site's splits and the same whenever the data
        is opened: a path relative to the data folder, a value of an id column, or a
        place such as ``train/00012``.
    """

    examples: Examples
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.examples)


@dataclass(frozen=True)
class SiteData:
    """All of a site's data, in memory.

    Attributes
    ----------
    train, validation, test
        The splits; labels are those of ``task``.
    task
        What the data was read for.
    dropped
        How many examples have each label that the federation does not know, where the
        site chose to leave these out.
    num_ignored
        Files beside the images that are no images by their names.
    unreadable
        Why, by name, of the images that cannot be read; `open_site` refuses them.
    """

    train: NamedExamples
    validation: NamedExamples
    test: NamedExamples
    task: SiteTask
    dropped: Mapping[str, int] = field(default_factory=dict)
    num_ignored: int = 0
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def splits(self) -> Iterator[tuple[Split, NamedExamples]]:
        """Yield each split with its name: train, validation, test."""
        for split in SPLITS:
            yield split, getattr(self, split)

    def client_data(self) -> ClientData:
        """Return what a method may see of it: all but the test split."""
        return ClientData(self.train.examples, self.validation.examples)

"""The data of a site: settings of all formats, splits and names of examples."""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, cast

from knnper.data.dividing import SPLITS, FractionSettings, Split
from knnper.data.examples import ClientData, Examples
from knnper.data.site_inputs import SiteInputs
from knnper.data.site_task import SiteTask
from knnper.data.split_names import split_of
from knnper.errors import DataError
from knnper.reasons import Code, SafeReason
from knnper.settings import Settings, alternatives

OnError = Literal["refuse", "skip"]
"""Handling of unreadable examples."""


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

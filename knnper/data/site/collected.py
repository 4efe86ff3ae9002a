"""What a reader finds at a site, before labels are agreed and splits are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from knnper.config.sections import Settings
from knnper.data.examples import InputDtype
from knnper.data.site.agreement import SiteTask
from knnper.data.site.splits import FractionSettings, Split


@dataclass(frozen=True, kw_only=True)
class SiteSettings(Settings):
    """What can be set for every kind of own data.

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
    """

    label_map: dict[str, str] = field(default_factory=dict)
    unknown_labels: Literal["error", "drop"] = "error"
    fractions: FractionSettings = field(default_factory=FractionSettings)


@dataclass(frozen=True)
class InputForm:
    """What inputs look like by themselves: shape of one, and type."""

    shape: tuple[int, int, int]
    dtype: InputDtype


@dataclass(frozen=True, eq=False)
class ReadInputs:
    """Inputs in memory.

    Attributes
    ----------
    images
        Of the readable ones among those that were asked for, in order: shape
        (m, height, width, channels), of the task's type.
    unreadable
        Why, by position in the data, of the others.
    """

    images: Tensor
    unreadable: Mapping[int, str] = field(default_factory=dict)


class Inputs(Protocol):
    """Inputs that are read when labels and splits are known."""

    def form(self) -> InputForm:
        """Return what they look like, where no task says what they should."""

    def read(self, positions: Sequence[int], task: SiteTask) -> ReadInputs:
        """Return the inputs at ``positions`` as ``task`` wants them.

        Raises
        ------
        DataError
            If they cannot be brought to this form.
        """

    def kept_in(self, folder: Path) -> "Inputs":
        """Return these inputs, of which what takes long to read is kept in a folder.

        Inputs that are read quickly are returned as they are.
        """


@dataclass(frozen=True, eq=False)
class Collected:
    """n examples as the site has them.

    Attributes
    ----------
    source
        The file or folder; named in errors.
    names
        Of the examples, unique.
    labels
        What the site calls each example's label.
    inputs
        Of the examples.
    splits
        Of each example, or None where the data does not say it.
    given_splits
        Those that the data has, be they empty.
    numbered
        Whether labels are numbers that no class names belong to.
    num_ignored
        Files beside them that are no images by their names.
    """

    source: str
    names: tuple[str, ...]
    labels: tuple[str, ...]
    inputs: Inputs
    splits: tuple[Split, ...] | None = None
    given_splits: frozenset[Split] = frozenset()
    numbered: bool = False
    num_ignored: int = 0

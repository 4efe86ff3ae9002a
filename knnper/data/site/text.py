"""A site's data as plain text: windows of characters, and the ones that follow."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knnper.config.errors import DataError
from knnper.config.ranges import PositiveInt
from knnper.data.examples import KINDS_OF_INPUT
from knnper.data.site.agreement import SiteTask
from knnper.data.site.array_inputs import ArrayInputs
from knnper.data.site.collected import Collected, InputForm, SiteSettings
from knnper.data.site.place import place_of
from knnper.data.site.splits import SPLITS, FractionSettings, Split
from knnper.data.text.alphabet import CHARACTER_NAMES, encode
from knnper.data.text.plays import PlaysSettings
from knnper.data.text.windows import target_positions, windows_before
from knnper.data.text.written import plain_text, read_files

_EXPECTED = "a file of plain text, or a folder of such files (.txt)"


@dataclass(frozen=True)
class SiteTextSettings(SiteSettings):
    """Which texts, and how examples are made of them.

    Attributes
    ----------
    path
        A file of plain text in UTF-8, or a folder of such files (``.txt``).
    stride
        Characters from one that is predicted to the next.
    """

    path: str
    stride: PositiveInt = PlaysSettings.stride


@dataclass(frozen=True, eq=False)
class WindowInputs(ArrayInputs):
    """Windows of ids, uint8 of shape (n, 1, 1, T)."""

    def form(self) -> InputForm:
        """See `knnper.data.site.collected.Inputs`."""
        return InputForm((1, 1, self.array.shape[3]), "token")


@dataclass(frozen=True, eq=False)
class _Windowed:
    """The n examples of one text, in its order.

    Attributes
    ----------
    targets
        Places of the characters that are predicted, int64 of shape (n,).
    windows, labels
        The ids before them, uint8 of shape (n, 1, 1, T), and their own, (n,).
    """

    targets: NDArray[np.int64]
    windows: NDArray[np.uint8]
    labels: NDArray[np.uint8]

    @classmethod
    def of(cls, text: str, window: int, stride: int) -> "_Windowed":
        """Return the examples of a text."""
        ids = encode(text)
        targets = target_positions(len(ids), window, stride)
        return cls(targets, windows_before(ids, targets, window), ids[targets])


def collect_text(
    settings: SiteTextSettings, base: Path, task: SiteTask | None
) -> Collected:
    """Return the windows of a site's texts, as long as the federation agreed on.

    Without a task they are as long as those of plays. An example is called by the place
    of the character that is predicted, as in ``00000080``, behind the file's name where
    the path is a folder. The beginning of each text is trained on and its end is tested
    on: windows overlap, so that examples drawn at random would give away each other.

    Raises
    ------
    DataError
        If there is no text, all are too short, or the federation agreed on something
        else than text in this alphabet.
    """
    path = place_of(base, settings.path)
    _require_text(task, path)
    window = PlaysSettings.window if task is None else task.spec.image_shape[2]
    files = read_files(path, _EXPECTED)
    texts = [_Windowed.of(plain_text(one), window, settings.stride) for one in files]
    if not any(len(text.targets) for text in texts):
        raise DataError(
            f"{path}: found no text with more than {window} characters, of which a "
            "window is made; give more text"
        )
    prefixes = [f"{one.path.name}/" if path.is_dir() else "" for one in files]
    labels = itertools.chain.from_iterable(text.labels.tolist() for text in texts)
    splits = (_in_order(len(text.targets), settings.fractions) for text in texts)
    return Collected(
        source=str(path),
        names=tuple(_names(texts, prefixes)),
        labels=tuple(CHARACTER_NAMES[label] for label in labels),
        inputs=WindowInputs(str(path), np.concatenate([one.windows for one in texts])),
        splits=tuple(itertools.chain.from_iterable(splits)),
        given_splits=frozenset(SPLITS),
    )


def _require_text(task: SiteTask | None, path: Path) -> None:
    if task is None or task.class_names == CHARACTER_NAMES:
        return
    found = "other characters"
    if task.spec.dtype != "token":
        found = KINDS_OF_INPUT[task.spec.dtype]
    raise DataError(
        f"{path} is read as text of {len(CHARACTER_NAMES)} characters, but the "
        f"federation agreed on {found}; give data of another kind"
    )


def _names(texts: Sequence[_Windowed], prefixes: Sequence[str]) -> list[str]:
    return [
        f"{prefix}{target:08d}"
        for text, prefix in zip(texts, prefixes, strict=True)
        for target in text.targets.tolist()
    ]


def _in_order(count: int, fractions: FractionSettings) -> list[Split]:
    """Return the split of each example: first train, then validation, then test."""
    held_out = fractions.validation + fractions.test
    num_train = max(int((1 - held_out) * count + 0.5), min(count, 1))
    num_known = max(int((1 - fractions.test) * count + 0.5), num_train)
    sizes = (num_train, num_known - num_train, count - num_known)
    return [
        split for split, size in zip(SPLITS, sizes, strict=True) for _ in range(size)
    ]

"""Recognise the names of splits: train, Training, TEST_SET, val, dev."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from knnper.data.dividing import SPLITS, Split
from knnper.errors import DataError
from knnper.reasons import Code, SafeReason

SPLIT_WORDS: Mapping[str, Split] = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}

# Some call a validation split so, others a test split.
_UNCLEAR_WORDS = frozenset({"eval", "evaluation", "holdout"})

_AFTER_THE_SPLIT = re.compile("(set|data|dataset|split|images)$")
_BETWEEN_WORDS = re.compile(r"[\W\d_]+|(?<=[a-z])(?=[A-Z])")


def split_of(name: str) -> Split | None:
    """Return the split that ``name`` stands for, or None.

    >>> split_of("Training"), split_of("TEST_SET"), split_of("val"), split_of("cat")
    ('train', 'test', 'validation', None)
    """
    letters = re.sub(r"[\s._-]", "", name).lower()
    return SPLIT_WORDS.get(_AFTER_THE_SPLIT.sub("", letters))


def is_split_name(name: str) -> bool:
    """Test whether ``name`` stands for a split, even if it is unclear for which."""
    return split_of(name) is not None or name.lower() in _UNCLEAR_WORDS


def mentions_split(name: str) -> bool:
    """Test whether a word in ``name`` stands for a split, such as in ``x_eval``."""
    words = _words(name)
    return bool(words & _UNCLEAR_WORDS or words & SPLIT_WORDS.keys())


def _words(name: str) -> set[str]:
    return {word.lower() for word in _BETWEEN_WORDS.split(name)}


def refuse_splits(where: Path, names: Iterable[str], advice: str) -> None:
    """Raise a `DataError` for names of training data beside names of other splits.

    A word in the name is enough, as in ``seg_train`` and ``seg_test``. If such folders
    were read as clients, domains or classes, test data would be used for training.
    """
    training: list[str] = []
    others: list[str] = []
    for name in names:
        splits = {split_of(name), *map(SPLIT_WORDS.get, _words(name))}
        if "train" in splits:
            training.append(name)
        elif splits != {None} or mentions_split(name):
            others.append(name)
    if training and others:
        raise DataError(
            f"{where}: found {training[0]!r} and {others[0]!r}, which seem to be "
            "splits, where none is expected or the split is unclear; call splits "
            f"train, validation and test, {advice}",
            reason=SafeReason(Code.WRONG_LAYOUT),
        )


def split_folders(root: Path, names: Sequence[str], advice: str) -> Mapping[Split, str]:
    """Return the folder of each split in ``root``; empty if the folders are classes.

    A folder ``train`` or ``test`` is a split. Folders with other names of splits count
    if there is one of training data and one of another split.
    """
    folders_of: dict[Split, list[str]] = {}
    for name in names:
        split = split_of(name)
        if split is not None:
            folders_of.setdefault(split, []).append(name)
    is_given = "train" in folders_of and len(folders_of) > 1
    if not is_given and "train" not in names and "test" not in names:
        refuse_splits(root, names, advice)
        return {}
    for split, folders in folders_of.items():
        if len(folders) > 1:
            raise DataError(
                f"{root}: found the folders {', '.join(folders)}, expected one for "
                f"the split {split}; join or rename them, {advice}",
                reason=SafeReason(Code.WRONG_LAYOUT),
            )
    return {split: folders_of[split][0] for split in SPLITS if split in folders_of}

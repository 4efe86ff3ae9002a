"""Split examples into training, validation and test data; clean and number names."""

import hashlib
import logging
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from knnper.errors import DataError, warn_once
from knnper.seeding import RandomKey
from knnper.settings import (
    NonNegativeInt,
    PositiveInt,
    ProperFraction,
    Settings,
)

_LOG = logging.getLogger(__name__)

# Zero-width space, word joiner and byte order mark: str.split does not split at them.
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u2060\ufeff"))
Split: TypeAlias = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")


@dataclass(frozen=True, kw_only=True)
class DividingSettings(Settings):
    """Settings of the split of each user's samples into training and test data.

    Attributes
    ----------
    test_fraction
        Fraction of test samples of each user, rounded, [0, 1); 0.2 in Marfoq et al.
        2022, section 5. At least one sample is left for training.
    split
        ``random`` test samples, as in the paper, or with ``time`` the last samples.
    seed
        Seed of the random choice.
    min_samples
        Users with fewer samples are left out.
    """

    test_fraction: ProperFraction = 0.2
    split: Literal["random", "time"] = "random"
    seed: NonNegativeInt = 0
    min_samples: PositiveInt = 1


def mark_tested(count: int, user: str, settings: DividingSettings) -> NDArray[np.bool_]:
    """Mark the test samples among ``count`` samples of a user, shape (count,).

    The result does not depend on other users.
    """
    num_tested = min(int(settings.test_fraction * count + 0.5), max(count - 1, 0))
    places = np.arange(count)
    if settings.split == "random":
        key = RandomKey(settings.seed, ("test samples", user))
        places = key.numpy().permutation(count)
    mask = np.zeros(count, dtype=bool)
    mask[places[count - num_tested :]] = True
    return mask


@dataclass(frozen=True)
class FractionSettings(Settings):
    """Settings of the split of examples without given splits.

    Attributes
    ----------
    validation, test
        Fractions of all examples; the others are training examples.
    seed
        Seed of the split.
    """

    validation: ProperFraction = 0.2
    test: ProperFraction = 0.1
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"found {self.validation} + {self.test} for validation and test, "
                "which leaves no training data; expected a sum less than 1"
            )


def split_by_name(names: Sequence[str], fractions: FractionSettings) -> list[Split]:
    """Assign a split to each example by its name and the seed alone."""
    places = [_hash_fraction(name, fractions.seed) for name in names]
    held_out = fractions.test + fractions.validation
    splits: list[Split] = [
        "test"
        if place < fractions.test
        else ("validation" if place < held_out else "train")
        for place in places
    ]
    # If no example is left for training, take the one with the highest hash.
    if splits and "train" not in splits:
        splits[max(range(len(places)), key=places.__getitem__)] = "train"
    return splits


def _hash_fraction(name: str, seed: int) -> float:
    """Hash a name and a seed to a pseudo-random number in [0, 1)."""
    text = f"{seed}\0{name}".encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    # A float holds 53 bits exactly; more bits could round up to 1.
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def mark_by_group(
    groups: Sequence[str],
    names: Sequence[str],
    kinds: Sequence[str],
    fraction: float,
    seed: int,
) -> list[bool]:
    """Mark a fraction of each group with `mark_alike`, but never all of a kind."""
    members = defaultdict[str, list[int]](list)
    for at, group in enumerate(groups):
        members[group].append(at)
    marked = set[int]()
    for places in members.values():
        group_names = [names[at] for at in places]
        group_kinds = [kinds[at] for at in places]
        marks = mark_alike(group_names, group_kinds, fraction, seed)
        pairs = zip(places, marks, strict=True)
        marked.update(at for at, is_marked in pairs if is_marked)
    remaining_kinds = {kind for at, kind in enumerate(kinds) if at not in marked}
    return [at in marked and kind in remaining_kinds for at, kind in enumerate(kinds)]


def mark_alike(
    names: Sequence[str], kinds: Sequence[str], fraction: float, seed: int
) -> list[bool]:
    """Mark a fraction of n samples, spread evenly over kinds; one stays unmarked.

    Samples are marked in the order of their relative ranks in their kinds,
    (i + 1/2) / n_kind. The samples of a kind are ranked by the hash of name and seed.
    """
    members = defaultdict[str, list[tuple[float, int]]](list)
    for at, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        members[kind].append((_hash_fraction(name, seed), at))
    ordered = sorted(
        ((rank + 0.5) / len(places), place, at)
        for places in members.values()
        for rank, (place, at) in enumerate(sorted(places))
    )
    count = min(int(fraction * len(names) + 0.5), len(names) - 1)
    marked = {at for _, _, at in ordered[:count]}
    return [at in marked for at in range(len(names))]


def mark_balanced(
    kinds: Sequence[str], fraction: float, key: RandomKey
) -> NDArray[np.bool_]:
    """Mark about a fraction of n images, the same number of each kind, shape (n,).

    ``kinds`` are the kinds of the images. The number per kind is the nearest whole
    number to ``fraction`` x n / number of kinds, at least one, but at most half of a
    kind. The choice within a kind does not depend on the other kinds.
    """
    different_kinds, kind_of = np.unique(np.asarray(kinds), return_inverse=True)
    per_kind = max(1, int(fraction * len(kinds) / len(different_kinds) + 0.5))
    chosen = np.zeros(len(kinds), dtype=np.bool_)
    for number, kind in enumerate(different_kinds.tolist()):
        places = key.child(kind).numpy().permutation(np.flatnonzero(kind_of == number))
        chosen[places[: min(per_kind, len(places) // 2)]] = True
    return chosen


def warn_of_joined(source: str, names: Iterable[str]) -> None:
    """Log that the data set's own validation data is added to the training data."""
    warn_once(
        _LOG,
        f"{source}: validation data ({', '.join(names)}) is added to the training "
        "data, since each client holds out its own part for validation",
    )


def clean_name(text: str) -> str:
    """Normalise the name of a label or client: NFC, single spaces.

    Names that look equal become equal, such as "café" from a Mac and from other
    systems, or "cat" and "cat " from a spreadsheet.
    """
    normal = unicodedata.normalize("NFC", text.translate(_INVISIBLE))
    return " ".join(normal.split())


def clean_names(names: Iterable[str]) -> tuple[str, ...]:
    """Normalise each name with `clean_name`."""
    written = tuple(names)
    clean = {name: clean_name(name) for name in set(written)}
    return tuple(clean[name] for name in written)


def warn_of_merged(names: Iterable[str], kind: str, source: str) -> None:
    """Log how many names equal others except for white space or Unicode form."""
    written = set(names)
    num_merged = len(written) - len(set(clean_names(written)))
    if num_merged:
        warn_once(
            _LOG,
            f"{source}: {kind} with names that differ from others only in white space "
            f"or Unicode form are merged with those: {num_merged}",
        )


def are_whole_numbers(values: Iterable[str]) -> bool:
    """Test whether all values are whole numbers in digits."""
    return all(map(_WHOLE_NUMBER.fullmatch, values))


def sorted_values(values: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct values in order; numerically if all are whole numbers."""
    different = sorted(set(values))
    if are_whole_numbers(different):
        different.sort(key=int)
    return tuple(different)


def require_known(class_names: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raise a `DataError` if test data has classes that the training data lacks."""
    unknown = sorted(set(class_names) - set(known))
    if unknown:
        hint = ""
        if "-1" in unknown:
            hint = (
                "; -1 often means a label that is not published: leave these rows out"
            )
        raise DataError(
            f"{where} has classes that no training example has: {', '.join(unknown)}; "
            f"the classes are those of the training data{hint}"
        )


def numbered(values: Iterable[str], known: Sequence[str]) -> NDArray[np.int64]:
    """Return the position of each value in ``known``, int64 of shape (n,)."""
    number_of = {value: number for number, value in enumerate(known)}
    return np.array([number_of[value] for value in values], dtype=np.int64)

"""Which examples are trained on, validated on and tested on; values by number."""

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
from knnper.experiment import NonNegativeInt, PositiveInt, ProperFraction, Settings
from knnper.seeding import RandomKey

_LOG = logging.getLogger(__name__)

# Zero-width space, word joiner and byte order mark: white space that str.split keeps.
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u2060\ufeff"))


@dataclass(frozen=True, kw_only=True)
class DividingSettings(Settings):
    """How each user's samples are divided into training and test data.

    Attributes
    ----------
    test_fraction
        Part of each user's samples that are tested on, rounded, [0, 1); 0.2 in the
        paper (Marfoq et al. 2022, section 5). One sample at least is left to train on.
    split
        Which they are: ``random`` ones, as in the paper, or with ``time`` the last.
    seed
        Of the random choice.
    min_samples
        Users with fewer samples are left out.
    """

    test_fraction: ProperFraction = 0.2
    split: Literal["random", "time"] = "random"
    seed: NonNegativeInt = 0
    min_samples: PositiveInt = 1


def mark_tested(count: int, user: str, settings: DividingSettings) -> NDArray[np.bool_]:
    """Mark what is tested on among ``count`` samples of a user, shape (count,).

    It depends on nothing that other users have.
    """
    num_tested = min(int(settings.test_fraction * count + 0.5), max(count - 1, 0))
    places = np.arange(count)
    if settings.split == "random":
        key = RandomKey(settings.seed, ("test samples", user))
        places = key.numpy().permutation(count)
    mask = np.zeros(count, dtype=bool)
    mask[places[count - num_tested :]] = True
    return mask


Split: TypeAlias = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class FractionSettings(Settings):
    """How examples are split that are not split already.

    Attributes
    ----------
    validation, test
        Parts of all examples; the rest is trained on.
    seed
        Another seed is another split.
    """

    validation: ProperFraction = 0.2
    test: ProperFraction = 0.1
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"found {self.validation} + {self.test} for validation and test, "
                "which leaves nothing to train on; expected a sum less than 1"
            )


def split_by_name(names: Sequence[str], fractions: FractionSettings) -> list[Split]:
    """Return each example's split, which depends on its name and the seed alone."""
    places = [_place(name, fractions.seed) for name in names]
    held_out = fractions.test + fractions.validation
    splits: list[Split] = [
        "test"
        if place < fractions.test
        else ("validation" if place < held_out else "train")
        for place in places
    ]
    # Where none would be left to train on, it is the one that comes nearest to it.
    if splits and "train" not in splits:
        splits[max(range(len(places)), key=places.__getitem__)] = "train"
    return splits


def _place(name: str, seed: int) -> float:
    """Return a number in [0, 1) that is as good as random, but always the same."""
    text = f"{seed}\0{name}".encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    # 53 bits are what a float holds exactly: more could round up to 1.
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def mark_by_group(
    groups: Sequence[str],
    names: Sequence[str],
    kinds: Sequence[str],
    fraction: float,
    seed: int,
) -> list[bool]:
    """Mark a part of each group as `mark_alike` does, and of no kind all."""
    members = defaultdict[str, list[int]](list)
    for at, group in enumerate(groups):
        members[group].append(at)
    marked = set[int]()
    for places in members.values():
        own = [names[at] for at in places], [kinds[at] for at in places]
        marks = zip(places, mark_alike(*own, fraction, seed), strict=True)
        marked.update(at for at, is_marked in marks if is_marked)
    left = {kind for at, kind in enumerate(kinds) if at not in marked}
    return [at in marked and kind in left for at, kind in enumerate(kinds)]


def mark_alike(
    names: Sequence[str], kinds: Sequence[str], fraction: float, seed: int
) -> list[bool]:
    """Mark a part of n samples, of each kind about its share; one stays unmarked.

    They are taken in the order of their places within their kinds, (i + 1/2) / n_kind,
    where a kind's samples are ordered by their names and the seed alone.
    """
    members = defaultdict[str, list[tuple[float, int]]](list)
    for at, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        members[kind].append((_place(name, seed), at))
    ordered = sorted(
        ((rank + 0.5) / len(found), place, at)
        for found in members.values()
        for rank, (place, at) in enumerate(sorted(found))
    )
    count = min(int(fraction * len(names) + 0.5), len(names) - 1)
    marked = {at for _, _, at in ordered[:count]}
    return [at in marked for at in range(len(names))]


def balanced_part(
    kinds: Sequence[str], fraction: float, key: RandomKey
) -> NDArray[np.bool_]:
    """Choose about a part of n images, of each kind the same number, shape (n,).

    ``kinds`` are what the images are. The ``fraction``, (0, 1), is shared out among the
    kinds: the nearest whole number of each, one at least, but of no kind more than
    half. The choice within a kind does not depend on the others' names.
    """
    found, kind_of = np.unique(np.asarray(kinds), return_inverse=True)
    wanted = max(1, int(fraction * len(kinds) / len(found) + 0.5))
    chosen = np.zeros(len(kinds), dtype=np.bool_)
    for number, kind in enumerate(found.tolist()):
        places = key.child(kind).numpy().permutation(np.flatnonzero(kind_of == number))
        chosen[places[: min(wanted, len(places) // 2)]] = True
    return chosen


def warn_of_joined(source: str, names: Iterable[str]) -> None:
    """Log that central validation data is trained on."""
    warn_once(
        _LOG,
        f"{source}: validation data ({', '.join(names)}) is added to the training "
        "data, since each client holds out its own part for validation",
    )


def clean_name(text: str) -> str:
    """Return a label's or client's name in NFC, each white space as one space.

    Names that look equal are then equal: "café" from a Mac and from elsewhere, "cat"
    and "cat " from a spreadsheet.
    """
    normal = unicodedata.normalize("NFC", text.translate(_INVISIBLE))
    return " ".join(normal.split())


def clean_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return each name as `clean_name` does."""
    written = tuple(names)
    clean = {name: clean_name(name) for name in set(written)}
    return tuple(clean[name] for name in written)


def warn_of_merged(names: Iterable[str], kind: str, source: str) -> None:
    """Log how many names equal others but for white space or Unicode form."""
    written = set(names)
    num_merged = len(written) - len(set(clean_names(written)))
    if num_merged:
        warn_once(
            _LOG,
            f"{source}: {kind} with names that differ from others only in white space "
            f"or Unicode form, and are joined with those: {num_merged}",
        )


_WHOLE_NUMBER = re.compile(r"-?[0-9]+")


def are_whole_numbers(values: Iterable[str]) -> bool:
    """Return whether all of ``values`` are written as whole numbers."""
    return all(map(_WHOLE_NUMBER.fullmatch, values))


def values_in_order(values: Iterable[str]) -> tuple[str, ...]:
    """Return the different values, sorted; as numbers where all are whole numbers."""
    different = sorted(set(values))
    if are_whole_numbers(different):
        different.sort(key=int)
    return tuple(different)


def require_known(found: Iterable[str], known: Sequence[str], where: str) -> None:
    """Refuse, with a `DataError`, classes that are tested on and not trained on."""
    unknown = sorted(set(found) - set(known))
    if unknown:
        hint = ""
        if "-1" in unknown:
            hint = "; -1 often stands for labels that are not published: leave them out"
        raise DataError(
            f"{where} has classes that no training example has: {', '.join(unknown)}; "
            f"the classes are those that are trained on{hint}"
        )


def numbered(values: Iterable[str], known: Sequence[str]) -> NDArray[np.int64]:
    """Return the position of each value among the known ones, int64 of shape (n,)."""
    number_of = {value: number for number, value in enumerate(known)}
    return np.array([number_of[value] for value in values], dtype=np.int64)

"""Examples whose inputs are the same in every value."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from knnper.data.site.site_data import NamedExamples, SiteData
from knnper.data.site.splits import SPLITS, Split

MOST_SHOWN = 10


@dataclass(frozen=True)
class Copies:
    """Examples of one split that are copies of examples of the same or another one.

    Attributes
    ----------
    original, copy
        The splits.
    num_copies
        Examples of ``copy`` with an equal in ``original``; within one split, those
        that come after their equal.
    shown
        At most ten pairs of names, the original's first.
    """

    original: Split
    copy: Split
    num_copies: int
    shown: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Conflicts:
    """Equal inputs with different labels.

    Attributes
    ----------
    num_inputs
        Different inputs of which this is so.
    shown
        At most ten of them: two names, each with its class.
    """

    num_inputs: int
    shown: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Place:
    split: Split
    name: str
    label: int


def find_copies(data: SiteData) -> tuple[tuple[Copies, ...], Conflicts]:
    """Return all copies, by pairs of splits in which there are any, and conflicts."""
    groups = [group for group in _groups(data).values() if len(group) > 1]
    pairs = [
        (original, copy)
        for place, original in enumerate(SPLITS)
        for copy in SPLITS[place:]
    ]
    found = (_copies(groups, *pair) for pair in pairs)
    copies = tuple(one for one in found if one.num_copies)
    return copies, _conflicts(groups, data.task.class_names)


def _groups(data: SiteData) -> Mapping[bytes, Sequence[_Place]]:
    """Return the examples by a digest of their inputs, in the order of the splits."""
    groups: dict[bytes, list[_Place]] = {}
    for split, part in data.splits():
        for digest, name, label in zip(
            _digests(part), part.names, part.examples.labels.tolist(), strict=True
        ):
            groups.setdefault(digest, []).append(_Place(split, name, label))
    return groups


def _digests(part: NamedExamples) -> list[bytes]:
    rows = part.examples.images.flatten(1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def _copies(groups: Sequence[Sequence[_Place]], original: Split, copy: Split) -> Copies:
    pairs = [pair for group in groups for pair in _pairs(group, original, copy)]
    return Copies(original, copy, len(pairs), tuple(pairs[:MOST_SHOWN]))


def _pairs(
    group: Sequence[_Place], original: Split, copy: Split
) -> list[tuple[str, str]]:
    first = next((place for place in group if place.split == original), None)
    if first is None:
        return []
    return [
        (first.name, place.name)
        for place in group
        if place.split == copy and place is not first
    ]


def _conflicts(
    groups: Sequence[Sequence[_Place]], class_names: Sequence[str]
) -> Conflicts:
    shown = []
    for group in groups:
        first = group[0]
        other = next((one for one in group if one.label != first.label), None)
        if other is not None:
            shown.append((_labelled(first, class_names), _labelled(other, class_names)))
    return Conflicts(len(shown), tuple(shown[:MOST_SHOWN]))


def _labelled(place: _Place, class_names: Sequence[str]) -> str:
    return f"{place.name} ({class_names[place.label]})"

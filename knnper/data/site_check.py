"""Check a site's data for mistakes: empty splits, copies, conflicting labels."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

from knnper.data.dividing import SPLITS, Split
from knnper.data.images import digests_of
from knnper.data.site_data import NamedExamples, SiteData

MOST_SHOWN = 10
_OVERLAP_EFFECTS = {
    ("train", "validation"): "the weight of the memory will be tuned too high",
    ("validation", "test"): "measured accuracies may be too high",
}


@dataclass(frozen=True)
class Copies:
    """Examples of one split that are copies of examples of the same or another one."""

    original: Split
    copy: Split
    num_copies: int
    shown: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Conflicts:
    """Equal inputs with different labels."""

    num_inputs: int
    shown: tuple[tuple[str, str], ...]


class _Example(NamedTuple):
    split: Split
    name: str
    label: int


def find_copies(data: SiteData) -> tuple[tuple[Copies, ...], Conflicts]:
    """Return all copies, by pairs of splits in which there are any, and conflicts."""
    groups = defaultdict[bytes, list[_Example]](list)
    for split, part in data.splits():
        digests = digests_of(part.examples.images.numpy())
        labels = part.examples.labels.tolist()
        for digest, name, label in zip(digests, part.names, labels, strict=True):
            groups[digest].append(_Example(split, name, label))
    pairs = {pair: list[tuple[str, str]]() for pair in product(SPLITS, SPLITS)}
    conflicts: list[tuple[str, str]] = []
    for group in groups.values():
        first_of: dict[Split, _Example] = {}
        for place in group:
            for original, first in first_of.items():
                pairs[original, place.split].append((first.name, place.name))
            first_of.setdefault(place.split, place)
        other = next((one for one in group if one.label != group[0].label), None)
        if other is not None:
            class_of = data.task.class_names
            one, two = (f"{it.name} ({class_of[it.label]})" for it in (group[0], other))
            conflicts.append((one, two))
    copies = tuple(
        Copies(*pair, len(names), tuple(names[:MOST_SHOWN]))
        for pair, names in pairs.items()
        if names
    )
    return copies, Conflicts(len(conflicts), tuple(conflicts[:MOST_SHOWN]))


@dataclass(frozen=True)
class SplitSummary:
    """One split in numbers."""

    num_examples: int
    class_counts: tuple[int, ...]
    smallest: float | None
    largest: float | None
    mean: float | None


@dataclass(frozen=True)
class DataCheck:
    """All that a check finds."""

    class_names: tuple[str, ...]  # of the task
    # Of one input: (height, width, channels), ``uint8`` or ``float32``.
    input_shape: tuple[int, int, int]
    input_type: str
    splits: Mapping[Split, SplitSummary]  # in numbers
    # Classes of the task of which the site has no example at all.
    missing_classes: tuple[str, ...]
    # How many examples were left out, by their label that nobody else knows.
    dropped: Mapping[str, int]
    num_ignored: int  # files beside the images that are no images by their names
    unreadable: Mapping[str, str]  # why, by name, of the images that cannot be read
    # Equal inputs.
    copies: tuple[Copies, ...]
    conflicts: Conflicts
    # Why training cannot work, or what it would report would be wrong.
    problems: tuple[str, ...]
    warnings: tuple[str, ...]  # what may not be meant

    def document(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return asdict(self)


def check_site(data: SiteData) -> DataCheck:
    """Look at all of a site's data; nothing of it goes anywhere."""
    names = data.task.class_names
    splits = {split: _summary(part, len(names)) for split, part in data.splits()}
    copies, conflicts = find_copies(data)
    totals = torch.tensor([summary.class_counts for summary in splits.values()]).sum(
        dim=0
    )
    return DataCheck(
        class_names=names,
        input_shape=data.task.spec.image_shape,
        input_type=data.task.spec.dtype,
        splits=splits,
        missing_classes=tuple(
            name for name, total in zip(names, totals, strict=True) if total == 0
        ),
        dropped=dict(data.dropped),
        num_ignored=data.num_ignored,
        unreadable=dict(data.unreadable),
        copies=copies,
        conflicts=conflicts,
        problems=tuple(_problems(data, copies)),
        warnings=tuple(_warnings(data, splits, copies, conflicts)),
    )


def _summary(part: NamedExamples, num_classes: int) -> SplitSummary:
    labels, images = part.examples.labels, part.examples.images
    counts = tuple(torch.bincount(labels, minlength=num_classes).tolist())
    if len(part) == 0:
        return SplitSummary(0, counts, None, None, None)
    smallest, largest = float(images.min()), float(images.max())
    mean = float(images.double().mean())
    return SplitSummary(len(part), counts, smallest, largest, mean)


def _problems(data: SiteData, copies: tuple[Copies, ...]) -> Iterator[str]:
    if len(data.train) == 0:
        yield (
            "there are no training examples: nothing can be learned or remembered; "
            "add some, or lower data.fractions"
        )
    if data.unreadable and not data.skips:
        yield (
            f"{len(data.unreadable)} examples cannot be read; the data is refused "
            "until they are removed or mended, or left out (data.on_error: skip)"
        )
    for group in copies:
        if (group.original, group.copy) == ("train", "test"):
            yield (
                f"train and test overlap: {group.num_copies} test examples are copies "
                "of training examples, so that measured accuracies would be too high; "
                "remove the copies from one of the two"
            )


def _warnings(
    data: SiteData,
    splits: Mapping[Split, SplitSummary],
    copies: tuple[Copies, ...],
    conflicts: Conflicts,
) -> Iterator[str]:
    yield from data.warnings
    yield from _split_warnings(data, splits)
    for group in copies:
        pair = (group.original, group.copy)
        if group.original == group.copy:
            yield (
                f"{group.num_copies} examples of {group.copy} are copies of other "
                f"examples of {group.copy}"
            )
        elif pair in _OVERLAP_EFFECTS:
            yield (
                f"{group.num_copies} examples of {group.copy} are copies of examples "
                f"of {group.original}: {_OVERLAP_EFFECTS[pair]}"
            )
    if conflicts.num_inputs:
        yield f"{conflicts.num_inputs} inputs occur with more than one label"
    if data.dropped:
        yield (
            f"{sum(data.dropped.values())} examples are left out: the federation does "
            f"not know their labels {', '.join(data.dropped)}"
        )


def _split_warnings(
    data: SiteData, splits: Mapping[Split, SplitSummary]
) -> Iterator[str]:
    train, is_image = splits["train"], data.task.spec.dtype == "uint8"
    if len(data.validation) == 0:
        yield "there are no validation examples: nothing can be tuned on them"
    if len(data.test) == 0:
        yield "there are no test examples: the accuracy will not be known"
    if sum(count > 0 for count in train.class_counts) == 1:
        yield "all training examples have the same label"
    if train.largest is not None and train.smallest == train.largest:
        yield f"all values of all training inputs are {train.largest:g}"
    elif train.largest is not None and train.largest <= 1 and is_image:
        yield (
            "no pixel of a training image is larger than 1, where 255 is white; "
            "multiply pixels that were scaled to [0, 1] by 255"
        )

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
    """Examples of the split ``copy`` that equal examples of the split ``original``."""

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
    """Find copies by pair of splits, and equal inputs with different labels."""
    groups = defaultdict[bytes, list[_Example]](list)
    for split, part in data.splits():
        digests = digests_of(part.examples.images.numpy())
        labels = part.examples.labels.tolist()
        for digest, name, label in zip(digests, part.names, labels, strict=True):
            groups[digest].append(_Example(split, name, label))
    pairs = {pair: list[tuple[str, str]]() for pair in product(SPLITS, SPLITS)}
    conflicts: list[tuple[str, str]] = []
    class_of = data.task.class_names
    for group in groups.values():
        first_of: dict[Split, _Example] = {}
        for example in group:
            for original, first in first_of.items():
                pairs[original, example.split].append((first.name, example.name))
            first_of.setdefault(example.split, example)
        other = next((item for item in group if item.label != group[0].label), None)
        if other is not None:
            conflicts.append(
                (
                    f"{group[0].name} ({class_of[group[0].label]})",
                    f"{other.name} ({class_of[other.label]})",
                )
            )
    copies = tuple(
        Copies(*pair, len(names), tuple(names[:MOST_SHOWN]))
        for pair, names in pairs.items()
        if names
    )
    return copies, Conflicts(len(conflicts), tuple(conflicts[:MOST_SHOWN]))


@dataclass(frozen=True)
class SplitSummary:
    """Number of examples, labels and values of one split."""

    num_examples: int
    class_counts: tuple[int, ...]
    smallest: float | None
    largest: float | None
    mean: float | None


@dataclass(frozen=True)
class DataCheck:
    """Result of a check of a site's data."""

    class_names: tuple[str, ...]  # of the task
    input_shape: tuple[int, int, int]  # (height, width, channels)
    input_type: str
    splits: Mapping[Split, SplitSummary]
    missing_classes: tuple[str, ...]  # classes of the task without any example
    dropped: Mapping[str, int]  # examples left out, by label unknown to the federation
    num_ignored: int  # files beside the images with other suffixes
    unreadable: Mapping[str, str]  # errors by name of the example
    copies: tuple[Copies, ...]
    conflicts: Conflicts
    problems: tuple[str, ...]  # training is impossible, or its results would be wrong
    warnings: tuple[str, ...]  # possible mistakes

    def document(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return asdict(self)


def check_site(data: SiteData) -> DataCheck:
    """Check a site's data on this machine; nothing is sent."""
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
            "there are no training examples, so the model cannot be trained and the "
            "memory stays empty; add some, or lower data.fractions"
        )
    if data.unreadable and not data.skips:
        yield (
            f"{len(data.unreadable)} examples cannot be read, so the data is rejected; "
            "remove or fix them, or leave them out (data.on_error: skip)"
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
            f"{sum(data.dropped.values())} examples are left out, since the federation "
            f"does not know their labels {', '.join(data.dropped)}"
        )


def _split_warnings(
    data: SiteData, splits: Mapping[Split, SplitSummary]
) -> Iterator[str]:
    train, is_image = splits["train"], data.task.spec.dtype == "uint8"
    if len(data.validation) == 0:
        yield "there are no validation examples, so nothing can be tuned on them"
    if len(data.test) == 0:
        yield "there are no test examples, so the accuracy cannot be measured"
    if sum(count > 0 for count in train.class_counts) == 1:
        yield "all training examples have the same label"
    if train.largest is not None and train.smallest == train.largest:
        yield f"all values of all training inputs are {train.largest:g}"
    elif train.largest is not None and train.largest <= 1 and is_image:
        yield (
            "no pixel of a training image is larger than 1, but white is 255; "
            "multiply pixels that were scaled to [0, 1] by 255"
        )

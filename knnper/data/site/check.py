"""What is to be known of a site's data before anything is learned from it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch

from knnper.data.site.duplicates import Conflicts, Copies, find_copies
from knnper.data.site.site_data import NamedExamples, SiteData
from knnper.data.site.splits import Split


@dataclass(frozen=True)
class SplitSummary:
    """One split in numbers.

    Attributes
    ----------
    num_examples
        n.
    class_counts
        Examples of each of the c labels.
    smallest, largest, mean
        Of all values of all inputs; None without examples.
    """

    num_examples: int
    class_counts: tuple[int, ...]
    smallest: float | None
    largest: float | None
    mean: float | None


@dataclass(frozen=True)
class DataCheck:
    """All that a check finds.

    Attributes
    ----------
    class_names
        Of the task.
    input_shape, input_type
        Of one input: (height, width, channels), ``uint8`` or ``float32``.
    splits
        In numbers.
    missing_classes
        Classes of the task of which the site has no example at all.
    dropped
        How many examples were left out, by their label that nobody else knows.
    num_ignored
        Files beside the images that are no images by their names.
    unreadable
        Why, by name, of the images that cannot be read.
    copies, conflicts
        Equal inputs.
    problems
        Why training cannot work, or what it would report would be wrong.
    warnings
        What may not be meant.
    """

    class_names: tuple[str, ...]
    input_shape: tuple[int, int, int]
    input_type: str
    splits: Mapping[Split, SplitSummary]
    missing_classes: tuple[str, ...]
    dropped: Mapping[str, int]
    num_ignored: int
    unreadable: Mapping[str, str]
    copies: tuple[Copies, ...]
    conflicts: Conflicts
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return asdict(self)


def check_site(data: SiteData) -> DataCheck:
    """Look at all of a site's data; nothing of it goes anywhere."""
    splits = {split: _summary(part, data) for split, part in data.splits()}
    copies, conflicts = find_copies(data)
    totals = torch.tensor([one.class_counts for one in splits.values()]).sum(dim=0)
    names = data.task.class_names
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


def _summary(part: NamedExamples, data: SiteData) -> SplitSummary:
    labels, images = part.examples.labels, part.examples.images
    counts = torch.bincount(labels, minlength=data.task.spec.num_classes)
    if len(part) == 0:
        return SplitSummary(0, tuple(counts.tolist()), None, None, None)
    return SplitSummary(
        num_examples=len(part),
        class_counts=tuple(counts.tolist()),
        smallest=float(images.min()),
        largest=float(images.max()),
        mean=float(images.double().mean()),
    )


def _problems(data: SiteData, copies: tuple[Copies, ...]) -> Iterator[str]:
    if len(data.train) == 0:
        yield (
            "there are no training examples: nothing can be learned or remembered; "
            "add some, or lower data.fractions"
        )
    if data.unreadable:
        yield (
            f"{len(data.unreadable)} examples cannot be read; the data is refused "
            "until they are removed or mended"
        )
    for one in copies:
        if (one.original, one.copy) == ("train", "test"):
            yield (
                f"train and test overlap: {one.num_copies} test examples are copies of "
                "training examples, so that measured accuracies would be too high; "
                "remove the copies from one of the two"
            )


_OVERLAP_EFFECTS = MappingProxyType(
    {
        ("train", "validation"): "the weight of the memory will be tuned too high",
        ("validation", "test"): "measured accuracies may be too high",
    }
)


def _warnings(
    data: SiteData,
    splits: Mapping[Split, SplitSummary],
    copies: tuple[Copies, ...],
    conflicts: Conflicts,
) -> Iterator[str]:
    yield from _small_splits(data, splits)
    yield from _odd_values(data, splits)
    for one in copies:
        pair = (one.original, one.copy)
        if one.original == one.copy:
            yield f"{one.num_copies} examples of {one.copy} are copies of others there"
        elif pair in _OVERLAP_EFFECTS:
            yield (
                f"{one.num_copies} examples of {one.copy} are copies of examples of "
                f"{one.original}: {_OVERLAP_EFFECTS[pair]}"
            )
    if conflicts.num_inputs:
        yield f"{conflicts.num_inputs} inputs occur with more than one label"
    if data.dropped:
        yield (
            f"{sum(data.dropped.values())} examples are left out: the federation does "
            f"not know their labels {', '.join(data.dropped)}"
        )


def _small_splits(
    data: SiteData, splits: Mapping[Split, SplitSummary]
) -> Iterator[str]:
    if len(data.validation) == 0:
        yield "there are no validation examples: nothing can be tuned on them"
    if len(data.test) == 0:
        yield "there are no test examples: the accuracy will not be known"
    present = sum(count > 0 for count in splits["train"].class_counts)
    if present == 1:
        yield "all training examples have the same label"


def _odd_values(data: SiteData, splits: Mapping[Split, SplitSummary]) -> Iterator[str]:
    train = splits["train"]
    if train.largest is None:
        return
    if train.smallest == train.largest:
        yield f"all values of all training inputs are {train.largest:g}"
    elif data.task.spec.dtype == "uint8" and train.largest <= 1:
        yield (
            "no pixel of a training image is larger than 1, where 255 is white; "
            "multiply pixels that were scaled to [0, 1] by 255"
        )

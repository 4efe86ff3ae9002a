"""A site's own data: labels agreed on, split, read, and checked for mistakes."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from knnper.data.arrays import collect_own
from knnper.data.catalogue import DATA_SETS
from knnper.data.dividing import (
    SPLITS,
    FractionSettings,
    Split,
    clean_name,
    clean_names,
    split_by_name,
    warn_of_merged,
)
from knnper.data.examples import (
    TEXTS,
    DataFormat,
    Examples,
    InputSpec,
    no_examples,
    statistics_of,
)
from knnper.data.features import numbered_features, order_by_name, warn_of_coarse
from knnper.data.images import digests_of, require_all_read
from knnper.data.site_data import (
    SITES,
    ArrayInputs,
    Collected,
    Inputs,
    LabelSettings,
    NamedExamples,
    ReadInputs,
    SiteData,
    SiteSettings,
    SitesSettings,
    SiteTask,
    site_task_of,
    task_of,
)
from knnper.data.text import CHARACTER_NAMES, NUM_TOKENS
from knnper.errors import ConfigError, DataError, Problem, warn_once
from knnper.experiment import (
    Choice,
    Settings,
    alternatives,
    nearest,
    parse_settings,
    parse_yaml,
)
from knnper.files import parse_json, read_plain, require_plain
from knnper.reasons import Code, SafeReason

_LOG = logging.getLogger(__name__)
MOST_SHOWN = 10


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


class _Place(NamedTuple):
    split: Split
    name: str
    label: int


def find_copies(data: SiteData) -> tuple[tuple[Copies, ...], Conflicts]:
    """Return all copies, by pairs of splits in which there are any, and conflicts."""
    groups = defaultdict[bytes, list[_Place]](list)
    for split, part in data.splits():
        digests = digests_of(part.examples.images.numpy())
        labels = part.examples.labels.tolist()
        for digest, name, label in zip(digests, part.names, labels, strict=True):
            groups[digest].append(_Place(split, name, label))
    pairs = {pair: list[tuple[str, str]]() for pair in product(SPLITS, SPLITS)}
    conflicts: list[tuple[str, str]] = []
    for group in groups.values():
        first_of: dict[Split, _Place] = {}
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
        Copies(*pair, len(found), tuple(found[:MOST_SHOWN]))
        for pair, found in pairs.items()
        if found
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
    totals = torch.tensor([one.class_counts for one in splits.values()]).sum(dim=0)
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
    for one in copies:
        if (one.original, one.copy) == ("train", "test"):
            yield (
                f"train and test overlap: {one.num_copies} test examples are copies of "
                "training examples, so that measured accuracies would be too high; "
                "remove the copies from one of the two"
            )


_OVERLAP_EFFECTS = {
    ("train", "validation"): "the weight of the memory will be tuned too high",
    ("validation", "test"): "measured accuracies may be too high",
}


def _warnings(
    data: SiteData,
    splits: Mapping[Split, SplitSummary],
    copies: tuple[Copies, ...],
    conflicts: Conflicts,
) -> Iterator[str]:
    yield from data.warnings
    yield from _odd_splits(data, splits)
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


def _odd_splits(data: SiteData, splits: Mapping[Split, SplitSummary]) -> Iterator[str]:
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


_MOST_SHOWN = 20


def agree_labels(
    found: Collected, settings: LabelSettings, class_names: Sequence[str]
) -> tuple[tuple[int | None, ...], dict[str, int]]:
    """Find labels among the federation's by name; count those that it has not.

    Names are compared as `clean_name` makes them.
    """
    clean_map = {
        clean_name(name): clean_name(target)
        for name, target in settings.label_map.items()
    }
    known = {clean_name(name): label for label, name in enumerate(class_names)}

    for name, target in clean_map.items():
        if target not in known:
            raise DataError(
                f"data.label_map leads from {name!r} to {target!r}, which is no class "
                f"of the federation; {nearest(target, class_names)} known: "
                f"{_listed(class_names)}",
                reason=SafeReason(Code.WRONG_LABEL_MAP),
            )
    # Numbers are names where the federation has whole numbers for names, else places;
    # then both are known, since the map of labels leads to names.
    if found.numbered and not any(name.isdecimal() for name in class_names):
        known = {str(label): label for label in range(len(class_names))} | known
    written = clean_names(found.labels)
    named = [clean_map.get(name, name) for name in written]
    labels = tuple(known.get(name) for name in named)
    pairs = zip(written, labels, strict=True)
    counts = Counter(name for name, label in pairs if label is None)
    unknown = dict(sorted(counts.items()))
    if unknown and settings.unknown_labels == "error":
        lines = [
            f"  - {name!r}: {_counted(count, 'example')}; {nearest(name, class_names)}"
            for name, count in unknown.items()
        ]
        pairs_to_give = ", ".join(f"{name!r}: ..." for name in list(unknown)[:2])
        raise DataError(
            f"{found.source} has {_counted(len(unknown), 'label')} that the federation "
            "does not know:\n"
            + "\n".join(line.rstrip("; ") for line in lines)
            + f"\nIts classes: {_listed(class_names)}. Say which of them is meant (data"
            f".label_map: {{{pairs_to_give}}}), or leave the examples out "
            "(data.unknown_labels: drop)",
            reason=SafeReason(
                Code.UNKNOWN_LABEL, labels=len(unknown), examples=counts.total()
            ),
        )
    return labels, unknown


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_SHOWN])
    return shown if len(names) <= _MOST_SHOWN else f"{shown}, ... ({len(names)})"


def _settled(
    found: Collected, settings: LabelSettings, task: SiteTask, cache: Path | None = None
) -> SiteData:
    """Agree on labels, split, and read the inputs."""
    warn_of_merged(found.labels, "labels", found.source)
    labels, unknown = agree_labels(found, settings, task.class_names)
    kept = [at for at, label in enumerate(labels) if label is not None]
    splits = _splits(found, kept, settings.fractions)
    members = {split: [at for at in kept if splits[at] == split] for split in SPLITS}
    # At once: what is read is then kept as a whole, and each split is a part of it.
    wanted = [at for split in SPLITS for at in members[split]]
    read = ReadInputs(no_examples(task.spec).images)
    if wanted:
        inputs = _with_features_of(found, task)
        read = inputs.read(wanted, task, cache)
        _warn_of_coarse(inputs, task, found)
    parts: dict[Split, NamedExamples] = {}
    start = 0
    for split, positions in members.items():
        good = [at for at in positions if at not in read.unreadable]
        images = read.images[start : start + len(good)]
        chosen = torch.tensor([labels[at] for at in good], dtype=torch.int64)
        names = tuple(found.names[at] for at in good)
        parts[split] = NamedExamples(Examples(images, chosen), names)
        start += len(good)
    return SiteData(
        **parts,
        task=task,
        dropped=unknown,
        num_ignored=found.num_ignored,
        warnings=found.warnings,
        unreadable={found.names[at]: why for at, why in read.unreadable.items()},
        skips=settings.on_error == "skip",
    )


def _with_features_of(found: Collected, task: SiteTask) -> Inputs:
    """Return the inputs with their features in the task's order, found by name."""
    inputs, names, agreed = found.inputs, found.feature_names, task.feature_names
    if not isinstance(inputs, ArrayInputs) or task.spec.dtype != "float32":
        return inputs
    if bool(names) != bool(agreed):
        side = "the federation" if names else "the data"
        warn_once(
            _LOG,
            f"{found.source}: {side} names no features, so they are taken by their "
            f"position: {_listed(names or agreed)}",
        )
    elif names != agreed:
        return inputs.select(order_by_name(names, agreed, found.source))
    return inputs


def _warn_of_coarse(inputs: Inputs, task: SiteTask, found: Collected) -> None:
    height, width, num_features = task.spec.image_shape
    is_row = task.spec.dtype == "float32" and (height, width) == (1, 1)
    if is_row and isinstance(inputs, ArrayInputs):
        names = task.feature_names or found.feature_names
        names = names or numbered_features(num_features)
        rows = inputs.array.reshape(len(inputs.array), -1)
        warn_of_coarse(rows, names, found.source)


def _splits(
    found: Collected, kept: Sequence[int], fractions: FractionSettings
) -> Mapping[int, Split]:
    """Return the split of each example that is kept: as given, else by its name."""
    splits: dict[int, Split] = {}
    rest = kept
    if found.splits is not None:
        splits = {at: found.splits[at] for at in kept}
        if "validation" in found.given_splits:
            return splits
        # What the site gave as test data stays that; it may have chosen to have none.
        rest = [at for at in kept if splits[at] == "train"]
        fractions = replace(fractions, test=0.0)
    chosen = split_by_name([found.names[at] for at in rest], fractions)
    return splits | dict(zip(rest, chosen, strict=True))


def _own_task(found: Collected) -> SiteTask:
    """Return the task that the data itself suggests: its form and its labels."""
    shape, dtype = found.inputs.form()
    if dtype == "token":
        return SiteTask(InputSpec(shape, NUM_TOKENS, (), (), dtype), CHARACTER_NAMES)
    key = int if found.numbered else None
    class_names = tuple(sorted(set(clean_names(found.labels)), key=key))
    channels = 0 if dtype in TEXTS else shape[2]
    described = ((0.0,) * channels, (1.0,) * channels, dtype, found.inputs.vocabulary)
    spec = InputSpec(shape, len(class_names), *described)
    return SiteTask(spec, class_names, found.feature_names)


def described_task(data: SiteData) -> SiteTask:
    """Return the task of data that was surveyed without one, by its training inputs.

    Mean and deviation per channel are those that `SitesSettings` has.
    """
    spec, images = data.task.spec, data.train.examples.images.numpy()
    if spec.dtype in TEXTS or not len(images):
        return data.task
    is_real, found = spec.dtype == "float32", statistics_of(images)
    # A pixel's place behind the comma says nothing; a feature may be of any size.
    mean, std = (
        part if is_real else tuple(round(value, 4) for value in part) for part in found
    )
    return replace(data.task, spec=replace(spec, mean=mean, std=std))


def open_site(
    choice: Choice[Settings], base: Path, task: SiteTask, cache: Path | None = None
) -> SiteData:
    """Return the data that was chosen by name, all of which can be read.

    ``cache`` keeps decoded image files; other data is read, or made, each time.
    """
    data = _settled(*_collected(choice, base, task), task, cache)
    if not data.skips:
        require_all_read(data.unreadable.values())
    elif data.unreadable:
        told = "examples that cannot be read, and are left out: %d"
        _LOG.warning(told, len(data.unreadable))
    for warning in data.warnings:
        warn_once(_LOG, warning)
    return data


def survey_site(
    choice: Choice[Settings], base: Path, task: SiteTask | None
) -> SiteData:
    """Return the data as `open_site`; what cannot be read is left out and named."""
    found, settings = _collected(choice, base, task)
    return _settled(found, settings, _own_task(found) if task is None else task)


def _collected(
    choice: Choice[Settings], base: Path, task: SiteTask | None
) -> tuple[Collected, LabelSettings]:
    settings = choice.settings
    if not isinstance(settings, LabelSettings):
        raise TypeError(f"{choice.name} is no site's data: {settings}")
    if isinstance(settings, SiteSettings):
        found = settings.collect(base, task)
    else:
        found = collect_own(choice, base, task)
    if not found.names:
        raise DataError(
            f"{found.source} holds no examples; expected at least one",
            reason=SafeReason(Code.NO_EXAMPLES),
        )
    counts = Counter(found.names)
    wrong = [
        name for name, count in counts.items() if count > 1 or not _can_be_kept(name)
    ]
    if wrong:
        raise DataError(
            f"{found.source}: {len(wrong)} names of examples occur more than once, are "
            f"empty or cannot be written as UTF-8, such as {wrong[0]!r}; expected one "
            "name for each example",
            reason=SafeReason(Code.DUPLICATE_ID, count=len(wrong)),
        )
    return found, settings


def _can_be_kept(name: str) -> bool:
    """Return whether a store takes ``name``."""
    try:
        return name.encode() != b"" and "\0" not in name
    except UnicodeEncodeError:
        return False


MODEL_CARD = "model.json"
_TASK_EXPECTED = "give an experiment's YAML file, or the folder of an exported model"


def read_task(path: Path) -> SiteTask:
    """Return the task that an exported model's folder, or an experiment, describes."""
    card = path if path.name == MODEL_CARD else path / MODEL_CARD
    if card.is_file():
        if path.is_dir():
            require_plain(path)
        return _of_card(card)
    if not path.is_file():
        raise DataError(
            f"{path}: found neither an experiment's YAML file nor a folder with "
            f"{MODEL_CARD}; give what the federation's operator gave you"
        )
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as text in UTF-8: {error}; {_TASK_EXPECTED}"
        ) from error
    section = document.get("data") if isinstance(document, Mapping) else None
    return _of_section(section if isinstance(section, Mapping) else {}, str(path))


def _of_card(card: Path) -> SiteTask:
    try:
        document = parse_json(read_plain(card))
    except ValueError as error:
        raise DataError(
            f"{card} is no JSON: {error}; export the model again"
        ) from error
    described = document.get("card") if isinstance(document, Mapping) else None
    if not isinstance(described, Mapping):
        raise DataError(f"{card} describes no model; export the model again")
    return site_task_of(described, str(card))


def _of_section(section: Mapping[str, Any], source: str) -> SiteTask:
    kinds: dict[str, type[Settings]] = {SITES: SitesSettings, **DATA_SETS}
    name = section.get("name")
    if not isinstance(name, str) or name not in kinds:
        raise DataError(
            f"{source}: found data.name {name!r}, expected that of an experiment; "
            f"{_TASK_EXPECTED}. {alternatives(str(name), kinds)}"
        )
    problems: list[Problem] = []
    values = {key: value for key, value in section.items() if key != "name"}
    settings = parse_settings(kinds[name], values, "data", problems)
    if isinstance(settings, SitesSettings):
        return settings.task()
    if not isinstance(settings, DataFormat):
        raise ConfigError(problems, source)
    try:
        return task_of(settings.load())
    except DataError as error:
        raise DataError(
            f"{source} is over a data set that cannot be loaded here: {error}; ask the "
            "federation's operator for the experiment as it was submitted, from the "
            "run's folder, or for an exported model"
        ) from error

"""Open a site's own data: agree on labels, split it, and read the inputs."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from knnper.data.characters import CHARACTER_NAMES, NUM_TOKENS
from knnper.data.dividing import (
    SPLITS,
    FractionSettings,
    Split,
    clean_name,
    clean_names,
    split_by_name,
    warn_of_merged,
)
from knnper.data.examples import TEXTS, Examples, InputSpec, no_examples
from knnper.data.features import (
    default_feature_names,
    listed,
    order_by_name,
    warn_of_coarse,
)
from knnper.data.images import require_all_read
from knnper.data.normalization import statistics_of
from knnper.data.own_data import collect_own
from knnper.data.site_data import (
    CollectedExamples,
    LabelSettings,
    NamedExamples,
    SiteData,
    SiteSettings,
)
from knnper.data.site_inputs import ArrayInputs, ReadInputs, SiteInputs
from knnper.data.site_task import SiteTask
from knnper.errors import DataError, warn_once
from knnper.reasons import Code, SafeReason
from knnper.settings import Choice, Settings, nearest

_LOG = logging.getLogger(__name__)
_MOST_SHOWN = 20


def match_labels(
    collected: CollectedExamples, settings: LabelSettings, class_names: Sequence[str]
) -> tuple[tuple[int | None, ...], dict[str, int]]:
    """Match labels with the federation's classes by name; count unknown labels.

    Names are normalised by `clean_name` before the comparison.
    """
    clean_map = {
        clean_name(name): clean_name(target)
        for name, target in settings.label_map.items()
    }
    known = {clean_name(name): label for label, name in enumerate(class_names)}

    for name, target in clean_map.items():
        if target not in known:
            raise DataError(
                f"data.label_map maps {name!r} to {target!r}, which is not a class "
                f"of the federation; {nearest(target, class_names)} known: "
                f"{listed(class_names, _MOST_SHOWN)}",
                reason=SafeReason(Code.WRONG_LABEL_MAP),
            )
    # Numbers are positions of classes, unless the federation's class names are numbers.
    # Names stay valid beside positions, since label_map maps to names.
    if collected.numbered and not any(name.isdecimal() for name in class_names):
        known = {str(label): label for label in range(len(class_names))} | known
    written = clean_names(collected.labels)
    named = [clean_map.get(name, name) for name in written]
    labels = tuple(known.get(name) for name in named)
    pairs = zip(written, labels, strict=True)
    counts = Counter(name for name, label in pairs if label is None)
    unknown = dict(sorted(counts.items()))
    if unknown and settings.unknown_labels == "error":
        lines = [
            f"  - {name!r}: {_format_count(count, 'example')}; "
            f"{nearest(name, class_names)}"
            for name, count in unknown.items()
        ]
        pairs_to_give = ", ".join(f"{name!r}: ..." for name in list(unknown)[:2])
        raise DataError(
            f"{collected.source} has {_format_count(len(unknown), 'label')} that the "
            "federation does not know:\n"
            + "\n".join(line.rstrip("; ") for line in lines)
            + f"\nIts classes: {listed(class_names, _MOST_SHOWN)}. Map them (data"
            f".label_map: {{{pairs_to_give}}}), or leave the examples out "
            "(data.unknown_labels: drop)",
            reason=SafeReason(
                Code.UNKNOWN_LABEL, labels=len(unknown), examples=counts.total()
            ),
        )
    return labels, unknown


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _read_splits(
    collected: CollectedExamples,
    settings: LabelSettings,
    task: SiteTask,
    cache: Path | None = None,
) -> SiteData:
    """Match the labels, assign splits, and read the inputs."""
    warn_of_merged(collected.labels, "labels", collected.source)
    labels, unknown = match_labels(collected, settings, task.class_names)
    known = [at for at, label in enumerate(labels) if label is not None]
    splits = _assign_splits(collected, known, settings.fractions)
    members = {split: [at for at in known if splits[at] == split] for split in SPLITS}
    # One call for all splits, so that the cache holds them in one entry.
    positions_to_read = [at for split in SPLITS for at in members[split]]
    read = ReadInputs(no_examples(task.spec).images)
    if positions_to_read:
        inputs = _reorder_features(collected, task)
        read = inputs.read(positions_to_read, task, cache)
        _warn_of_coarse(inputs, task, collected)
    parts: dict[Split, NamedExamples] = {}
    start = 0
    for split, positions in members.items():
        good = [at for at in positions if at not in read.unreadable]
        images = read.images[start : start + len(good)]
        chosen = torch.tensor([labels[at] for at in good], dtype=torch.int64)
        names = tuple(collected.names[at] for at in good)
        parts[split] = NamedExamples(Examples(images, chosen), names)
        start += len(good)
    return SiteData(
        **parts,
        task=task,
        dropped=unknown,
        num_ignored=collected.num_ignored,
        warnings=collected.warnings,
        unreadable={collected.names[at]: why for at, why in read.unreadable.items()},
        skips=settings.on_error == "skip",
    )


def _reorder_features(collected: CollectedExamples, task: SiteTask) -> SiteInputs:
    """Return the inputs with their features, matched by name, in the task's order."""
    inputs, names, agreed = (
        collected.inputs,
        collected.feature_names,
        task.feature_names,
    )
    if not isinstance(inputs, ArrayInputs) or task.spec.dtype != "float32":
        return inputs
    if bool(names) != bool(agreed):
        side = "the federation" if names else "the data"
        warn_once(
            _LOG,
            f"{collected.source}: {side} has no names of features, so they are "
            f"matched by position: {listed(names or agreed, _MOST_SHOWN)}",
        )
    elif names != agreed:
        return inputs.select(order_by_name(names, agreed, collected.source))
    return inputs


def _warn_of_coarse(
    inputs: SiteInputs, task: SiteTask, collected: CollectedExamples
) -> None:
    height, width, num_features = task.spec.image_shape
    is_row = task.spec.dtype == "float32" and (height, width) == (1, 1)
    if is_row and isinstance(inputs, ArrayInputs):
        names = task.feature_names or collected.feature_names
        names = names or default_feature_names(num_features)
        rows = inputs.array.reshape(len(inputs.array), -1)
        warn_of_coarse(rows, names, collected.source)


def _assign_splits(
    collected: CollectedExamples, known: Sequence[int], fractions: FractionSettings
) -> Mapping[int, Split]:
    """Return the split of each known example: the given one, else one by its name."""
    splits: dict[int, Split] = {}
    undivided = known
    if collected.splits is not None:
        splits = {at: collected.splits[at] for at in known}
        if "validation" in collected.given_splits:
            return splits
        # Given test data stays test data; a site may also have chosen to have none.
        undivided = [at for at in known if splits[at] == "train"]
        fractions = replace(fractions, test=0.0)
    chosen = split_by_name([collected.names[at] for at in undivided], fractions)
    return splits | dict(zip(undivided, chosen, strict=True))


def _infer_task(collected: CollectedExamples) -> SiteTask:
    """Infer a task from the form and the labels of the data."""
    shape, dtype = collected.inputs.form()
    if dtype == "token":
        return SiteTask(InputSpec(shape, NUM_TOKENS, (), (), dtype), CHARACTER_NAMES)
    key = int if collected.numbered else None
    class_names = tuple(sorted(set(clean_names(collected.labels)), key=key))
    channels = 0 if dtype in TEXTS else shape[2]
    spec = InputSpec(
        shape,
        len(class_names),
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        dtype=dtype,
        vocabulary=collected.inputs.vocabulary,
    )
    return SiteTask(spec, class_names, collected.feature_names)


def task_with_statistics(data: SiteData) -> SiteTask:
    """Return the inferred task of data, with mean and deviation of its training inputs.

    They are given per channel, in the unit of `SitesSettings`.
    """
    spec, images = data.task.spec, data.train.examples.images.numpy()
    if spec.dtype in TEXTS or not len(images):
        return data.task
    is_real, statistics = spec.dtype == "float32", statistics_of(images)
    # Four decimals suffice for pixels in [0, 1]; features may have any scale.
    mean, std = (
        part if is_real else tuple(round(value, 4) for value in part)
        for part in statistics
    )
    return replace(data.task, spec=replace(spec, mean=mean, std=std))


def open_site(
    choice: Choice[Settings], base: Path, task: SiteTask, cache: Path | None = None
) -> SiteData:
    """Open the data of a site; raise if examples cannot be read and are not skipped.

    ``cache`` is the folder for decoded image files; other data is read each time.
    """
    data = _read_splits(*_collect(choice, base, task), task, cache)
    if not data.skips:
        require_all_read(data.unreadable.values())
    elif data.unreadable:
        _LOG.warning("%d unreadable examples are left out", len(data.unreadable))
    for warning in data.warnings:
        warn_once(_LOG, warning)
    return data


def survey_site(
    choice: Choice[Settings], base: Path, task: SiteTask | None
) -> SiteData:
    """Open data like `open_site`, but list unreadable examples and leave them out.

    Without ``task``, one is inferred from the data.
    """
    collected, settings = _collect(choice, base, task)
    return _read_splits(
        collected, settings, _infer_task(collected) if task is None else task
    )


def _collect(
    choice: Choice[Settings], base: Path, task: SiteTask | None
) -> tuple[CollectedExamples, LabelSettings]:
    settings = choice.settings
    if not isinstance(settings, LabelSettings):
        raise TypeError(f"{choice.name} is not a format of a site: {settings}")
    if isinstance(settings, SiteSettings):
        collected = settings.collect(base, task)
    else:
        collected = collect_own(choice, base, task)
    if not collected.names:
        raise DataError(
            f"{collected.source} contains no examples, expected at least one",
            reason=SafeReason(Code.NO_EXAMPLES),
        )
    counts = Counter(collected.names)
    wrong = [
        name for name, count in counts.items() if count > 1 or not _is_storable(name)
    ]
    if wrong:
        raise DataError(
            f"{collected.source}: {len(wrong)} names of examples occur more than "
            f"once, are empty or cannot be written as UTF-8, such as {wrong[0]!r}; "
            "expected one name for each example",
            reason=SafeReason(Code.DUPLICATE_ID, count=len(wrong)),
        )
    return collected, settings


def _is_storable(name: str) -> bool:
    """Test whether a store accepts ``name``."""
    try:
        return name.encode() != b"" and "\0" not in name
    except UnicodeEncodeError:
        return False

"""From what a reader found to the data that a site learns from."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from knnper.config.errors import DataError
from knnper.data.examples import Examples, InputSpec, no_examples
from knnper.data.site.agreement import SiteTask
from knnper.data.site.collected import Collected, ReadInputs, SiteSettings
from knnper.data.site.labels import agree_labels
from knnper.data.site.site_data import NamedExamples, SiteData
from knnper.data.site.splits import SPLITS, FractionSettings, Split, split_by_name
from knnper.data.text.alphabet import CHARACTER_NAMES, NUM_TOKENS

MOST_SHOWN = 10


def settle(found: Collected, settings: SiteSettings, task: SiteTask) -> SiteData:
    """Agree on labels, split, and read the inputs.

    Inputs that cannot be read are left out and named in the result.

    Raises
    ------
    DataError
        If there are no examples, names cannot be told apart or kept, labels are
        unknown (see `agree_labels`), or inputs cannot be brought to the task's form.
    """
    _require_examples(found)
    _require_names(found)
    agreed = agree_labels(found, settings, task.class_names)
    kept = [at for at, label in enumerate(agreed.labels) if label is not None]
    splits = _splits(found, kept, settings.fractions)
    members = {split: [at for at in kept if splits[at] == split] for split in SPLITS}
    # At once: what is read is then kept as a whole, and each split is a part of it.
    read = _read(found, [at for split in SPLITS for at in members[split]], task)
    return SiteData(
        **_named(found, members, agreed.labels, read),
        task=task,
        dropped=agreed.unknown,
        num_ignored=found.num_ignored,
        unreadable={found.names[at]: why for at, why in read.unreadable.items()},
    )


def require_readable(data: SiteData) -> SiteData:
    """Return ``data``, of which every input could be read.

    Raises
    ------
    DataError
        With the first ones that could not.
    """
    if not data.unreadable:
        return data
    lines = [f"  - {data.unreadable[name]}" for name in list(data.unreadable)]
    left = len(lines) - MOST_SHOWN
    more = [f"  - and {left} more"] if left > 0 else []
    raise DataError(
        f"{len(lines)} examples cannot be read:\n"
        + "\n".join(lines[:MOST_SHOWN] + more)
    )


def own_task(found: Collected) -> SiteTask:
    """Return the task that the data itself suggests: its form and its labels.

    Raises
    ------
    DataError
        If there is no example.
    """
    _require_examples(found)
    form = found.inputs.form()
    if form.dtype == "token":
        spec = InputSpec(form.shape, NUM_TOKENS, (), (), dtype=form.dtype)
        return SiteTask(spec, CHARACTER_NAMES)
    channels = form.shape[2]
    class_names = _own_classes(found)
    spec = InputSpec(
        image_shape=form.shape,
        num_classes=len(class_names),
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        dtype=form.dtype,
    )
    return SiteTask(spec, class_names)


def _own_classes(found: Collected) -> tuple[str, ...]:
    names = set(found.labels)
    return tuple(sorted(names, key=int if found.numbered else None))


def _require_examples(found: Collected) -> None:
    if not found.names:
        raise DataError(f"{found.source} holds no examples; expected at least one")


def _require_names(found: Collected) -> None:
    counts = Counter(found.names)
    wrong = [
        name for name, count in counts.items() if count > 1 or not _can_be_kept(name)
    ]
    if wrong:
        raise DataError(
            f"{found.source}: {len(wrong)} names of examples occur more than once, are "
            f"empty or cannot be written as UTF-8, such as {wrong[0]!r}; expected one "
            "name for each example"
        )


def _can_be_kept(name: str) -> bool:
    """Return whether a store takes ``name``."""
    try:
        return name.encode() != b"" and "\0" not in name
    except UnicodeEncodeError:
        return False


def _splits(
    found: Collected, kept: Sequence[int], fractions: FractionSettings
) -> Mapping[int, Split]:
    """Return the split of each example that is kept: as given, else by its name."""
    given = found.splits
    if given is None:
        return _dealt(found, kept, fractions)
    splits = {at: given[at] for at in kept}
    if "validation" in found.given_splits:
        return splits
    # What the site gave as test data stays that; it may also have chosen to have none.
    rest = [at for at in kept if splits[at] == "train"]
    return splits | _dealt(found, rest, replace(fractions, test=0.0))


def _dealt(
    found: Collected, positions: Sequence[int], fractions: FractionSettings
) -> dict[int, Split]:
    splits = split_by_name([found.names[at] for at in positions], fractions)
    return dict(zip(positions, splits, strict=True))


def _read(found: Collected, positions: Sequence[int], task: SiteTask) -> ReadInputs:
    if not positions:
        return ReadInputs(no_examples(task.spec).images)
    return found.inputs.read(positions, task)


def _named(
    found: Collected,
    members: Mapping[Split, Sequence[int]],
    labels: Sequence[int | None],
    read: ReadInputs,
) -> dict[Split, NamedExamples]:
    """Return each split: its images follow those of the split before it."""
    kept = {
        split: [at for at in members[split] if at not in read.unreadable]
        for split in SPLITS
    }
    images = torch.split(read.images, [len(kept[split]) for split in SPLITS])
    return {
        split: NamedExamples(
            Examples(
                part, torch.tensor([labels[at] for at in positions], dtype=torch.int64)
            ),
            tuple(found.names[at] for at in positions),
        )
        for (split, positions), part in zip(kept.items(), images, strict=True)
    }

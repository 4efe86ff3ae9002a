"""From what a site calls its labels to the labels of the federation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from knnper.config.errors import DataError
from knnper.config.suggestions import nearest
from knnper.data.site.collected import Collected, SiteSettings

_MOST_SHOWN = 20


@dataclass(frozen=True)
class Agreed:
    """Labels that the federation knows.

    Attributes
    ----------
    labels
        Of each example; None where the federation does not know its label.
    unknown
        How many examples have each unknown label.
    """

    labels: tuple[int | None, ...]
    unknown: Mapping[str, int]


def agree_labels(
    found: Collected, settings: SiteSettings, class_names: Sequence[str]
) -> Agreed:
    """Find each example's label among those of the federation, by name.

    Numbers without names are names where the federation's names are whole numbers, as
    those of digits, and positions among its names where none of them is.

    Parameters
    ----------
    found
        The examples.
    settings
        Other names of labels, and what becomes of unknown ones.
    class_names
        The federation's, in the order of its labels.

    Raises
    ------
    DataError
        If labels are unknown and not to be dropped, with all of them and their counts,
        or if ``label_map`` leads to a name that the federation does not have.
    """
    _require_targets(settings.label_map, class_names)
    known = _label_of(found.numbered, class_names)
    label_of = {
        name: known.get(settings.label_map.get(name, name))
        for name in set(found.labels)
    }
    labels = tuple(label_of[name] for name in found.labels)
    counts = Counter(name for name in found.labels if label_of[name] is None)
    unknown = dict(sorted(counts.items()))
    if unknown and settings.unknown_labels == "error":
        raise _unknown(found.source, unknown, class_names)
    return Agreed(labels, unknown)


def _label_of(numbered: bool, class_names: Sequence[str]) -> Mapping[str, int]:
    by_name = {name: label for label, name in enumerate(class_names)}
    if not numbered or any(name.isdecimal() for name in class_names):
        return by_name
    # The map of labels leads to names, so that both are known here.
    return {**{str(label): label for label in range(len(class_names))}, **by_name}


def _require_targets(label_map: Mapping[str, str], class_names: Sequence[str]) -> None:
    for name, target in label_map.items():
        if target not in class_names:
            raise DataError(
                f"data.label_map leads from {name!r} to {target!r}, which is no class "
                f"of the federation; {_known(target, class_names)}"
            )


def _unknown(
    source: str, unknown: Mapping[str, int], class_names: Sequence[str]
) -> DataError:
    lines = [
        f"  - {name!r}: {_counted(count, 'example')}; {nearest(name, class_names)}"
        for name, count in unknown.items()
    ]
    pairs = ", ".join(f"{name!r}: ..." for name in list(unknown)[:2])
    return DataError(
        f"{source} has {_counted(len(unknown), 'label')} that the federation does not "
        "know:\n"
        + "\n".join(line.rstrip("; ") for line in lines)
        + f"\nIts classes: {_listed(class_names)}. Say which of them is meant (data."
        f"label_map: {{{pairs}}}), or leave the examples out (data.unknown_labels: "
        "drop)"
    )


def _known(name: str, class_names: Sequence[str]) -> str:
    guess = nearest(name, class_names)
    return f"{guess} known: {_listed(class_names)}".lstrip()


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_SHOWN])
    return shown if len(names) <= _MOST_SHOWN else f"{shown}, ... ({len(names)})"

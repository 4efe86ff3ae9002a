"""Runs that differ in the seed alone belong together; what sets the others apart."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from simulation.reporting.runs import Run

MOST_IN_LABEL = 3
"""Departures that are told in a label; with more of them it has the run's name."""

ABSENT = "-"


@dataclass(frozen=True)
class Setup:
    """Runs that differ in the seed alone: one row of a table, one line of a chart.

    Attributes
    ----------
    title
        The method's, with what is put on top of it.
    suffix
        What tells it from other setups of that title; empty for the only one.
    runs
        One a seed, in the order of the seeds.
    """

    title: str
    suffix: str
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """How it is named in tables and charts, in no two setups the same."""
        return self.title + self.suffix

    @property
    def has_reference(self) -> bool:
        """Whether its unpersonalised model means anything."""
        return self.runs[0].reference_title is not None


@dataclass(frozen=True)
class Departures:
    """In which settings setups differ.

    Attributes
    ----------
    keys
        Dotted keys with more than one value among the setups that have them.
    cells
        For each setup the values of the keys, as text; `ABSENT` where it has none.
    """

    keys: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]


def setups_of(runs: Iterable[Run]) -> list[Setup]:
    """Return the setups of ``runs``, in the order of each one's first run.

    A second run with the same seed is no further evidence: it makes another setup.
    """
    kinds: dict[tuple[str, int], list[Run]] = {}
    times: Counter[tuple[str, int | None]] = Counter()
    for run in runs:
        kinds.setdefault((run.kind, times[run.kind, run.seed]), []).append(run)
        times[run.kind, run.seed] += 1
    by_seed = [
        tuple(sorted(found, key=lambda run: run.seed or 0)) for found in kinds.values()
    ]
    suffixes = _suffixes(by_seed)
    return [
        Setup(found[0].title, suffix, found)
        for found, suffix in zip(by_seed, suffixes, strict=True)
    ]


def split_of(setups: Sequence[Setup]) -> str:
    """Return which split the clients of setups over the same data were tested on."""
    return setups[0].runs[0].evaluated_on


def departures(firsts: Sequence[Run]) -> Departures:
    """Return where the settings of runs, one of each setup, differ."""
    settings = [run.settings for run in firsts]
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = tuple(
        key
        for key in keys
        if len({as_text(one[key]) for one in settings if key in one}) > 1
    )
    cells = tuple(
        tuple(as_text(one[key]) if key in one else ABSENT for key in differing)
        for one in settings
    )
    return Departures(differing, cells)


def in_common(firsts: Sequence[Run]) -> dict[str, str]:
    """Return the settings that all runs have with the same value, as text."""
    first, *others = [run.settings for run in firsts]
    return {
        key: as_text(value)
        for key, value in first.items()
        if all(key in one and one[key] == value for one in others)
    }


def _suffixes(setups: Sequence[tuple[Run, ...]]) -> list[str]:
    """Return for each setup what tells it from the others of its title."""
    suffixes = [""] * len(setups)
    for title in {found[0].title for found in setups}:
        places = [n for n, found in enumerate(setups) if found[0].title == title]
        if len(places) > 1:
            told = _told_apart([setups[place][0] for place in places])
            for place, suffix in zip(places, told, strict=True):
                suffixes[place] = suffix
    return suffixes


def _told_apart(firsts: Sequence[Run]) -> list[str]:
    found = departures(firsts)
    suffixes = [_suffix(found.keys, cells) for cells in found.cells]
    if not 0 < len(found.keys) <= MOST_IN_LABEL or len(set(suffixes)) < len(suffixes):
        suffixes = [f" ({run.name})" for run in firsts]
    if len(set(suffixes)) < len(suffixes):
        suffixes = [f" ({run.path})" for run in firsts]
    return suffixes


def _suffix(keys: Sequence[str], cells: Sequence[str]) -> str:
    told = zip(_short(keys), cells, strict=True)
    return "".join(f", {key} {cell}" for key, cell in told if cell != ABSENT)


def _short(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key; the whole key where two end alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [
        key if ends.count(end) > 1 else end for key, end in zip(keys, ends, strict=True)
    ]


def as_text(value: Any) -> str:
    """Return the value of a setting as tables have it."""
    return value if isinstance(value, str) else json.dumps(value)

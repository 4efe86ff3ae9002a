"""The file of a comparison: what all rows share, and what each one is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from knnper.config.errors import Problem
from knnper.config.names import is_name
from knnper.config.overrides import parse_overrides
from knnper.config.ranges import NonNegativeInt
from knnper.config.sections import Settings

Section = dict[str, Any]
Grid = dict[str, Annotated[list[Any], Field(min_length=1)]]

ITS_OWN = ("run.seed", "run.engine", "partition.evaluate_on")
"""What the comparison itself sets."""


@dataclass(frozen=True)
class BaseSettings(Settings):
    """The sections of an experiment that all rows share.

    Attributes
    ----------
    data, partition, model, training, run
        As in an experiment.
    """

    data: Section
    partition: Section
    model: Section
    training: Section = field(default_factory=dict)
    run: Section = field(default_factory=dict)


@dataclass(frozen=True)
class RowSettings(Settings):
    """One row of the table.

    Attributes
    ----------
    method, personalization
        As in an experiment.
    model, training
        What differs from these sections of the base.
    grid
        Values to choose from on validation data, by dotted key. They replace those
        that all rows share key by key; an empty list takes a key out.
    title
        Its name in the table; by default that of the method and what is on top.
    """

    method: Section
    personalization: Section = field(default_factory=dict)
    model: Section = field(default_factory=dict)
    training: Section = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    title: str | None = None


@dataclass(frozen=True)
class ComparisonSettings(Settings):
    """A comparison of methods.

    Attributes
    ----------
    name
        Names its folder.
    base
        What all rows share.
    rows
        By a short name.
    grid
        Values to choose from, by dotted key, for every row.
    seeds
        Of the runs that are tested.
    tuning_seed
        Of the runs that are compared on validation data.
    tuning_set
        What differs in these runs, by dotted key: a shorter training.
    reference
        The row against whose accuracy a client counts as hurt.
    each_also_with
        A section ``personalization`` with which every row that has none is shown once
        more, in a row ``ROW-NAME`` behind all others; training is done once for both.
    """

    name: str
    base: BaseSettings
    rows: Annotated[dict[str, RowSettings], Field(min_length=1)]
    reference: str
    grid: Grid = field(default_factory=dict)
    each_also_with: Section | None = None
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0, 1, 2)
    tuning_seed: NonNegativeInt = 0
    tuning_set: Section = field(default_factory=dict)

    def grid_of(self, row: str) -> Grid:
        """Return the values that a row chooses from, by dotted key."""
        both = {**self.grid, **self.rows[row].grid}
        return {key: values for key, values in both.items() if values}


def problems_of(
    settings: ComparisonSettings, overrides: Sequence[str]
) -> Iterable[Problem]:
    """Yield what does not go together, before any experiment is looked at."""
    if not is_name(settings.name):
        message = f"found {settings.name!r}, expected letters, digits, '.', '_' and '-'"
        yield Problem("name", message)
    if settings.reference not in settings.rows:
        known = ", ".join(settings.rows)
        message = f"found {settings.reference!r}, expected the name of a row: {known}"
        yield Problem("reference", message)
    for name in settings.rows:
        if not is_name(name):
            message = "expected letters, digits, '.', '_' and '-'"
            yield Problem(f"rows.{name}", message)
    tuned = {key for name in settings.rows for key in settings.grid_of(name)}
    yield from _key_problems(tuned, set(settings.tuning_set), overrides)
    if tuned and settings.base.partition.get("validation_fraction") == 0:
        message = (
            "found 0, expected more: rows with a grid choose on validation data; set "
            "it, or take the grids out"
        )
        yield Problem("base.partition.validation_fraction", message)


def _key_problems(
    tuned: set[str], tuned_with: set[str], overrides: Sequence[str]
) -> Iterable[Problem]:
    malformed: list[Problem] = []
    changed = {".".join(one.path) for one in parse_overrides(overrides, malformed)}
    yield from malformed
    for key in sorted(tuned & changed):
        message = "is in a grid: an override would make its candidates equal"
        yield Problem(f"override {key}", message)
    for key in sorted(tuned & tuned_with):
        message = "is in a grid: its candidates would be tried with one value"
        yield Problem(f"tuning_set {key}", message)
    places = (("grid", tuned), ("tuning_set", tuned_with), ("override", changed))
    for place, keys in places:
        for key in sorted(keys & set(ITS_OWN)):
            yield Problem(f"{place} {key}", "the comparison itself sets this")

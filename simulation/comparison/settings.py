"""The file of a comparison: what all rows share, and what each one is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from knnper.config.errors import Problem
from knnper.config.ranges import NonNegativeInt
from knnper.config.sections import Settings
from simulation.batch.checks import (
    as_part_of,
    changes_of,
    clashes,
    inside_each_other,
    keys_set,
    keys_set_by_any,
    name_problems,
    own_problems,
    seed_problems,
)

Section = dict[str, Any]
Grid = dict[str, Annotated[list[Any], Field(min_length=1)]]


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
        The row with whose model clients are compared, to count those degraded.
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
    rows = ((f"rows.{name}", name) for name in settings.rows)
    yield from name_problems([("name", settings.name), *rows])
    yield from seed_problems(settings.seeds)
    if settings.reference not in settings.rows:
        known = ", ".join(settings.rows)
        message = f"found {settings.reference!r}, expected the name of a row: {known}"
        yield Problem("reference", message)
    yield from _key_problems(settings, overrides)


def _key_problems(
    settings: ComparisonSettings, overrides: Sequence[str]
) -> Iterable[Problem]:
    malformed: list[Problem] = []
    changed = changes_of(overrides, malformed)
    yield from malformed
    grids = {name: settings.grid_of(name) for name in settings.rows}
    tuned = {key for grid in grids.values() for key in grid}
    # Both are made after the grid's: a section as a whole would replace its values.
    for key, other in clashes(changed, tuned):
        message = f"is in a grid{as_part_of(key, other)}: an override would make its"
        yield Problem(f"override {key}", f"{message} candidates equal, or be lost")
    for key, other in clashes(settings.tuning_set, tuned):
        message = f"is in a grid{as_part_of(key, other)}: its candidates would be tried"
        yield Problem(f"tuning_set {key}", f"{message} with one value")
    for name, grid in grids.items():
        yield from inside_each_other(f"rows.{name}: grid", grid)
    places = {
        "grid": {key for grid in grids.values() for key in keys_set_by_any(grid)},
        "tuning_set": keys_set(settings.tuning_set),
        "override": keys_set(changed),
    }
    yield from own_problems("comparison", places)

"""What the file of every batch must keep to: names, titles, seeds and dotted keys."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from knnper.errors import ConfigError, Problem
from knnper.experiment import Experiment, NonNegativeInt, PositiveInt, Settings, is_name
from knnper.loading import (
    alternatives,
    apply_overrides,
    load_experiment,
    parse_overrides,
    parse_settings,
    read_yaml,
    results_identity,
    shown,
    with_overrides,
)
from knnper.seeding import RandomKey
from knnper.server.results import EARLIER_NAMES, Summary
from knnper.simulation.partition.assignment import PartitionSettings
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.catalogue import METHODS, PERSONALIZERS, title_of, trained_as
from knnper.strategies.core.method import AS_IT_IS

ITS_OWN = ("name", "run.seed", "run.engine", "partition.evaluate_on")
"""What a batch itself sets in every run."""


def name_problems(names: Iterable[tuple[str, str]]) -> Iterable[Problem]:
    """Yield which of the names cannot name folders.

    Parameters
    ----------
    names
        Where each stands, and what it is.
    """
    for place, name in names:
        if not is_name(name):
            message = f"found {name!r}, expected letters, digits, '.', '_' and '-'"
            yield Problem(place, message)


def seed_problems(seeds: Sequence[int]) -> Iterable[Problem]:
    """Yield a problem if a seed is there twice: its run would count twice."""
    if len(set(seeds)) < len(seeds):
        yield Problem("seeds", f"found {list(seeds)}, expected each one once")


def title_problems(place: str, titles: Mapping[str, str]) -> Iterable[Problem]:
    """Yield what nobody could tell apart in a table.

    Parameters
    ----------
    place
        The key that holds what has a title.
    titles
        By name.
    """
    names: dict[str, str] = {}
    for name, title in titles.items():
        first = names.setdefault(title, name)
        if first != name:
            message = f"found {title!r}, as {first} has; expected a title of its own"
            yield Problem(f"{place}.{name}.title", message)


def changes_of(overrides: Sequence[str], problems: list[Problem]) -> dict[str, Any]:
    """Return overrides by dotted key; what is malformed joins ``problems``."""
    found = parse_overrides(overrides, problems)
    return {".".join(one.path): one.value for one in found}


def keys_set(values: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys that values set: of a section those inside it.

    ``{"training": {"momentum": 0.5}}`` sets ``training.momentum``.
    """
    return {leaf for key, value in values.items() for leaf in _leaves(key, value)}


def keys_set_by_any(lists: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys that any value of these lists sets, see `keys_set`.

    What is no list, as a range, is one value.
    """
    return {
        leaf
        for key, values in lists.items()
        for value in (values if isinstance(values, list) else [values])
        for leaf in _leaves(key, value)
    }


def _leaves(key: str, value: Any) -> Iterable[str]:
    # An empty section has no key inside, and is set as a whole.
    if not isinstance(value, Mapping) or not value:
        yield key
        return
    for name, inside in value.items():
        yield from _leaves(f"{key}.{name}", inside)


def clashes(keys: Iterable[str], others: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield which keys set what one of ``others`` sets, each with the first such.

    Those are equal keys, and those of which one lies inside the other: a section that
    is set as a whole replaces all that was set inside it.
    """
    known = sorted(others)
    for key in sorted(keys):
        other = next((one for one in known if _overlap(key, one)), None)
        if other is not None:
            yield key, other


def _overlap(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def as_part_of(key: str, other: str) -> str:
    """Return what to add to a message on two keys that clash; empty if they are one."""
    return "" if key == other else f" with {other}"


def inside_each_other(place: str, keys: Iterable[str]) -> Iterable[Problem]:
    """Yield which of the keys lie inside another one, and so set the same twice."""
    known = set(keys)
    for key in sorted(known):
        for _, other in clashes([key], known - {key}):
            if key.startswith(f"{other}."):
                message = f"is varied with {other} too; take one of the two out"
                yield Problem(f"{place} {key}", message)


def own_problems(batch: str, keys: Mapping[str, Iterable[str]]) -> Iterable[Problem]:
    """Yield what is set although the batch itself sets it.

    Parameters
    ----------
    batch
        What people call it.
    keys
        That are set, by where they stand.
    """
    for place, found in keys.items():
        for key, _ in clashes(found, ITS_OWN):
            message = f"the {batch} itself sets this in every run; take it out"
            yield Problem(f"{place} {key}", message)


def batch_experiment(
    document: Mapping[str, Any], overrides: Sequence[str]
) -> Experiment:
    """Return an experiment of a batch, on the serial engine.

    Parameters
    ----------
    document, overrides
        See `load_experiment`.

    Raises
    ------
    ConfigError
        As `load_experiment`, and where the number of threads is not fixed.
    """
    changes = [*overrides, "run.engine=serial"]
    experiment = load_experiment(document, experiment_catalogue(), changes)
    if experiment.run.threads_per_worker == "auto":
        message = (
            "found 'auto', expected a number: the last bits of all runs depend on it, "
            "and what is added later would have that of another machine. With 1, the "
            "default, --workers processes keep the cores busy"
        )
        raise ConfigError([Problem("run.threads_per_worker", message)])
    return experiment


def require_validation_data(experiment: Experiment) -> None:
    """Do nothing unless an experiment is to be tested on validation data it has not.

    Found only after training, nobody would have a result.

    Raises
    ------
    ConfigError
        If it holds nothing out, and is tested on what is held out.
    """
    partition = experiment.partition.settings
    if not isinstance(partition, PartitionSettings):
        return
    if partition.evaluate_on == "validation" and partition.validation_fraction == 0:
        message = (
            "found 0, expected more: settings are chosen on validation data; set it, "
            "as in partition.validation_fraction=0.2, or choose nothing"
        )
        raise ConfigError([Problem("partition.validation_fraction", message)])


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


@dataclass(frozen=True)
class Candidate:
    """One setting of a row's grid.

    Attributes
    ----------
    values
        By dotted key.
    tuning
        The experiment that is evaluated on validation data.
    tested
        From a seed to the experiment that is tested.
    """

    values: Mapping[str, Any]
    tuning: Experiment
    tested: Callable[[int], Experiment]


@dataclass(frozen=True)
class Row:
    """One method with all its candidates, in the order of its grid.

    Attributes
    ----------
    name, title
        In the file, and in the table.
    candidates
        One at least.
    """

    name: str
    title: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Comparison:
    """A comparison, validated.

    Attributes
    ----------
    name, seeds, reference
        See `ComparisonSettings`.
    rows
        In the order of the file.
    """

    name: str
    seeds: tuple[int, ...]
    reference: str
    rows: tuple[Row, ...]


def read_comparison(path: Path, overrides: Sequence[str] = ()) -> Comparison:
    """Return the comparison that the YAML file at ``path`` describes.

    Parameters
    ----------
    path
        The file.
    overrides
        ``KEY=VALUE`` with a dotted key of an experiment, for every run of it.

    Raises
    ------
    ConfigError
        With all that is wrong with it, or with any experiment of it.
    """
    source, problems = with_overrides(str(path), overrides), list[Problem]()
    document = read_yaml(path)
    settings = parse_settings(ComparisonSettings, document, "", problems)
    if settings is None:
        raise ConfigError(problems, source)
    settings = _with_both(settings, problems)
    problems.extend(problems_of(settings, overrides))
    if problems:
        raise ConfigError(problems, source)
    rows = tuple(_row(settings, name, overrides, problems) for name in settings.rows)
    titles = {row.name: row.title for row in rows if row.candidates}
    problems.extend(title_problems("rows", titles))
    if problems:
        raise ConfigError(problems, source)
    return Comparison(settings.name, settings.seeds, settings.reference, rows)


def _with_both(
    settings: ComparisonSettings, problems: list[Problem]
) -> ComparisonSettings:
    """Return the settings with the rows that `each_also_with` adds."""
    on_top = settings.each_also_with
    if on_top is None:
        return settings
    more = {
        f"{name}-{on_top.get('name')}": replace(
            row, personalization=on_top, title=_both(row, on_top)
        )
        for name, row in settings.rows.items()
        if not row.personalization and _can_have(settings, row, on_top)
    }
    for name in more.keys() & settings.rows.keys():
        message = "each_also_with adds a row of this name; give this one another"
        problems.append(Problem(f"rows.{name}", message))
    return replace(settings, rows={**settings.rows, **more})


def _both(row: RowSettings, on_top: Section) -> str | None:
    """Return the title of a row that has one of its own, with what is on top."""
    spec = PERSONALIZERS.get(str(on_top.get("name")))
    return f"{row.title} + {spec.title}" if row.title and spec else None


def _can_have(settings: ComparisonSettings, row: RowSettings, on_top: Section) -> bool:
    """Return whether a row can be shown with ``on_top``, and is not already there."""
    method = str(row.method.get("name"))
    if method not in METHODS or METHODS[method].personalization != AS_IT_IS:
        return False
    same = {
        name
        for name, one in METHODS.items()
        if trained_as(name) == method and one.personalization == on_top.get("name")
    }
    return not any(
        other.method.get("name") in same and other.model == row.model
        for other in settings.rows.values()
    )


def _row(
    settings: ComparisonSettings,
    name: str,
    overrides: Sequence[str],
    problems: list[Problem],
) -> Row:
    row, grid = settings.rows[name], settings.grid_of(name)
    candidates = []
    combinations = list(itertools.product(*grid.values()))
    for chosen in combinations:
        values = dict(zip(grid, chosen, strict=True))
        try:
            candidate = _candidate(settings, name, values, overrides)
            if len(combinations) > 1:  # one alone is not tuned
                require_validation_data(candidate.tuning)
            candidates.append(candidate)
        except ConfigError as error:
            problems.extend(
                Problem(f"rows.{name}: {one.place}", one.message)
                for one in error.problems
            )
            break  # the others have most of it in common
    return Row(name, _title(row, candidates), tuple(candidates))


def _title(row: RowSettings, candidates: Sequence[Candidate]) -> str:
    if row.title is not None or not candidates:
        return row.title or ""
    first = candidates[0].tuning
    return title_of(first.method.name, first.personalization.name)


def _candidate(
    settings: ComparisonSettings,
    name: str,
    values: Mapping[str, Any],
    overrides: Sequence[str],
) -> Candidate:
    row, base = settings.rows[name], settings.base
    document = {
        "name": settings.name,
        "data": base.data,
        "partition": base.partition,
        "model": {**base.model, **row.model},
        "training": {**base.training, **row.training},
        "method": row.method,
        "personalization": row.personalization,
        "run": base.run,
    }

    def experiment(differing: Section, seed: int, evaluate_on: str) -> Experiment:
        of_its_own = {"run.seed": seed, "partition.evaluate_on": evaluate_on}
        changes = [*_assigned(differing), *overrides, *_assigned(of_its_own)]
        return batch_experiment(document, [*_assigned(values), *changes])

    tuning = experiment(settings.tuning_set, settings.tuning_seed, "validation")
    return Candidate(values, tuning, lambda seed: experiment({}, seed, "test"))


def _assigned(values: Mapping[str, Any]) -> list[str]:
    """Return values by dotted key as the command line has them."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def shared_sections(
    base: Mapping[str, Any] | None, experiment: str | None, path: Path
) -> Mapping[str, Any]:
    """Return the sections that the file at ``path`` gives, or names the file of.

    Parameters
    ----------
    base
        The sections, as the file has them.
    experiment
        In their place the path of an experiment's file, from the folder of this one.
    path
        The file.

    Raises
    ------
    ConfigError
        If the experiment's file cannot be read, or holds something else.
    """
    if experiment is None:
        return base or {}
    place = path.parent / experiment
    document = read_yaml(place)
    if not isinstance(document, Mapping):
        message = f"found {shown(document)}, expected the sections of an experiment"
        raise ConfigError([Problem(str(place), message)], str(path))
    return document


Values = Annotated[list[Any], Field(min_length=1)]

OF_THE_FILE = ("name", "seeds", "evaluate_on", "x", "series", "y", "group")
"""Its keys that can be changed on the command line."""

VARIANT = "variant"
"""What ``x`` and ``series`` call the names of the variants."""

FIGURES = tuple(Summary.__dataclass_fields__)
"""What ``y`` can be, each also of the unpersonalised model."""

GLOBAL = "global."
"""What the figures of the unpersonalised model begin with."""


@dataclass(frozen=True)
class RangeSettings(Settings):
    """Where a random value lies.

    Attributes
    ----------
    low, high
        The ends. Whole numbers are drawn where both are written as such, both ends
        included; others with four digits.
    scale
        ``linear``: all values are equally likely. ``log``: all orders of magnitude are.
    """

    low: int | float
    high: int | float
    scale: Literal["linear", "log"] = "linear"


@dataclass(frozen=True)
class RandomSettings(Settings):
    """Points drawn at random.

    Attributes
    ----------
    num_points
        How many. The first ones stay the same when there are more.
    keys
        By dotted key, a range or a list of values to choose from.
    seed
        Of the points alone.
    """

    num_points: PositiveInt
    keys: Annotated[dict[str, Values | RangeSettings], Field(min_length=1)]
    seed: NonNegativeInt = 0


@dataclass(frozen=True)
class VariantSettings(Settings):
    """One of several methods, or ways to set one, side by side.

    Attributes
    ----------
    method, personalization
        Replace these sections. A variant with a method of its own and no
        personalisation has the method's, not that of the base.
    model, training
        What differs from these sections.
    set
        Other settings of its own, by dotted key.
    title
        Its name in tables and legends; by default that of the file.
    """

    method: Section | None = None
    personalization: Section | None = None
    model: Section = field(default_factory=dict)
    training: Section = field(default_factory=dict)
    set: dict[str, Any] = field(default_factory=dict)
    title: str | None = None


@dataclass(frozen=True)
class SweepSettings(Settings):
    """A sweep.

    Attributes
    ----------
    name
        Names its folder.
    base
        The sections of an experiment that all points share.
    experiment
        In place of ``base`` the path of an experiment's file, from the folder of this
        one.
    set
        Settings of all points by dotted key, on top of these.
    vary
        Lists of values by dotted key; every combination is a point.
    random
        In place of ``vary`` points drawn at random.
    variants
        By a short name; every point is made of each of them.
    seeds
        Every point is made with each of them.
    evaluate_on
        ``test``, or ``validation`` to choose a point without reading a test split.
    x
        What the plot's horizontal axis shows: a key that is varied, or ``variant``;
        null makes no plot.
    series
        What tells its curves apart: another such key, or several.
    y
        What is shown, and chosen by: a figure of a group, as in ``accuracy_weighted``;
        of the unpersonalised model as in ``global.accuracy_weighted``.
    group
        Whose: that of the clients seen in training, unseen ones, or all.
    """

    name: str
    base: Section | None = None
    experiment: str | None = None
    set: dict[str, Any] = field(default_factory=dict)
    vary: dict[str, Values] = field(default_factory=dict)
    random: RandomSettings | None = None
    variants: dict[str, VariantSettings] = field(default_factory=dict)
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0, 1, 2)
    evaluate_on: Literal["test", "validation"] = "test"
    x: str | None = None
    series: str | tuple[str, ...] = ()
    y: str = "accuracy_weighted"
    group: Literal["seen", "unseen", "all"] = "seen"

    def curve_keys(self) -> tuple[str, ...]:
        """Return what tells the plot's curves apart."""
        return (self.series,) if isinstance(self.series, str) else self.series

    def varied(self) -> tuple[str, ...]:
        """Return the dotted keys whose values differ between points."""
        return tuple(self.random.keys if self.random else self.vary)


def settings_problems_of(
    settings: SweepSettings, overrides: Sequence[str]
) -> Iterable[Problem]:
    """Yield what does not go together, before any experiment is looked at."""
    variants = settings.variants.items()
    named = [
        ("name", settings.name),
        *((f"variants.{name}", name) for name, _ in variants),
    ]
    yield from name_problems(named)
    if (settings.base is None) == (settings.experiment is None):
        message = "expected the sections of an experiment, or experiment: PATH; one of"
        yield Problem("base", f"{message} the two")
    if settings.random is not None and settings.vary:
        yield Problem("random", "found vary too, expected one of the two")
    yield from seed_problems(settings.seeds)
    titles = {name: one.title or name for name, one in variants}
    yield from title_problems("variants", titles)
    yield from _range_problems(settings)
    yield from _settings_key_problems(settings, overrides)
    yield from _axis_problems(settings)


def _range_problems(settings: SweepSettings) -> Iterable[Problem]:
    keys = settings.random.keys if settings.random else {}
    for key, values in keys.items():
        if not isinstance(values, RangeSettings):
            continue
        found = f"found {values.low} and {values.high}"
        if values.low >= values.high:
            message = f"{found}, expected low to be less than high"
            yield Problem(f"random.keys.{key}", message)
        elif values.scale == "log" and values.low <= 0:
            message = f"{found}, expected low to be greater than 0 with scale = log"
            yield Problem(f"random.keys.{key}", message)


def _settings_key_problems(
    settings: SweepSettings, overrides: Sequence[str]
) -> Iterable[Problem]:
    malformed: list[Problem] = []
    changed = changes_of(overrides, malformed)
    yield from malformed
    varied = settings.varied()
    yield from inside_each_other("vary", varied)
    for key, other in clashes(keys_set(changed), varied):
        message = f"is varied{as_part_of(key, other)}: an override would make its"
        yield Problem(f"override {key}", f"{message} points equal, or be lost")
    fixed = _fixed_keys(settings)
    for place, keys in fixed.items():
        for key, other in clashes(keys, varied):
            message = f"is varied too{as_part_of(key, other)}; take one of the two out"
            yield Problem(f"{place} {key}", message)
    lists = settings.random.keys if settings.random else settings.vary
    both = {"vary": keys_set_by_any(lists), "override": keys_set(changed)}
    yield from own_problems("sweep", {**both, **fixed})


def _fixed_keys(settings: SweepSettings) -> dict[str, set[str]]:
    """Return the dotted keys that the file sets in all points or a variant's."""
    variants = settings.variants.items()
    return {
        "set": keys_set(settings.set),
        **{f"variants.{name}.set": keys_set(one.set) for name, one in variants},
        **{f"variants.{name}": _keys_inside(one) for name, one in variants},
    }


def _keys_inside(variant: VariantSettings) -> set[str]:
    """Return the dotted keys that a variant's sections set."""
    sections = {
        "method": variant.method,
        "personalization": variant.personalization,
        "model": variant.model,
        "training": variant.training,
    }
    return keys_set({name: section for name, section in sections.items() if section})


def _axis_problems(settings: SweepSettings) -> Iterable[Problem]:
    axes = [*settings.varied(), *([VARIANT] if settings.variants else [])]
    for place, key in _shown(settings):
        if key not in axes:
            message = f"found {key!r}, which is not varied; {alternatives(key, axes)}"
            yield Problem(place, message)
    curves = settings.curve_keys()
    if curves and settings.x in (None, *curves):
        message = f"found {curves[0]!r}, expected x to be another key"
        yield Problem("series", message)
    if settings.y.removeprefix(GLOBAL) not in FIGURES:
        known = alternatives(settings.y, FIGURES)
        yield Problem("y", f"found {settings.y!r}, expected a figure; {known}")
    yield from _hidden_problems(settings)


def _shown(settings: SweepSettings) -> Iterable[tuple[str, str]]:
    """Yield the keys that a plot shows, after where they are named."""
    yield from (("series", key) for key in settings.curve_keys())
    if settings.x is not None:
        yield "x", settings.x


def _hidden_problems(settings: SweepSettings) -> Iterable[Problem]:
    shown = {key for _, key in _shown(settings)}
    hidden = [key for key in _several(settings) if key not in shown]
    if settings.x is not None and hidden:
        message = (
            f"x and series leave out {', '.join(hidden)}, whose points would fall "
            "together; show it, fix it, or take x out to have no plot"
        )
        yield Problem("x", message)


def _several(settings: SweepSettings) -> Iterable[str]:
    """Yield what gives a plot several curves unless it is one of its axes.

    Not the keys of random points, which are scattered anyway.
    """
    yield from (key for key, values in settings.vary.items() if len(values) > 1)
    if len(settings.variants) > 1:
        yield VARIANT


PointsValues = Mapping[str, Any]
"""From dotted keys to plain values."""


def values_of(settings: SweepSettings) -> list[PointsValues]:
    """Return the values of each point, in the order of the file or of the draws.

    The last key of a grid varies fastest. With nothing varied there is one point.
    """
    if settings.random is not None:
        return drawn(settings.random)
    combinations = itertools.product(*settings.vary.values())
    return [dict(zip(settings.vary, one, strict=True)) for one in combinations]


def drawn(settings: RandomSettings) -> list[PointsValues]:
    """Return the values of random points.

    Every value has a random key of its own, so that neither more points nor another
    key change it.
    """
    root = RandomKey(settings.seed).child("sweep")
    return [
        {
            key: _drawn(values, root.child(key, number).numpy())
            for key, values in settings.keys.items()
        }
        for number in range(settings.num_points)
    ]


def _drawn(values: Sequence[Any] | RangeSettings, rng: np.random.Generator) -> Any:
    if not isinstance(values, RangeSettings):
        return values[int(rng.integers(len(values)))]
    if isinstance(values.low, int) and isinstance(values.high, int):
        return _whole_number(values.low, values.high, values.scale == "log", rng)
    found = _between(values.low, values.high, values.scale == "log", rng)
    return min(max(float(f"{found:.4g}"), float(values.low)), float(values.high))


def _whole_number(low: int, high: int, is_log: bool, rng: np.random.Generator) -> int:
    # The interval from n to n + 1 stands for n.
    return min(math.floor(_between(low, high + 1, is_log, rng)), high)


def _between(low: float, high: float, is_log: bool, rng: np.random.Generator) -> float:
    if is_log:
        return math.exp(rng.uniform(math.log(low), math.log(high)))
    return float(rng.uniform(low, high))


ALONE = "alone"
"""The name of the one variant of a sweep that names none."""


@dataclass(frozen=True)
class Point:
    """One setting of everything, for each seed.

    Attributes
    ----------
    variant, title
        Its variant's name, and what tables call it.
    values
        What is varied, by dotted key.
    runs
        The experiment by seed.
    """

    variant: str
    title: str
    values: PointsValues
    runs: Mapping[int, Experiment]


@dataclass(frozen=True)
class Sweep:
    """A sweep, validated.

    Attributes
    ----------
    settings
        As in the file.
    shared
        The sections that all points share, as plain values.
    overrides
        ``KEY=VALUE`` that are made in every run.
    points
        Those of the first variant, then those of the next.
    """

    settings: SweepSettings
    shared: Mapping[str, Any]
    overrides: tuple[str, ...]
    points: tuple[Point, ...]

    @property
    def experiments(self) -> list[Experiment]:
        """All that is run, point by point."""
        return [run for point in self.points for run in point.runs.values()]


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Return the sweep that the YAML file at ``path`` describes.

    Parameters
    ----------
    path
        The file.
    overrides
        ``KEY=VALUE`` with a dotted key of an experiment, for every run of it, or with
        a key of `OF_THE_FILE`.

    Raises
    ------
    ConfigError
        With all that is wrong with it, or with any experiment of it.
    """
    own = [text for text in overrides if _key_of(text) in OF_THE_FILE]
    of_runs = [text for text in overrides if text not in own]
    settings = _settings(path, own, of_runs)
    shared, problems = (
        shared_sections(settings.base, settings.experiment, path),
        list[Problem](),
    )
    points = [
        point
        for name, variant in variants_of(settings).items()
        for point in _points(settings, shared, name, variant, of_runs, problems)
    ]
    problems.extend(_coincidences(settings, points))
    if problems:
        raise ConfigError(problems, with_overrides(str(path), overrides))
    return Sweep(settings, shared, tuple(of_runs), tuple(points))


def _coincidences(
    settings: SweepSettings, points: Sequence[Point]
) -> Iterable[Problem]:
    """Yield what would be shown as two points, and is one."""
    firsts: dict[str, Point] = {}
    for point in points:
        run = next(iter(point.runs.values()))
        first = firsts.setdefault(results_identity(run), point)
        again = (point.variant, point.values) == (first.variant, first.values)
        # Of a few values the same ones may be drawn twice.
        if first is not point and not (again and settings.random):
            message = (
                f"is the same run as {_named(first)}: what tells them apart changes no "
                "result; take one of the two out"
            )
            yield Problem(_named(point), message)


def _named(point: Point) -> str:
    return f"the point {point.variant} {json.dumps(dict(point.values))}"


def _settings(path: Path, own: Sequence[str], of_runs: Sequence[str]) -> SweepSettings:
    document, problems = read_yaml(path), list[Problem]()
    if isinstance(document, Mapping):
        changes = parse_overrides(own, problems)
        document = apply_overrides(document, changes, problems)
    settings = parse_settings(SweepSettings, document, "", problems)
    if settings is not None:
        prefix, dot, figure = settings.y.rpartition(".")
        y = prefix + dot + EARLIER_NAMES.get(figure, figure)
        settings = replace(settings, y=y)
        problems.extend(settings_problems_of(settings, of_runs))
    if settings is None or problems:
        raise ConfigError(problems, with_overrides(str(path), [*own, *of_runs]))
    return settings


def _key_of(override: str) -> str:
    return override.partition("=")[0].strip()


def variants_of(settings: SweepSettings) -> Mapping[str, VariantSettings]:
    """Return the variants by name; one that changes nothing where none is named."""
    return settings.variants or {ALONE: VariantSettings()}


def _points(
    settings: SweepSettings,
    shared: Mapping[str, Any],
    name: str,
    variant: VariantSettings,
    overrides: Sequence[str],
    problems: list[Problem],
) -> list[Point]:
    document = {**_with_variant(shared, variant), "name": settings.name}
    own = [*_as_overrides(settings.set), *_changes_of(variant), *overrides]
    points = []
    for values in values_of(settings):
        try:
            runs = {
                seed: _experiment(
                    settings, document, [*own, *_as_overrides(values)], seed
                )
                for seed in settings.seeds
            }
        except ConfigError as error:
            where = f"variants.{name}: " if settings.variants else ""
            problems.extend(
                Problem(where + one.place, one.message) for one in error.problems
            )
            break  # the others have most of it in common
        points.append(Point(name, variant.title or name, values, runs))
    return points


def _with_variant(
    shared: Mapping[str, Any], variant: VariantSettings
) -> dict[str, Any]:
    document = dict(shared)
    if variant.method is not None:
        document["method"] = variant.method
        document.pop("personalization", None)
    if variant.personalization is not None:
        document["personalization"] = variant.personalization
    return document


def _changes_of(variant: VariantSettings) -> list[str]:
    """Return what a variant sets inside sections, as overrides."""
    changes = {f"model.{key}": value for key, value in variant.model.items()}
    changes |= {f"training.{key}": value for key, value in variant.training.items()}
    return _as_overrides({**changes, **variant.set})


def _as_overrides(values: PointsValues) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _experiment(
    settings: SweepSettings, document: Mapping[str, Any], own: Sequence[str], seed: int
) -> Experiment:
    its_own = (
        f"run.seed={seed}",
        f"partition.evaluate_on={settings.evaluate_on}",
    )
    experiment = batch_experiment(document, [*own, *its_own])
    require_validation_data(experiment)
    return experiment


TERMS: Mapping[str, str] = {
    "partition.alpha": "\N{GREEK SMALL LETTER ALPHA}",
    "partition.beta": "β",
    "partition.unseen_train_fraction": "capacity",
    "personalization.num_neighbors": "k",
    "personalization.kernel_scale": "\N{GREEK SMALL LETTER SIGMA}",
    "personalization.knn_weights": "λ",
    "training.batch_size": "batch size",
    "training.learning_rate": "learning rate",
    "training.local_epochs": "local epochs",
    "training.local_steps": "local steps",
    "training.momentum": "momentum",
    "training.num_rounds": "rounds",
    "training.participation": "client sampling rate",
    "training.weight_decay": "weight decay",
}
"""By dotted key, all different; the symbols are those of knn-per.txt."""


def term_of(key: str) -> str:
    """Return what people call a setting: its dotted key where there is no word."""
    return TERMS.get(key, key)

"""What a batch runs: the file of a sweep or of a comparison, as points and seeds."""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field

from knnper.errors import ConfigError, OwnCodeError, Problem
from knnper.experiment import (
    Experiment,
    NonNegativeInt,
    PositiveInt,
    Settings,
    alternatives,
    apply_overrides,
    is_name,
    is_reference,
    load_experiment,
    parse_overrides,
    parse_settings,
    read_yaml,
    require_kind,
    results_identity,
    shown,
    with_overrides,
)
from knnper.metrics import ACCURACY
from knnper.own import Door
from knnper.process import known_precision
from knnper.seeding import RandomKey
from knnper.server.results import OVER_CLIENTS, Summary, figure_of
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.partition.schemes import PartitionSettings
from knnper.strategies.catalogue import (
    KINDS,
    METHODS,
    PERSONALIZERS,
    own_title,
    title_of,
    trained_as,
)
from knnper.strategies.core.method import AS_IT_IS, Method

# What a batch itself sets in every run.
ITS_OWN = ("name", "run.seed", "run.engine", "partition.evaluate_on")
Section = dict[str, Any]
Values = Annotated[list[Any], Field(min_length=1)]
PointsValues = Mapping[str, Any]  # from dotted keys to plain values

# What there is of each group of clients, also of the unpersonalised model.
FIGURES = tuple(one for one in Summary.__dataclass_fields__ if one != "metrics")
S = TypeVar("S", bound=Settings)
_NAME_METRICS = "Other metrics must be named in run.metrics of all that it runs"

# Its keys that can be changed on the command line.
OF_THE_FILE = (
    *("name", "seeds", "evaluate_on", "x", "series", "y", "group", "reference"),
)
VARIANT = "variant"  # what ``x`` and ``series`` call the names of the variants
GLOBAL = "global."  # what the figures of the unpersonalised model begin with
ALONE = "alone"  # the name of the one variant of a sweep that names none


@dataclass(frozen=True)
class Point:
    """One setting of everything, for each seed."""

    variant: str
    title: str
    values: PointsValues  # what is varied or in a grid
    runs: Mapping[int, Experiment]  # by seed
    tuning: Experiment | None = None  # of a comparison, evaluated on validation data
    follows: str | None = None  # the variant whose chosen values are this one's too

    def agrees_with(self, best: Mapping[str, "Point"]) -> bool:
        """Return whether it has the values that were chosen for what it follows."""
        leader = best[self.follows].values if self.follows else {}
        return all(self.values[key] == value for key, value in leader.items())


@dataclass(frozen=True)
class _Batch:
    """What a batch runs: all points with every seed."""

    kind: ClassVar[str]
    metric = ACCURACY  # what validation data choose by

    name: str  # of its folder
    seeds: tuple[int, ...]
    points: tuple[Point, ...]  # those of the first variant or row, then of the next

    @property
    def figures(self) -> tuple[str, ...]:
        """What there is of a group of clients in all of its runs."""
        return figures_of_all(self.points)

    @property
    def variants(self) -> Mapping[str, list[Point]]:
        """The points by the name of their variant or row."""
        found: dict[str, list[Point]] = {}
        for point in self.points:
            found.setdefault(point.variant, []).append(point)
        return found

    @property
    def experiments(self) -> list[Experiment]:
        """All that may be run, point by point."""
        return [*tuning_of(self.points), *tested(self.points)]

    def to_choose_from(
        self, best: Mapping[str, Point], *, following: bool
    ) -> Mapping[str, list[Point]]:
        """Return the points of which validation data choose one, by their variant.

        Of those that follow none, or of the others, where ``best`` has been chosen.
        """
        return {
            name: [one for one in points if one.agrees_with(best)]
            for name, points in self.variants.items()
            if points[0].tuning is not None
            if (points[0].follows is not None) == following
        }

    def tested_with(self, best: Mapping[str, Point]) -> list[Point]:
        """Return the points that are tested, where ``best`` has been chosen."""
        return [
            point
            for name, points in self.variants.items()
            for point in ([best[name]] if name in best else points)
        ]


def figures_of_all(points: Iterable[Point]) -> tuple[str, ...]:
    """Return `FIGURES`, and those of the metrics that all runs of points name."""
    named = [run.run.metric_names for run in tested(points)]
    metrics = dict.fromkeys(
        one for one in itertools.chain(*named) if all(one in other for other in named)
    )
    return (*FIGURES, *itertools.chain(*map(figures_of_metric, metrics)))


def figures_of_metric(metric: str) -> list[str]:
    """Return what `FIGURES` do not have of a metric that a run names."""
    found = [figure_of(metric, name) for name in OVER_CLIENTS]
    return [] if metric == ACCURACY else found


def tested(points: Iterable[Point]) -> list[Experiment]:
    """Return the runs of some points, one a seed."""
    return [run for point in points for run in point.runs.values()]


def tuning_of(points: Iterable[Point]) -> list[Experiment]:
    """Return what is evaluated on validation data to choose among points."""
    return [one.tuning for one in points if one.tuning is not None]


def _keys_set(values: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys that values set, of a section those inside it."""
    found = set[str]()
    for key, value in values.items():
        inside = value if isinstance(value, Mapping) else {}
        # An empty section has no key inside, and is set as a whole.
        leaves = _keys_set({f"{key}.{name}": one for name, one in inside.items()})
        found |= leaves or {key}
    return found


def _keys_varied(lists: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys that any of the listed values sets; a range sets one."""
    listed = {
        key: one if isinstance(one, list) else [one] for key, one in lists.items()
    }
    found = ({key: one} for key, values in listed.items() for one in values)
    return set().union(*map(_keys_set, found))


def _clashes(keys: Iterable[str], others: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield which keys set what one of ``others`` sets, each with the first such."""
    # A section that is set as a whole replaces all that was set inside it.
    known = sorted(others)
    for key in sorted(keys):
        for other in known:
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                yield key, other
                break


def _key_problems(
    batch: str,
    overrides: Sequence[str],
    varied: Mapping[str, Mapping[str, Any]],  # by place, lists of values by dotted key
    fixed: Mapping[str, Iterable[str]],  # by place, dotted keys
) -> Iterable[Problem]:
    """Yield which keys are set twice, or by the batch itself."""
    malformed: list[Problem] = []
    changes = {
        ".".join(one.path): one.value for one in parse_overrides(overrides, malformed)
    }
    yield from malformed
    fixed = {"override": _keys_set(changes), **fixed}
    all_varied = {key for lists in varied.values() for key in lists}
    either = "take one of the two out"
    for place, lists in varied.items():
        for key, other in itertools.permutations(sorted(lists), 2):
            if key.startswith(f"{other}."):
                yield Problem(f"{place} {key}", f"is varied with {other} too; {either}")
    for place, keys in fixed.items():
        for key, other in _clashes(keys, all_varied):
            inside = "" if key == other else f" with {other}"
            yield Problem(f"{place} {key}", f"is varied too{inside}; {either}")
    every = {place: _keys_varied(lists) for place, lists in varied.items()}
    for place, keys in {**every, **fixed}.items():
        for key, _ in _clashes(keys, ITS_OWN):
            message = f"the {batch} itself sets this in every run; take it out"
            yield Problem(f"{place} {key}", message)


def _name_problems(
    name: str, seeds: Sequence[int], place: str, others: Iterable[str]
) -> Iterable[Problem]:
    """Yield which names cannot name folders, and seeds that would count twice."""
    for where, one in [("name", name), *((f"{place}.{one}", one) for one in others)]:
        if not is_name(one):
            message = f"found {one!r}, expected letters, digits, '.', '_' and '-'"
            yield Problem(where, message)
    if len(set(seeds)) < len(seeds):
        yield Problem("seeds", f"found {list(seeds)}, expected each one once")


def _reference_problems(
    what: str, references: Sequence[str], others: Iterable[str]
) -> Iterable[Problem]:
    """Yield references that are not among the others, or that stand there twice."""
    for name in references:
        if name not in others:
            known = alternatives(name, [*others])
            message = f"found {name!r}, which is no {what}; {known}"
            yield Problem("reference", message)
    if len(set(references)) < len(references):
        yield Problem("reference", f"found {[*references]}, expected each one once")


def _title_problems(place: str, titles: Mapping[str, str]) -> Iterable[Problem]:
    """Yield titles, by name, that nobody could tell apart in a table."""
    names: dict[str, str] = {}
    for name, title in titles.items():
        first = names.setdefault(title, name)
        if first != name:
            message = f"found {title!r}, as {first} has; expected a title of its own"
            yield Problem(f"{place}.{name}.title", message)


def _experiment(
    document: Mapping[str, Any], overrides: Sequence[str], folder: Path
) -> Experiment:
    """Return an experiment of a batch, on the serial engine."""
    changes = [*overrides, "run.engine=serial"]
    catalogue = experiment_catalogue()
    experiment = load_experiment(document, catalogue, changes, folder=folder)
    known_precision(experiment.training.precision)
    if experiment.run.threads_per_worker == "auto":
        message = (
            "found 'auto', expected a number: the last bits of all runs depend on it, "
            "and what is added later would have that of another machine. With 1, the "
            "default, --workers processes keep the cores busy"
        )
        raise ConfigError([Problem("run.threads_per_worker", message)])
    return experiment


def _require_validation_data(experiment: Experiment) -> None:
    """Refuse an evaluation on validation data of which there are none."""
    # Found only after training, nobody would have a result.
    partition = experiment.partition.settings
    if not isinstance(partition, PartitionSettings):
        return
    if partition.evaluate_on == "validation" and partition.validation_fraction == 0:
        message = (
            "found 0, expected more: settings are chosen on validation data; set it, "
            "as in partition.validation_fraction=0.2, or choose nothing"
        )
        raise ConfigError([Problem("partition.validation_fraction", message)])


@dataclass(frozen=True)
class _Variant:
    """What experiments are made of: a document, changed as a batch asks for."""

    name: str
    place: str  # of its problems
    title: str | None
    document: Mapping[str, Any]
    folder: Path  # of the batch's file: users' code is looked for there
    changes: Sequence[str]  # before the values of a point
    seeds: Sequence[int]
    evaluate_on: str = "test"
    tuning: Sequence[str] | None = None  # the same of what is evaluated to choose
    tuning_seed: int = 0
    follows: str | None = None

    def points(
        self, values: Sequence[PointsValues], problems: list[Problem]
    ) -> Iterable[Point]:
        """Yield a point for each of some values."""
        for one in values:
            try:
                yield self._point(one, is_chosen=len(values) > 1)
            except ConfigError as error:
                problems.extend(
                    Problem(f"{self.place}{found.place}", found.message)
                    for found in error.problems
                )
                return  # the others have most of it in common

    def _point(self, values: PointsValues, *, is_chosen: bool) -> Point:
        def experiment(
            changes: Sequence[str], seed: int, evaluate_on: str
        ) -> Experiment:
            own = {**values, "run.seed": seed, "partition.evaluate_on": evaluate_on}
            changes = [*changes, *as_overrides(own)]
            return _experiment(self.document, changes, self.folder)

        first = experiment(self.changes, self.seeds[0], self.evaluate_on)
        _require_validation_data(first)
        runs = {
            seed: replace(first, run=replace(first.run, seed=seed))
            for seed in self.seeds
        }
        tuning = None
        if self.tuning is not None:
            tuning = experiment(self.tuning, self.tuning_seed, "validation")
            if is_chosen:
                _require_validation_data(tuning)
        names = first.method.name, first.personalization.name
        title = self.title or own_title(first).get("title") or title_of(*names)
        return Point(self.name, title, values, runs, tuning, self.follows)


def as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return one or several names as several."""
    return (names,) if isinstance(names, str) else names


def as_overrides(values: PointsValues) -> list[str]:
    """Return values by dotted key as the command line has them."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _combinations(lists: Mapping[str, Sequence[Any]]) -> list[PointsValues]:
    """Return every combination; the last key varies fastest. Of nothing it is one."""
    combinations = itertools.product(*lists.values())
    return [dict(zip(lists, one, strict=True)) for one in combinations]


def _parsed(settings_type: type[S], document: object, source: str) -> S:
    problems: list[Problem] = []
    settings = parse_settings(settings_type, document, "", problems)
    if settings is None:
        raise ConfigError(problems, source)
    return settings


def _raise(problems: Sequence[Problem], source: str) -> None:
    if problems:
        raise ConfigError(problems, source)


@dataclass(frozen=True)
class BaseSettings(Settings):
    """The sections of an experiment that all rows share.

    Attributes
    ----------
    data, partition, model, training, run, own_code
        As in an experiment.
    """

    data: Section
    partition: Section
    model: Section
    training: Section = field(default_factory=dict)
    run: Section = field(default_factory=dict)
    own_code: str | None = None


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
    follows
        Another row, whose grid and choice this one takes over; its own grid is chosen
        from afterwards. Both share their training where they differ in the
        personalisation alone.
    title
        Its name in the table; by default that of the method and what is on top.
    """

    method: Section
    personalization: Section = field(default_factory=dict)
    model: Section = field(default_factory=dict)
    training: Section = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    follows: str | None = None
    title: str | None = None


@dataclass(frozen=True)
class ComparisonSettings(Settings):
    """A comparison of methods.

    Attributes
    ----------
    name
        Names its folder.
    extends
        The file of another comparison, beside this one, which says all that this one
        does not. Rows, keys of ``grid`` and ``tuning_set`` and those of the base's
        sections are taken over one by one, but a section of another ``name`` as a
        whole; null takes away a row, a section or a key of a grid.
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
        The row from which the average of all others is told, at the same seed, and with
        whose model clients are compared, to count those degraded. Of several rows the
        first counts them, and the average is told from each.
    metric
        What is shown, and chosen by: ``accuracy``, or one of ``run.metrics``.
    each_also_with
        A section ``personalization`` with which every row that has none is shown once
        more, in a row ``ROW-NAME`` behind all others that `follows` it; training is
        done once for both.
    """

    name: str
    base: BaseSettings
    rows: Annotated[dict[str, RowSettings], Field(min_length=1)]
    reference: str | Annotated[tuple[str, ...], Field(min_length=1)]
    extends: str | None = None
    metric: str = ACCURACY
    grid: dict[str, Values] = field(default_factory=dict)
    each_also_with: Section | None = None
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0, 1, 2)
    tuning_seed: NonNegativeInt = 0
    tuning_set: Section = field(default_factory=dict)

    def grid_of(self, row: str) -> dict[str, Values]:
        """Return the values that a row chooses from, by dotted key."""
        leader = self.rows.get(self.rows[row].follows or row, self.rows[row])
        both = {**self.grid, **leader.grid, **self.rows[row].grid}
        return {key: values for key, values in both.items() if values}

    def references(self) -> tuple[str, ...]:
        """Return the rows that the others are compared with."""
        return as_tuple(self.reference)


@dataclass(frozen=True)
class Comparison(_Batch):
    """Methods side by side, each tuned on validation data, then tested."""

    kind = "comparison"

    references: tuple[str, ...]
    metric: str = ACCURACY

    @property
    def reference(self) -> str:
        """The row against which clients are degraded."""
        return self.references[0]


def read_comparison(path: Path, overrides: Sequence[str] = ()) -> Comparison:
    """Return the comparison that the YAML file at ``path`` describes."""
    source, problems = with_overrides(str(path), overrides), list[Problem]()
    document = read_yaml(path)
    require_kind(document, "comparison", source)
    settings = _parsed(ComparisonSettings, _with_extended(path, document), source)
    folder = path.absolute().parent
    settings = _with_both(settings, folder, problems)
    problems.extend(_comparison_problems(settings, overrides))
    _raise(problems, source)
    points = [
        point
        for name in settings.rows
        for point in _row(settings, name, overrides, folder).points(
            _combinations(settings.grid_of(name)), problems
        )
    ]
    titles = {point.variant: point.title for point in points}
    problems.extend(_title_problems("rows", titles))
    metric = settings.metric
    if figure_of(metric, "weighted") not in figures_of_all(points):
        message = f"found {metric!r}, expected accuracy. {_NAME_METRICS}"
        problems.append(Problem("metric", message))
    _raise(problems, source)
    references = settings.references()
    return Comparison(settings.name, settings.seeds, tuple(points), references, metric)


def _with_extended(path: Path, document: Any, within: tuple[Path, ...] = ()) -> Any:
    """Return what a comparison's file says, and the one that it extends behind it."""
    if not isinstance(document, Mapping) or document.get("extends") is None:
        return document
    within, other = (*within, path.resolve()), path.parent / str(document["extends"])
    if other.resolve() in within:
        message = f"found {other}, which extends this file, expected another comparison"
        raise ConfigError([Problem("extends", message)], str(path))
    extended = read_yaml(other)
    require_kind(extended, "comparison", str(other))
    behind = _with_extended(other, extended, within)
    if not isinstance(behind, Mapping):
        message = f"found no sections in {other}, expected the file of a comparison"
        raise ConfigError([Problem("extends", message)], str(path))
    base = with_code_beside(_section(behind, "base"), other, named_in=behind)
    return _laid_over({**behind, "base": base} if base else behind, document)


def _laid_over(behind: Mapping[str, Any], document: Mapping[str, Any]) -> Any:
    """Return both; of what is in both that of ``document``."""
    whole = _joined(behind, document)
    for key in ("base", "rows", "grid", "tuning_set"):
        if key in whole:
            whole[key] = _joined(behind.get(key), document.get(key))
    base, own = (_section(one, "base") for one in (behind, document))
    for key in base.keys() & own.keys():
        old, new = _section(base, key), _section(own, key)
        if new and new.get("name", old.get("name")) == old.get("name"):
            whole["base"][key] = {**old, **new}
    return whole


def _joined(behind: Any, document: Any) -> Any:
    """Return two mappings as one; what is none is for the parser to refuse."""
    if not isinstance(behind, Mapping) or not isinstance(document, Mapping):
        return behind if document is None else document
    both = {**behind, **document}
    return {key: value for key, value in both.items() if value is not None}


def _section(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = document.get(key)
    return found if isinstance(found, Mapping) else {}


def _comparison_problems(
    settings: ComparisonSettings, overrides: Sequence[str]
) -> Iterable[Problem]:
    """Yield what does not go together, before any experiment is looked at."""
    yield from _name_problems(settings.name, settings.seeds, "rows", settings.rows)
    yield from _reference_problems("row", settings.references(), settings.rows)
    for name, leader in ((name, row.follows) for name, row in settings.rows.items()):
        if leader and (leader not in settings.rows or settings.rows[leader].follows):
            known = ", ".join(
                one for one, row in settings.rows.items() if not row.follows
            )
            message = f"found {leader!r}, expected a row that follows none: {known}"
            yield Problem(f"rows.{name}.follows", message)
            return
        chosen = settings.grid_of(leader) if leader else {}
        for key in settings.rows[name].grid.keys() & chosen.keys():
            message = f"found {key}, which is chosen for {leader}; take it out"
            yield Problem(f"rows.{name}.grid", message)
    grids = {f"rows.{name}: grid": settings.grid_of(name) for name in settings.rows}
    fixed = {"tuning_set": _keys_set(settings.tuning_set)}
    yield from _key_problems("comparison", overrides, grids, fixed)


def _with_both(
    settings: ComparisonSettings, folder: Path, problems: list[Problem]
) -> ComparisonSettings:
    """Return the settings with the rows that `each_also_with` adds."""
    on_top = settings.each_also_with
    if on_top is None:
        return settings
    top = str(on_top.get("name")).rpartition(":")[2]  # of users' code the attribute
    title = f" + {PERSONALIZERS[top].title}" if top in PERSONALIZERS else None
    more = {
        f"{name}-{top}": replace(
            row,
            personalization=on_top,
            follows=row.follows or name,
            grid=row.grid if row.follows else {},
            title=row.title + title if row.title and title else None,
        )
        for name, row in settings.rows.items()
        if not row.personalization and _can_have(settings, row, on_top, folder)
    }
    for name in more.keys() & settings.rows.keys():
        message = "each_also_with adds a row of this name; give this one another"
        problems.append(Problem(f"rows.{name}", message))
    return replace(settings, rows={**settings.rows, **more})


def _can_have(
    settings: ComparisonSettings, row: RowSettings, on_top: Section, folder: Path
) -> bool:
    """Return whether a row can be shown with ``on_top``, and is not already there."""
    method = str(row.method.get("name"))
    kind = METHODS.get(method) or _own_method(settings, method, folder)
    if kind is None or kind.personalization != AS_IT_IS:
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


def _own_method(
    settings: ComparisonSettings, reference: str, folder: Path
) -> type[Method] | None:
    """Return the method at a reference; None where its row reports why not."""
    if not is_reference(reference):
        return None
    door = Door(folder / (settings.base.own_code or ""))
    try:
        method: type[Method] = door.open(reference, KINDS["method"]).entry
    except OwnCodeError:
        return None
    return method


def _row(
    settings: ComparisonSettings, name: str, overrides: Sequence[str], folder: Path
) -> _Variant:
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
        "own_code": base.own_code,
    }
    return _Variant(
        name,
        f"rows.{name}: ",
        row.title,
        document,
        folder,
        overrides,
        settings.seeds,
        tuning=[*as_overrides(settings.tuning_set), *overrides],
        tuning_seed=settings.tuning_seed,
        follows=row.follows,
    )


def shared_sections(
    base: Mapping[str, Any] | None, experiment: str | None, path: Path
) -> Mapping[str, Any]:
    """Return the sections that a file gives, or those of the experiment it names."""
    if experiment is None:
        return base or {}
    place = path.parent / experiment
    document = read_yaml(place)
    if not isinstance(document, Mapping):
        message = f"found {shown(document)}, expected the sections of an experiment"
        raise ConfigError([Problem(str(place), message)], str(path))
    require_kind(document, "experiment", str(place))
    return with_code_beside(document, place, named_in=document)


def with_code_beside(
    sections: Mapping[str, Any], file: Path, named_in: object
) -> Mapping[str, Any]:
    """Return the sections of another file, whose own code is looked for beside it.

    Where ``named_in``, the content of that file, names no own code, the code that is
    named elsewhere is looked for beside the file that names it.
    """
    folder, code = file.absolute().parent, sections.get("own_code")
    if isinstance(code, str) or (code is None and _names_own_code(named_in)):
        return {**sections, "own_code": str(folder / (code or ""))}
    return sections


def _names_own_code(values: object) -> bool:
    """Return whether any text in plain values is ``module:attribute``."""
    if isinstance(values, Mapping):
        return any(map(_names_own_code, values.values()))
    if isinstance(values, list):
        return any(map(_names_own_code, values))
    return is_reference(values)


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
        What is shown, and chosen by: a figure of a group, as in ``accuracy_weighted``,
        or ``macro_f1_mean`` where ``run.metrics`` has ``macro_f1``; of the
        unpersonalised model as in ``global.accuracy_weighted``.
    group
        Whose: that of the clients seen in training, unseen ones, or all.
    reference
        The variant whose ``y`` is taken from that of all others, at the same values and
        seed; or several.
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
    reference: str | tuple[str, ...] = ()

    def curve_keys(self) -> tuple[str, ...]:
        """Return what tells the plot's curves apart."""
        return as_tuple(self.series)

    def references(self) -> tuple[str, ...]:
        """Return the variants that the others are compared with."""
        return as_tuple(self.reference)

    def varied(self) -> tuple[str, ...]:
        """Return the dotted keys whose values differ between points."""
        return tuple(self.random.keys if self.random else self.vary)


def _sweep_problems(
    settings: SweepSettings, overrides: Sequence[str]
) -> Iterable[Problem]:
    """Yield what does not go together, before any experiment is looked at."""
    variants = settings.variants
    yield from _name_problems(settings.name, settings.seeds, "variants", variants)
    if (settings.base is None) == (settings.experiment is None):
        message = "expected the sections of an experiment, or experiment: PATH; one of"
        yield Problem("base", f"{message} the two")
    if settings.random is not None and settings.vary:
        yield Problem("random", "found vary too, expected one of the two")
    titles = {name: one.title or name for name, one in variants.items()}
    yield from _title_problems("variants", titles)
    yield from _reference_problems("variant", settings.references(), variants)
    yield from _range_problems(settings)
    lists = settings.random.keys if settings.random else settings.vary
    fixed = {"set": _keys_set(settings.set)}
    for name, one in variants.items():
        sections = ("method", "personalization", "model", "training")
        inside = {key: getattr(one, key) for key in sections if getattr(one, key)}
        fixed[f"variants.{name}.set"] = _keys_set(one.set)
        fixed[f"variants.{name}"] = _keys_set(inside)
    yield from _key_problems("sweep", overrides, {"vary": lists}, fixed)
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


def _axis_problems(settings: SweepSettings) -> Iterable[Problem]:
    axes = [*settings.varied(), *([VARIANT] if settings.variants else [])]
    curves, x = settings.curve_keys(), settings.x
    shown = [*(("series", key) for key in curves), *([("x", x)] if x else [])]
    for place, key in shown:
        if key not in axes:
            message = f"found {key!r}, which is not varied; {alternatives(key, axes)}"
            yield Problem(place, message)
    if curves and x in (None, *curves):
        message = f"found {curves[0]!r}, expected x to be another key"
        yield Problem("series", message)
    # Not the keys of random points, which are scattered anyway.
    several = [key for key, values in settings.vary.items() if len(values) > 1]
    several += [VARIANT] if len(settings.variants) > 1 else []
    hidden = [key for key in several if key not in (x, *curves)]
    if x is not None and hidden:
        message = (
            f"x and series leave out {', '.join(hidden)}, whose points would fall "
            "together; show it, fix it, or take x out to have no plot"
        )
        yield Problem("x", message)


def drawn(settings: RandomSettings) -> list[PointsValues]:
    """Return the values of random points."""
    # Every value has a random key of its own, so that neither more points nor another
    # key change it.
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
    low, high = values.low, values.high
    is_whole = isinstance(low, int) and isinstance(high, int)
    end = high + 1 if is_whole else high  # from n to n + 1 stands for n
    if values.scale == "log":
        found = math.exp(rng.uniform(math.log(low), math.log(end)))
    else:
        found = float(rng.uniform(low, end))
    if is_whole:
        return min(math.floor(found), high)
    return min(max(float(f"{found:.4g}"), float(low)), float(high))


@dataclass(frozen=True)
class Sweep(_Batch):
    """An experiment at many settings."""

    kind = "sweep"

    settings: SweepSettings
    shared: Mapping[str, Any]  # the sections that all points share, as plain values
    overrides: tuple[str, ...]  # ``KEY=VALUE`` that are made in every run

    @property
    def references(self) -> tuple[str, ...]:
        """The variants that the others are compared with."""
        return self.settings.references()


Plan = Comparison | Sweep


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Return the sweep that the YAML file at ``path`` describes."""
    source, problems = with_overrides(str(path), overrides), list[Problem]()
    own = [one for one in overrides if one.partition("=")[0].strip() in OF_THE_FILE]
    of_runs = tuple(one for one in overrides if one not in own)
    document = read_yaml(path)
    require_kind(document, "sweep", source)
    if isinstance(document, Mapping):
        changes = parse_overrides(own, problems)
        document = apply_overrides(document, changes, problems)
    settings = _parsed(SweepSettings, document, source)
    problems.extend(_sweep_problems(settings, of_runs))
    _raise(problems, source)
    shared = shared_sections(settings.base, settings.experiment, path)
    values = drawn(settings.random) if settings.random else _combinations(settings.vary)
    points = [
        point
        for name, variant in variants_of(settings).items()
        for point in _swept(
            settings, shared, name, variant, of_runs, path.absolute().parent
        ).points(values, problems)
    ]
    problems.extend(_coincidences(settings, points))
    figures = figures_of_all(points)
    if points and settings.y.removeprefix(GLOBAL) not in figures:
        known = alternatives(settings.y, figures)
        message = f"found {settings.y!r}, expected a figure; {known}. {_NAME_METRICS}"
        problems.append(Problem("y", message))
    _raise(problems, source)
    return Sweep(
        settings.name, settings.seeds, tuple(points), settings, shared, of_runs
    )


def variants_of(settings: SweepSettings) -> Mapping[str, VariantSettings]:
    """Return the variants by name; one that changes nothing where none is named."""
    return settings.variants or {ALONE: VariantSettings()}


def _swept(
    settings: SweepSettings,
    shared: Mapping[str, Any],
    name: str,
    variant: VariantSettings,
    overrides: Sequence[str],
    folder: Path,
) -> _Variant:
    document = {**shared, "name": settings.name}
    if variant.method is not None:
        document["method"] = variant.method
        document.pop("personalization", None)
    if variant.personalization is not None:
        document["personalization"] = variant.personalization
    sections = {"model": variant.model, "training": variant.training}
    inside = {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in values.items()
    }
    own = as_overrides({**inside, **variant.set})
    changes = [*as_overrides(settings.set), *own, *overrides]
    place = f"variants.{name}: " if settings.variants else ""
    return _Variant(
        name,
        place,
        variant.title or name,
        document,
        folder,
        changes,
        settings.seeds,
        settings.evaluate_on,
    )


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

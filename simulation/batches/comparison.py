"""The file of ``knnper compare``: methods side by side, tuned on validation data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from knnper.errors import OwnCodeError, Problem
from knnper.experiment_file import require_kind
from knnper.metrics import ACCURACY
from knnper.own import Door
from knnper.server.results import figure_of
from knnper.settings import NonNegativeInt, Settings, is_reference, with_overrides
from knnper.simulation.batches.documents import Section, with_extended
from knnper.simulation.batches.grid import (
    Values,
    as_overrides,
    combinations,
    key_problems,
    keys_in,
)
from knnper.simulation.batches.points import (
    ADD_METRICS,
    PointBuilder,
    RunBatch,
    as_tuple,
    figures_of_all,
    name_problems,
    parse_file,
    raise_problems,
    reference_problems,
    title_problems,
)
from knnper.strategies.catalogue import KINDS, METHODS, PERSONALIZERS, trained_as
from knnper.strategies.core.method import AS_IT_IS, Method
from knnper.yaml_text import read_yaml


@dataclass(frozen=True)
class BaseSettings(Settings):
    """The sections of an experiment that all rows share.

    Attributes
    ----------
    data, partition, model, training, privacy, run, own_code
        As in an experiment.
    """

    data: Section
    partition: Section
    model: Section
    training: Section = field(default_factory=dict)
    privacy: Section = field(default_factory=dict)
    run: Section = field(default_factory=dict)
    own_code: str | None = None


@dataclass(frozen=True)
class RowSettings(Settings):
    """One row of the table.

    Attributes
    ----------
    method, personalization
        As in an experiment.
    model, training, privacy
        Changes within these sections of the base.
    grid
        Values to choose from on validation data, by dotted key. They replace those of
        the common grid key by key; an empty list removes a key.
    follows
        Another row: this row adopts its grid and choice, and then chooses from its own
        grid. If both differ in the personalisation alone, they share training.
    title
        Its name in the table; by default that of the method and its personaliser.
    """

    method: Section
    personalization: Section = field(default_factory=dict)
    model: Section = field(default_factory=dict)
    training: Section = field(default_factory=dict)
    privacy: Section = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    follows: str | None = None
    title: str | None = None


@dataclass(frozen=True)
class ComparisonSettings(Settings):
    """A comparison of methods.

    Attributes
    ----------
    name
        The name of its folder.
    extends
        Another comparison's file, beside this one, that this file changes. Rows, keys
        of ``grid`` and ``tuning_set`` and keys of the base's sections are inherited
        one by one, but not those of a section with another ``name``; null removes a
        row, a section or a key of a grid.
    base
        The sections of an experiment that all rows share.
    rows
        By a short name.
    grid
        Values to choose from, by dotted key, for every row.
    seeds
        The seeds of the tested runs.
    tuning_seed
        The seed of the runs on validation data.
    tuning_set
        Settings of the runs on validation data, by dotted key: a shorter training.
    reference
        The row that the others are compared with, at the same seed; clients count as
        degraded against its model. Of several rows, the first counts them.
    metric
        The metric that is shown, and chosen by: ``accuracy``, or one of
        ``run.metrics``.
    each_also_with
        A section ``personalization``. Every row that has none is added once more with
        it, as ``ROW-NAME`` behind all others; the new row `follows` the first one, and
        both share training.
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
        merged = {**self.grid, **leader.grid, **self.rows[row].grid}
        return {key: values for key, values in merged.items() if values}

    def references(self) -> tuple[str, ...]:
        """Return the rows that the others are compared with."""
        return as_tuple(self.reference)


@dataclass(frozen=True)
class Comparison(RunBatch):
    """Methods side by side, each tuned on validation data, then tested."""

    kind = "comparison"

    references: tuple[str, ...]
    metric: str = ACCURACY

    @property
    def reference(self) -> str:
        """The row with the model that clients are compared with."""
        return self.references[0]


def read_comparison(path: Path, overrides: Sequence[str] = ()) -> Comparison:
    """Read the comparison that the YAML file at ``path`` describes.

    ``overrides``: ``KEY=VALUE`` of all runs. Raises ConfigError with all problems.
    """
    source = with_overrides(str(path), overrides)
    problems = list[Problem]()
    document = read_yaml(path)
    require_kind(document, "comparison", source)
    settings = parse_file(ComparisonSettings, with_extended(path, document), source)
    folder = path.absolute().parent
    settings = _add_personalized_rows(settings, folder, problems)
    problems.extend(_comparison_problems(settings, overrides))
    raise_problems(problems, source)
    points = [
        point
        for name in settings.rows
        for point in _point_builder(settings, name, overrides, folder).build(
            combinations(settings.grid_of(name)), problems
        )
    ]
    titles = {point.variant: point.title for point in points}
    problems.extend(title_problems("rows", titles))
    metric = settings.metric
    if figure_of(metric, "weighted") not in figures_of_all(points):
        message = f"found {metric!r}, expected accuracy. {ADD_METRICS}"
        problems.append(Problem("metric", message))
    raise_problems(problems, source)
    return Comparison(
        name=settings.name,
        seeds=settings.seeds,
        points=tuple(points),
        references=settings.references(),
        metric=metric,
    )


def _point_builder(
    settings: ComparisonSettings, name: str, overrides: Sequence[str], folder: Path
) -> PointBuilder:
    row, base = settings.rows[name], settings.base
    return PointBuilder(
        name=name,
        place=f"rows.{name}: ",
        title=row.title,
        document={
            "name": settings.name,
            "data": base.data,
            "partition": base.partition,
            "model": {**base.model, **row.model},
            "training": {**base.training, **row.training},
            "privacy": {**base.privacy, **row.privacy} or None,
            "method": row.method,
            "personalization": row.personalization,
            "run": base.run,
            "own_code": base.own_code,
        },
        folder=folder,
        changes=overrides,
        seeds=settings.seeds,
        tuning=[*as_overrides(settings.tuning_set), *overrides],
        tuning_seed=settings.tuning_seed,
        follows=row.follows,
    )


def _comparison_problems(
    settings: ComparisonSettings, overrides: Sequence[str]
) -> Iterator[Problem]:
    """Yield problems of the file itself, before any experiment is built."""
    rows = settings.rows
    yield from name_problems(settings.name, settings.seeds, "rows", rows)
    yield from reference_problems("row", settings.references(), rows)
    for name, row in rows.items():
        leader = row.follows
        if leader is None:
            continue
        if leader not in rows or rows[leader].follows:
            known = ", ".join(name for name, other in rows.items() if not other.follows)
            message = f"found {leader!r}, expected a row that follows none: {known}"
            yield Problem(f"rows.{name}.follows", message)
            return
        for key in row.grid.keys() & settings.grid_of(leader).keys():
            message = f"found {key}, which is chosen for {leader}; take it out"
            yield Problem(f"rows.{name}.grid", message)
    grids = {f"rows.{name}: grid": settings.grid_of(name) for name in rows}
    fixed = {"tuning_set": keys_in(settings.tuning_set)}
    yield from key_problems("comparison", overrides, grids, fixed)


def _add_personalized_rows(
    settings: ComparisonSettings, folder: Path, problems: list[Problem]
) -> ComparisonSettings:
    """Add the rows of `each_also_with`."""
    section = settings.each_also_with
    if section is None:
        return settings
    # The name of a user's personaliser is its attribute.
    personalizer = str(section.get("name")).rpartition(":")[2]
    title = None
    if personalizer in PERSONALIZERS:
        title = f" + {PERSONALIZERS[personalizer].title}"
    added = {
        f"{name}-{personalizer}": replace(
            row,
            personalization=section,
            follows=row.follows or name,
            grid=row.grid if row.follows else {},
            title=row.title + title if row.title and title else None,
        )
        for name, row in settings.rows.items()
        if not row.personalization and _accepts(settings, row, section, folder)
    }
    for name in added.keys() & settings.rows.keys():
        message = "each_also_with adds a row of this name; give this one another"
        problems.append(Problem(f"rows.{name}", message))
    return replace(settings, rows={**settings.rows, **added})


def _accepts(
    settings: ComparisonSettings, row: RowSettings, section: Section, folder: Path
) -> bool:
    """Return whether a row's method accepts a personaliser that no row has for it."""
    name = str(row.method.get("name"))
    method = METHODS.get(name) or _load_own_method(settings, name, folder)
    if method is None or method.personalization != AS_IT_IS:
        return False
    # A method such as kNN-Per is another one with this personaliser.
    equivalent = {
        other
        for other, spec in METHODS.items()
        if trained_as(other) == name and spec.personalization == section.get("name")
    }
    return not any(
        other.method.get("name") in equivalent and other.model == row.model
        for other in settings.rows.values()
    )


def _load_own_method(
    settings: ComparisonSettings, reference: str, folder: Path
) -> type[Method] | None:
    """Return the user's method at a reference; None where the row reports its error."""
    if not is_reference(reference):
        return None
    door = Door(folder / (settings.base.own_code or ""))
    try:
        method: type[Method] = door.open(reference, KINDS["method"]).entry
    except OwnCodeError:
        return None
    return method

"""The file of a comparison: what all rows share, and what each one is."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from knnper.config.document import results_identity
from knnper.config.errors import ConfigError, Problem
from knnper.config.loading import load_experiment
from knnper.config.names import is_name
from knnper.config.parsing import parse_settings
from knnper.config.ranges import NonNegativeInt
from knnper.config.sections import Experiment, Settings
from knnper.config.yaml_text import parse_yaml
from simulation.catalogue import experiment_catalogue
from strategies.catalogue import METHODS
from strategies.core.method import AS_IT_IS
from strategies.experiments import title_of
from strategies.personalizers import PERSONALIZERS

Grid = dict[str, Annotated[list[Any], Field(min_length=1)]]


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

    method: dict[str, Any]
    personalization: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
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
        The sections of an experiment that all rows share: data, partition, model,
        training and run.
    rows
        By a short name.
    grid
        Values to choose from, by dotted key, for every row.
    seeds
        Of the runs that are tested.
    tuning_seed
        Of the runs that are compared on validation data.
    reference
        The row against whose accuracy a client counts as hurt.
    each_also_with
        A section ``personalization`` with which every row that has none is shown once
        more, in a row ``ROW-NAME`` behind all others; training is done once for both.
    """

    name: str
    base: dict[str, Any]
    rows: Annotated[dict[str, RowSettings], Field(min_length=1)]
    reference: str
    grid: Grid = field(default_factory=dict)
    each_also_with: dict[str, Any] | None = None
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0, 1, 2)
    tuning_seed: NonNegativeInt = 0


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
    source, problems = str(path), list[Problem]()
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"), source)
    except (OSError, UnicodeDecodeError) as error:
        message = f"expected a readable text file in UTF-8: {error}"
        raise ConfigError([Problem(source, message)], source) from error
    settings = parse_settings(ComparisonSettings, document, "comparison", problems)
    if settings is None:
        raise ConfigError(problems, source)
    _check(settings, problems)
    settings = _with_both(settings)
    rows = tuple(_row(settings, name, overrides, problems) for name in settings.rows)
    if problems:
        raise ConfigError(problems, source)
    return Comparison(settings.name, settings.seeds, settings.reference, rows)


def _with_both(settings: ComparisonSettings) -> ComparisonSettings:
    """Return the settings with the rows that `each_also_with` adds."""
    on_top = settings.each_also_with
    if on_top is None:
        return settings
    more = {
        f"{name}-{on_top.get('name')}": replace(
            row, personalization=on_top, title=_both(row, on_top)
        )
        for name, row in settings.rows.items()
        if not row.personalization and _is_bare(row.method)
    }
    return replace(settings, rows={**settings.rows, **more})


def _both(row: RowSettings, on_top: Mapping[str, Any]) -> str | None:
    """Return the title of a row that has one of its own, with what is on top."""
    spec = PERSONALIZERS.get(str(on_top.get("name")))
    return f"{row.title} + {spec.title}" if row.title and spec else None


def _is_bare(method: Mapping[str, Any]) -> bool:
    spec = METHODS.get(str(method.get("name")))
    return spec is not None and spec.personalization == AS_IT_IS


def _check(settings: ComparisonSettings, problems: list[Problem]) -> None:
    if not is_name(settings.name):
        problems.append(Problem("name", f"found {settings.name!r}, expected a name"))
    for name in settings.rows:
        if not is_name(name):
            message = "expected letters, digits, '.', '_' and '-'"
            problems.append(Problem(f"rows.{name}", message))
    if settings.reference not in settings.rows:
        message = (
            f"found {settings.reference!r}, expected the name of a row: "
            f"{', '.join(settings.rows)}"
        )
        problems.append(Problem("reference", message))


def _row(
    settings: ComparisonSettings,
    name: str,
    overrides: Sequence[str],
    problems: list[Problem],
) -> Row:
    row = settings.rows[name]
    both = {**settings.grid, **row.grid}
    grid = {key: values for key, values in both.items() if values}
    candidates = []
    for chosen in itertools.product(*grid.values()):
        values = dict(zip(grid, chosen, strict=True))
        try:
            candidates.append(_candidate(settings, name, values, overrides))
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
        **base,
        "method": row.method,
        "personalization": row.personalization,
        "model": {**base.get("model", {}), **row.model},
        "training": {**base.get("training", {}), **row.training},
    }
    chosen = [f"{key}={json.dumps(value)}" for key, value in values.items()]

    def experiment(*more: str) -> Experiment:
        changes = [*chosen, *overrides, "run.engine=serial", *more]
        return load_experiment(document, experiment_catalogue(), changes)

    tuning = experiment(
        f"run.seed={settings.tuning_seed}", "partition.evaluate_on=validation"
    )
    return Candidate(values, tuning, lambda seed: experiment(f"run.seed={seed}"))


def key_of(experiment: Experiment) -> str:
    """Return a short name of an experiment's folder: equal results, equal names."""
    return results_identity(experiment)[:16]

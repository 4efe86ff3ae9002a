"""What a comparison runs: each row with its candidates, as validated experiments."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knnper.config.errors import ConfigError, Problem
from knnper.config.overrides import with_overrides
from knnper.config.parsing import parse_settings
from knnper.config.sections import Experiment
from knnper.config.yaml_text import read_yaml
from simulation.batch.checks import title_problems
from simulation.batch.experiments import batch_experiment, require_validation_data
from simulation.comparison.settings import (
    ComparisonSettings,
    RowSettings,
    Section,
    problems_of,
)
from strategies.catalogue import METHODS
from strategies.core.method import AS_IT_IS
from strategies.experiments import title_of
from strategies.personalizers import PERSONALIZERS


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
    spec = METHODS.get(str(row.method.get("name")))
    if spec is None or spec.personalization != AS_IT_IS:
        return False
    same = {
        name
        for name, one in METHODS.items()
        if one.build is spec.build and one.personalization == on_top.get("name")
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

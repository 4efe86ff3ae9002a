"""What a sweep runs: its points, as validated experiments."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knnper.config.document import results_identity
from knnper.config.errors import ConfigError, Problem
from knnper.config.overrides import (
    apply_overrides,
    parse_overrides,
    with_overrides,
)
from knnper.config.parsing import parse_settings
from knnper.config.sections import Experiment
from knnper.config.yaml_text import read_yaml
from server.results import EARLIER_NAMES
from simulation.batch.experiments import batch_experiment, require_validation_data
from simulation.shared_sections import shared_sections
from simulation.sweep.points import Values, values_of
from simulation.sweep.settings import (
    OF_THE_FILE,
    SweepSettings,
    VariantSettings,
    problems_of,
)

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
    values: Values
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
        problems.extend(problems_of(settings, of_runs))
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


def _as_overrides(values: Values) -> list[str]:
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

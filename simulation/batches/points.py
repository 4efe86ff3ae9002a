"""The points of a batch: experiments at several settings, each with every seed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from knnper.errors import ConfigError, Problem
from knnper.experiment import Experiment
from knnper.experiment_file import load_experiment
from knnper.metrics import ACCURACY
from knnper.process import known_precision
from knnper.server.results import OVER_CLIENTS, Summary, figure_of
from knnper.settings import Settings, alternatives, is_name, parse_settings
from knnper.simulation.batches.grid import PointValues, as_overrides
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.partition.settings import PartitionSettings
from knnper.strategies.catalogue import own_title, title_of

S = TypeVar("S", bound=Settings)
# The figures of each group of clients, also of the unpersonalised model.
FIGURES = tuple(name for name in Summary.__dataclass_fields__ if name != "metrics")
GLOBAL = "global."  # the prefix of figures of the unpersonalised model
ADD_METRICS = "Other metrics must be named in run.metrics of all that it runs"


@dataclass(frozen=True)
class Point:
    """One combination of settings, with every seed.

    Attributes
    ----------
    variant
        The variant of a sweep or the row of a comparison.
    values
        The values of the grid, by dotted key.
    runs
        The experiments by seed.
    tuning
        Of a comparison, the experiment that is evaluated on validation data.
    follows
        Of a comparison, the row that this point must share its chosen values with.
    """

    variant: str
    title: str
    values: PointValues
    runs: Mapping[int, Experiment]
    tuning: Experiment | None = None
    follows: str | None = None

    def agrees_with(self, best: Mapping[str, "Point"]) -> bool:
        """Return whether it has the values chosen for the row that it follows."""
        leader = best[self.follows].values if self.follows else {}
        return all(self.values[key] == value for key, value in leader.items())


@dataclass(frozen=True)
class RunBatch:
    """All points of a sweep or a comparison, variant by variant.

    Attributes
    ----------
    metric
        The metric that validation data choose by.
    name
        The name of its folder.
    """

    kind: ClassVar[str]
    metric = ACCURACY

    name: str
    seeds: tuple[int, ...]
    points: tuple[Point, ...]

    @property
    def figures(self) -> tuple[str, ...]:
        """The figures of a group of clients that all of its runs have."""
        return figures_of_all(self.points)

    @property
    def variants(self) -> Mapping[str, list[Point]]:
        """The points by the name of their variant or row."""
        variants: dict[str, list[Point]] = {}
        for point in self.points:
            variants.setdefault(point.variant, []).append(point)
        return variants

    @property
    def experiments(self) -> list[Experiment]:
        """All experiments that may be run, point by point."""
        return [*tuning_of(self.points), *tested(self.points)]

    def to_choose_from(
        self, best: Mapping[str, Point], *, following: bool
    ) -> Mapping[str, list[Point]]:
        """Return by row the points that validation data choose from.

        Parameters
        ----------
        best
            The points chosen so far.
        following
            Whether to return rows that follow another, or rows that follow none.
        """
        return {
            name: [point for point in points if point.agrees_with(best)]
            for name, points in self.variants.items()
            if points[0].tuning is not None
            if (points[0].follows is not None) == following
        }

    def tested_with(self, best: Mapping[str, Point]) -> list[Point]:
        """Return the points that are tested, given those chosen."""
        return [
            point
            for name, points in self.variants.items()
            for point in ([best[name]] if name in best else points)
        ]


def figures_of_all(points: Iterable[Point]) -> tuple[str, ...]:
    """Return `FIGURES`, and those of the metrics that all runs of points have."""
    by_run = [run.run.metric_names for run in tested(points)]
    metrics = dict.fromkeys(
        metric
        for names in by_run
        for metric in names
        if all(metric in other for other in by_run)
    )
    figures = [figure for metric in metrics for figure in figures_of_metric(metric)]
    return (*FIGURES, *figures)


def figures_of_metric(metric: str) -> list[str]:
    """Return the figures of a run's metric that `FIGURES` lacks."""
    if metric == ACCURACY:
        return []
    return [figure_of(metric, name) for name in OVER_CLIENTS]


def tested(points: Iterable[Point]) -> list[Experiment]:
    """Return the runs of points, one a seed."""
    return [run for point in points for run in point.runs.values()]


def tuning_of(points: Iterable[Point]) -> list[Experiment]:
    """Return the experiments that are evaluated on validation data to choose points."""
    return [point.tuning for point in points if point.tuning is not None]


@dataclass(frozen=True)
class PointBuilder:
    """Builds the points of one variant or row from its document.

    Attributes
    ----------
    place
        The prefix of the places of its problems.
    folder
        The folder of the batch's file, where users' code is looked for.
    changes
        ``KEY=VALUE`` applied before the values of a point.
    tuning
        The same for experiments on validation data; None if nothing is chosen.
    """

    name: str
    place: str
    title: str | None
    document: Mapping[str, Any]
    folder: Path
    changes: Sequence[str]
    seeds: Sequence[int]
    evaluate_on: str = "test"
    tuning: Sequence[str] | None = None
    tuning_seed: int = 0
    follows: str | None = None

    def build(
        self, grid: Sequence[PointValues], problems: list[Problem]
    ) -> Iterator[Point]:
        """Yield a point for each combination of values; stop at the first problem."""
        for values in grid:
            try:
                yield self._build_point(values, is_chosen=len(grid) > 1)
            except ConfigError as error:
                problems.extend(
                    Problem(f"{self.place}{problem.place}", problem.message)
                    for problem in error.problems
                )
                return  # most problems are common to all points

    def _build_point(self, values: PointValues, *, is_chosen: bool) -> Point:
        first = self._build_experiment(
            self.changes, values, self.seeds[0], self.evaluate_on
        )
        _require_validation_data(first)
        tuning = None
        if self.tuning is not None:
            tuning = self._build_experiment(
                self.tuning, values, self.tuning_seed, "validation"
            )
            if is_chosen:
                _require_validation_data(tuning)
        default_title = title_of(first.method.name, first.personalization.name)
        return Point(
            variant=self.name,
            title=self.title or own_title(first).get("title") or default_title,
            values=values,
            runs={
                seed: replace(first, run=replace(first.run, seed=seed))
                for seed in self.seeds
            },
            tuning=tuning,
            follows=self.follows,
        )

    def _build_experiment(
        self, changes: Sequence[str], values: PointValues, seed: int, evaluate_on: str
    ) -> Experiment:
        set_by_batch = {"run.seed": seed, "partition.evaluate_on": evaluate_on}
        experiment = load_experiment(
            self.document,
            experiment_catalogue(),
            [
                *changes,
                *as_overrides({**values, **set_by_batch}),
                "run.engine=serial",
            ],
            folder=self.folder,
        )
        known_precision(experiment.training.precision)
        if experiment.run.threads_per_worker == "auto":
            message = (
                "found 'auto', expected a number: the last bits of all runs depend on "
                "it, and runs added on another machine would differ. With 1, the "
                "default, --workers processes keep the cores busy"
            )
            raise ConfigError([Problem("run.threads_per_worker", message)])
        return experiment


def _require_validation_data(experiment: Experiment) -> None:
    """Reject an evaluation on an empty validation split, before anything is trained."""
    partition = experiment.partition.settings
    if not isinstance(partition, PartitionSettings):
        return
    if partition.evaluate_on == "validation" and partition.validation_fraction == 0:
        message = (
            "found 0, expected more: settings are chosen on validation data; set it, "
            "as in partition.validation_fraction=0.2, or choose nothing"
        )
        raise ConfigError([Problem("partition.validation_fraction", message)])


def parse_file(settings_type: type[S], document: object, source: str) -> S:
    """Parse the file of a batch. Raises ConfigError with all problems."""
    problems: list[Problem] = []
    settings = parse_settings(settings_type, document, "", problems)
    if settings is None:
        raise ConfigError(problems, source)
    return settings


def raise_problems(problems: Sequence[Problem], source: str) -> None:
    """Raise ConfigError if there are problems."""
    if problems:
        raise ConfigError(problems, source)


def as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return one or several names as a tuple."""
    return (names,) if isinstance(names, str) else names


def name_problems(
    name: str, seeds: Sequence[int], place: str, variants: Iterable[str]
) -> Iterator[Problem]:
    """Yield names that cannot name folders, and repeated seeds."""
    named = {"name": name, **{f"{place}.{variant}": variant for variant in variants}}
    for where, text in named.items():
        if not is_name(text):
            message = f"found {text!r}, expected letters, digits, '.', '_' and '-'"
            yield Problem(where, message)
    if len(set(seeds)) < len(seeds):
        yield Problem("seeds", f"found {list(seeds)}, expected each one once")


def reference_problems(
    noun: str, references: Sequence[str], variants: Iterable[str]
) -> Iterator[Problem]:
    """Yield references that are unknown or repeated."""
    for name in references:
        if name not in variants:
            known = alternatives(name, [*variants])
            message = f"found {name!r}, which is no {noun}; {known}"
            yield Problem("reference", message)
    if len(set(references)) < len(references):
        yield Problem("reference", f"found {[*references]}, expected each one once")


def title_problems(place: str, titles: Mapping[str, str]) -> Iterator[Problem]:
    """Yield titles, by name, that two rows of a table would share."""
    names: dict[str, str] = {}
    for name, title in titles.items():
        first = names.setdefault(title, name)
        if first != name:
            message = f"found {title!r}, as {first} has; expected a title of its own"
            yield Problem(f"{place}.{name}.title", message)

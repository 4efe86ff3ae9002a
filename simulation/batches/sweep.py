"""The file of ``knnper sweep``: an experiment at many settings over several seeds."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from knnper.errors import Problem
from knnper.experiment_file import require_kind, results_identity
from knnper.settings import (
    NonNegativeInt,
    Settings,
    alternatives,
    apply_overrides,
    parse_overrides,
    with_overrides,
)
from knnper.simulation.batches.documents import Section, shared_sections
from knnper.simulation.batches.grid import (
    RandomSettings,
    Values,
    as_overrides,
    combinations,
    draw_points,
    key_problems,
    keys_in,
    range_problems,
)
from knnper.simulation.batches.points import (
    ADD_METRICS,
    GLOBAL,
    Point,
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
from knnper.yaml_text import read_yaml

# Keys of the file that the command line can change; its other keys are runs' settings.
KEYS_OF_FILE = (
    "name",
    "seeds",
    "evaluate_on",
    "x",
    "series",
    "y",
    "group",
    "reference",
)
VARIANT = "variant"  # selects the variants in ``x`` and ``series``
ALONE = "alone"  # the name of the variant of a sweep without ``variants``


@dataclass(frozen=True)
class VariantSettings(Settings):
    """One of several methods, or settings of one, side by side.

    Attributes
    ----------
    method, personalization
        Replace these sections. A variant with a method but no personalisation has the
        method's default, not the base's.
    model, training
        Changes within these sections.
    set
        Other settings, by dotted key.
    title
        Its name in tables and legends; by default its key in the file.
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
        The name of its folder.
    base
        The sections of an experiment that all points share.
    experiment
        In place of ``base``, the file of an experiment; a relative path starts from
        the folder of the sweep's file.
    set
        Settings of all points, by dotted key.
    grid
        Lists of values by dotted key; every combination is a point.
    random
        In place of ``grid``, points drawn at random.
    variants
        By a short name; every point is run with each of them.
    seeds
        Every point is run with each of them.
    evaluate_on
        ``test``, or ``validation`` to choose a point without reading a test split.
    x
        The plot's horizontal axis: a key of the grid, or ``variant``; null for no
        plot.
    series
        The keys that distinguish the plot's curves: one or several.
    y
        The figure that is shown, and chosen by, as in ``accuracy_weighted``, or
        ``macro_f1_mean`` where ``run.metrics`` has ``macro_f1``; with the prefix
        ``global.`` it is that of the unpersonalised model.
    group
        The clients of ``y``: seen in training, unseen, or all.
    reference
        The variant, or several, that the others are compared with: its ``y`` is
        subtracted from theirs, at equal values and seed.
    """

    name: str
    base: Section | None = None
    experiment: str | None = None
    set: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, Values] = field(default_factory=dict)
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
        """Return the keys that distinguish the plot's curves."""
        return as_tuple(self.series)

    def references(self) -> tuple[str, ...]:
        """Return the variants that the others are compared with."""
        return as_tuple(self.reference)

    def varied(self) -> tuple[str, ...]:
        """Return the dotted keys with values that differ between points."""
        return tuple(self.random.keys if self.random else self.grid)


@dataclass(frozen=True)
class Sweep(RunBatch):
    """An experiment at many settings.

    Attributes
    ----------
    shared
        The sections that all points share, as plain values.
    overrides
        ``KEY=VALUE`` applied to every run.
    """

    kind = "sweep"

    settings: SweepSettings
    shared: Mapping[str, Any]
    overrides: tuple[str, ...]

    @property
    def references(self) -> tuple[str, ...]:
        """The variants that the others are compared with."""
        return self.settings.references()


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read the sweep that the YAML file at ``path`` describes.

    ``overrides``: ``KEY=VALUE`` of the file (see `KEYS_OF_FILE`) or of all runs.
    Raises ConfigError with all problems.
    """
    source = with_overrides(str(path), overrides)
    problems = list[Problem]()
    of_file = [
        text for text in overrides if text.partition("=")[0].strip() in KEYS_OF_FILE
    ]
    of_runs = tuple(text for text in overrides if text not in of_file)
    document = read_yaml(path)
    require_kind(document, "sweep", source)
    if isinstance(document, Mapping):
        changes = parse_overrides(of_file, problems)
        document = apply_overrides(document, changes, problems)
    settings = parse_file(SweepSettings, document, source)
    problems.extend(_sweep_problems(settings, of_runs))
    raise_problems(problems, source)
    shared = shared_sections(settings.base, settings.experiment, path)
    random = settings.random
    grid = draw_points(random) if random else combinations(settings.grid)
    points = [
        point
        for name, variant in variants_of(settings).items()
        for point in _point_builder(
            settings, shared, name, variant, of_runs, path.absolute().parent
        ).build(grid, problems)
    ]
    problems.extend(_equal_points(settings, points))
    figures = figures_of_all(points)
    if points and settings.y.removeprefix(GLOBAL) not in figures:
        known = alternatives(settings.y, figures)
        message = f"found {settings.y!r}, expected a figure; {known}. {ADD_METRICS}"
        problems.append(Problem("y", message))
    raise_problems(problems, source)
    return Sweep(
        name=settings.name,
        seeds=settings.seeds,
        points=tuple(points),
        settings=settings,
        shared=shared,
        overrides=of_runs,
    )


def variants_of(settings: SweepSettings) -> Mapping[str, VariantSettings]:
    """Return the variants by name; without any, one that changes nothing."""
    return settings.variants or {ALONE: VariantSettings()}


def _point_builder(
    settings: SweepSettings,
    shared: Mapping[str, Any],
    name: str,
    variant: VariantSettings,
    overrides: Sequence[str],
    folder: Path,
) -> PointBuilder:
    document = {**shared, "name": settings.name}
    if variant.method is not None:
        document["method"] = variant.method
        document.pop("personalization", None)
    if variant.personalization is not None:
        document["personalization"] = variant.personalization
    within_sections = {
        **{f"model.{key}": value for key, value in variant.model.items()},
        **{f"training.{key}": value for key, value in variant.training.items()},
    }
    return PointBuilder(
        name=name,
        place=f"variants.{name}: " if settings.variants else "",
        title=variant.title or name,
        document=document,
        folder=folder,
        # Later changes win.
        changes=[
            *as_overrides(settings.set),
            *as_overrides({**within_sections, **variant.set}),
            *overrides,
        ],
        seeds=settings.seeds,
        evaluate_on=settings.evaluate_on,
    )


def _sweep_problems(
    settings: SweepSettings, overrides: Sequence[str]
) -> Iterator[Problem]:
    """Yield problems of the file itself, before any experiment is built."""
    variants = settings.variants
    yield from name_problems(settings.name, settings.seeds, "variants", variants)
    if (settings.base is None) == (settings.experiment is None):
        message = "expected the sections of an experiment, or experiment: PATH; one of"
        yield Problem("base", f"{message} the two")
    if settings.random is not None:
        if settings.grid:
            yield Problem("random", "found grid too, expected one of the two")
        yield from range_problems(settings.random)
    titles = {name: variant.title or name for name, variant in variants.items()}
    yield from title_problems("variants", titles)
    yield from reference_problems("variant", settings.references(), variants)
    fixed = {"set": keys_in(settings.set)}
    for name, variant in variants.items():
        sections = {
            "method": variant.method,
            "personalization": variant.personalization,
            "model": variant.model,
            "training": variant.training,
        }
        fixed[f"variants.{name}.set"] = keys_in(variant.set)
        fixed[f"variants.{name}"] = keys_in(
            {key: section for key, section in sections.items() if section}
        )
    grid = settings.random.keys if settings.random else settings.grid
    yield from key_problems("sweep", overrides, {"grid": grid}, fixed)
    yield from _axis_problems(settings)


def _axis_problems(settings: SweepSettings) -> Iterator[Problem]:
    """Yield problems of the plot's axis and curves."""
    known = [*settings.varied(), *([VARIANT] if settings.variants else [])]
    curves = settings.curve_keys()
    x = settings.x
    for place, key in [*(("series", key) for key in curves), ("x", x)]:
        if key is not None and key not in known:
            message = f"found {key!r}, which is not varied; {alternatives(key, known)}"
            yield Problem(place, message)
    if curves and x in (None, *curves):
        message = f"found {curves[0]!r}, expected x to be another key"
        yield Problem("series", message)
    # Random points are scattered anyway.
    several = [key for key, values in settings.grid.items() if len(values) > 1]
    several += [VARIANT] if len(settings.variants) > 1 else []
    hidden = [key for key in several if key not in (x, *curves)]
    if x is not None and hidden:
        message = (
            f"x and series leave out {', '.join(hidden)}: their points would fall "
            "together; show it, fix it, or take x out to have no plot"
        )
        yield Problem("x", message)


def _equal_points(
    settings: SweepSettings, points: Sequence[Point]
) -> Iterable[Problem]:
    """Yield points with the runs of another point."""
    firsts: dict[str, Point] = {}
    for point in points:
        run = next(iter(point.runs.values()))
        first = firsts.setdefault(results_identity(run), point)
        # Random points may repeat when there are few values.
        is_repeated = (point.variant, point.values) == (first.variant, first.values)
        if first is not point and not (is_repeated and settings.random):
            message = (
                f"is the same run as {_describe(first)}: their difference changes no "
                "result; take one of the two out"
            )
            yield Problem(_describe(point), message)


def _describe(point: Point) -> str:
    return f"the point {point.variant} {json.dumps(dict(point.values))}"

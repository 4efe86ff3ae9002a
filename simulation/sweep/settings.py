"""The file of a sweep: what all points share, and what is varied."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from knnper.config.errors import Problem
from knnper.config.names import is_name
from knnper.config.overrides import parse_overrides
from knnper.config.ranges import NonNegativeInt, PositiveInt
from knnper.config.sections import Settings
from knnper.config.suggestions import alternatives
from server.results import Summary

Section = dict[str, Any]
Values = Annotated[list[Any], Field(min_length=1)]

ITS_OWN = ("run.seed", "run.engine", "partition.evaluate_on")
"""What the sweep itself sets."""

OF_THE_FILE = ("seeds", "evaluate_on", "x", "series", "y", "group")
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


def problems_of(settings: SweepSettings, overrides: Sequence[str]) -> Iterable[Problem]:
    """Yield what does not go together, before any experiment is looked at."""
    for place, name in (
        ("name", settings.name),
        *((f"variants.{name}", name) for name in settings.variants),
    ):
        if not is_name(name):
            message = f"found {name!r}, expected letters, digits, '.', '_' and '-'"
            yield Problem(place, message)
    if (settings.base is None) == (settings.experiment is None):
        message = "expected the sections of an experiment, or experiment: PATH; one of"
        yield Problem("base", f"{message} the two")
    if settings.random is not None and settings.vary:
        yield Problem("random", "found vary too, expected one of the two")
    if len(set(settings.seeds)) < len(settings.seeds):
        yield Problem("seeds", f"found {list(settings.seeds)}, expected each one once")
    yield from _title_problems(settings)
    yield from _range_problems(settings)
    yield from _key_problems(settings, overrides)
    yield from _axis_problems(settings)


def _title_problems(settings: SweepSettings) -> Iterable[Problem]:
    names: dict[str, str] = {}
    for name, variant in settings.variants.items():
        title = variant.title or name
        first = names.setdefault(title, name)
        if first != name:
            message = f"found {title!r}, as {first} has; expected a title of its own"
            yield Problem(f"variants.{name}.title", message)


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


def _key_problems(
    settings: SweepSettings, overrides: Sequence[str]
) -> Iterable[Problem]:
    malformed: list[Problem] = []
    changed = {".".join(one.path) for one in parse_overrides(overrides, malformed)}
    yield from malformed
    varied = set(settings.varied())
    for key in sorted(varied & changed):
        message = "is varied: an override would make its points equal"
        yield Problem(f"override {key}", message)
    variants = settings.variants.items()
    fixed = [
        ("set", set(settings.set)),
        *((f"variants.{name}.set", set(one.set)) for name, one in variants),
        *((f"variants.{name}", _keys_inside(one)) for name, one in variants),
    ]
    for place, keys in fixed:
        for key in sorted(keys & varied):
            yield Problem(f"{place} {key}", "is varied too; take one of the two out")
    for place, keys in (("vary", varied), ("override", changed), *fixed):
        for key in sorted(keys & set(ITS_OWN)):
            message = "the sweep itself sets this: see its seeds and evaluate_on"
            yield Problem(f"{place} {key}", message)


def _keys_inside(variant: VariantSettings) -> set[str]:
    """Return the dotted keys that a variant's sections set."""
    sections = {
        "method": variant.method or {},
        "personalization": variant.personalization or {},
        "model": variant.model,
        "training": variant.training,
    }
    return {f"{name}.{key}" for name, section in sections.items() for key in section}


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

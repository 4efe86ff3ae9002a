"""The file of a sweep: what all points share, and what is varied."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from knnper.config.errors import Problem
from knnper.config.ranges import NonNegativeInt, PositiveInt
from knnper.config.sections import Settings
from knnper.config.suggestions import alternatives
from server.results import Summary
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
    title_problems,
)

Section = dict[str, Any]
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


def problems_of(settings: SweepSettings, overrides: Sequence[str]) -> Iterable[Problem]:
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
    yield from _key_problems(settings, overrides)
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


def _key_problems(
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

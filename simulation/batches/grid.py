"""The grid of a sweep or a comparison: settings with several values, as points.

Both files have the same format: values by dotted key; every combination is a point. A
sweep may draw its points at random instead.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from knnper.errors import Problem
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeInt, PositiveInt, Settings, parse_overrides

Values = Annotated[list[Any], Field(min_length=1)]
Grid = Mapping[str, Sequence[Any]]  # values by dotted key
PointValues = Mapping[str, Any]  # one value by dotted key
# A batch sets these keys in every run.
SET_BY_BATCH = ("name", "run.seed", "run.engine", "partition.evaluate_on")


@dataclass(frozen=True)
class RangeSettings(Settings):
    """A range of random values.

    Attributes
    ----------
    low, high
        The ends. If both are written as whole numbers, whole numbers are drawn, both
        ends included; otherwise numbers of four digits.
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
        The number of points. A larger number keeps the first points.
    keys
        By dotted key, a range or a list of values to choose from.
    seed
        The seed of the points, independent of the runs' seeds.
    """

    num_points: PositiveInt
    keys: Annotated[dict[str, Values | RangeSettings], Field(min_length=1)]
    seed: NonNegativeInt = 0


def combinations(grid: Grid) -> list[PointValues]:
    """Return every combination of values; the last key varies fastest.

    An empty grid has one combination without values.
    """
    products = itertools.product(*grid.values())
    return [dict(zip(grid, values, strict=True)) for values in products]


def as_overrides(values: PointValues) -> list[str]:
    """Return values by dotted key as ``KEY=VALUE``."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def draw_points(settings: RandomSettings) -> list[PointValues]:
    """Draw the values of random points."""
    # Every value has its own random key, so that neither more points nor another key
    # change it.
    root = RandomKey(settings.seed).child("sweep")
    return [
        {
            key: _draw_value(values, root.child(key, number).numpy())
            for key, values in settings.keys.items()
        }
        for number in range(settings.num_points)
    ]


def _draw_value(values: Sequence[Any] | RangeSettings, rng: np.random.Generator) -> Any:
    if not isinstance(values, RangeSettings):
        return values[int(rng.integers(len(values)))]
    low, high = values.low, values.high
    is_whole = isinstance(low, int) and isinstance(high, int)
    end = high + 1 if is_whole else high  # the interval [n, n + 1) stands for n
    if values.scale == "log":
        value = math.exp(rng.uniform(math.log(low), math.log(end)))
    else:
        value = float(rng.uniform(low, end))
    if is_whole:
        return min(math.floor(value), high)
    return min(max(float(f"{value:.4g}"), float(low)), float(high))


def range_problems(settings: RandomSettings) -> Iterable[Problem]:
    """Yield ranges that hold no value."""
    for key, values in settings.keys.items():
        if not isinstance(values, RangeSettings):
            continue
        ends = f"found {values.low} and {values.high}"
        if values.low >= values.high:
            message = f"{ends}, expected low to be less than high"
            yield Problem(f"random.keys.{key}", message)
        elif values.scale == "log" and values.low <= 0:
            message = f"{ends}, expected low to be greater than 0 with scale = log"
            yield Problem(f"random.keys.{key}", message)


def keys_in(values: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys that values set; of a section those inside it."""
    keys = set[str]()
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            keys |= keys_in({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            keys.add(key)
    return keys


def key_problems(
    batch: str,
    overrides: Sequence[str],
    grids: Mapping[str, Mapping[str, Any]],
    fixed: Mapping[str, Iterable[str]],
) -> Iterable[Problem]:
    """Yield keys that are set twice, or that the batch itself sets.

    Parameters
    ----------
    batch
        The kind of the batch, for messages.
    overrides
        ``KEY=VALUE`` of the command line.
    grids
        By place in the file, lists of values (or ranges) by dotted key.
    fixed
        By place in the file, dotted keys with one value.
    """
    malformed: list[Problem] = []
    parsed = parse_overrides(overrides, malformed)
    yield from malformed
    changes = {".".join(override.path): override.value for override in parsed}
    fixed = {"override": keys_in(changes), **fixed}
    advice = "take one of the two out"
    for place, grid in grids.items():
        for key, other in itertools.permutations(sorted(grid), 2):
            if key.startswith(f"{other}."):
                yield Problem(f"{place} {key}", f"is varied with {other} too; {advice}")
    varied = sorted({key for grid in grids.values() for key in grid})
    for place, keys in fixed.items():
        for key in sorted(keys):
            clash = next((other for other in varied if _overlap(key, other)), None)
            if clash is not None:
                section = "" if key == clash else f" with {clash}"
                yield Problem(f"{place} {key}", f"is varied too{section}; {advice}")
    in_grids = {place: _keys_of_grid(grid) for place, grid in grids.items()}
    for place, keys in {**in_grids, **fixed}.items():
        for key in sorted(keys):
            if any(_overlap(key, reserved) for reserved in SET_BY_BATCH):
                message = f"the {batch} itself sets this in every run; take it out"
                yield Problem(f"{place} {key}", message)


def _keys_of_grid(grid: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys that any value of a grid sets; a range sets one."""
    keys = set[str]()
    for key, values in grid.items():
        for value in values if isinstance(values, list) else [values]:
            keys |= keys_in({key: value})
    return keys


def _overlap(key: str, other: str) -> bool:
    """Return whether two keys are equal, or one is a section that holds the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")

"""The values of the points: all combinations, or some at random."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from knnper.config.seeding import RandomKey
from simulation.sweep.settings import RandomSettings, RangeSettings, SweepSettings

Values = Mapping[str, Any]
"""From dotted keys to plain values."""


def values_of(settings: SweepSettings) -> list[Values]:
    """Return the values of each point, in the order of the file or of the draws.

    The last key of a grid varies fastest. With nothing varied there is one point.
    """
    if settings.random is not None:
        return drawn(settings.random)
    combinations = itertools.product(*settings.vary.values())
    return [dict(zip(settings.vary, one, strict=True)) for one in combinations]


def drawn(settings: RandomSettings) -> list[Values]:
    """Return the values of random points.

    Every value has a random key of its own, so that neither more points nor another
    key change it.
    """
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
    if isinstance(values.low, int) and isinstance(values.high, int):
        return _whole_number(values.low, values.high, values.scale == "log", rng)
    found = _between(values.low, values.high, values.scale == "log", rng)
    return min(max(float(f"{found:.4g}"), float(values.low)), float(values.high))


def _whole_number(low: int, high: int, is_log: bool, rng: np.random.Generator) -> int:
    # The interval from n to n + 1 stands for n.
    return min(math.floor(_between(low, high + 1, is_log, rng)), high)


def _between(low: float, high: float, is_log: bool, rng: np.random.Generator) -> float:
    if is_log:
        return math.exp(rng.uniform(math.log(low), math.log(high)))
    return float(rng.uniform(low, high))

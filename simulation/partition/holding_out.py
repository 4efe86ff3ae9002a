"""What of a client's training samples is held out for its own choices."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from knnper.config.seeding import RandomKey
from knnper.data.examples import InputDtype
from simulation.partition.assignment import Integers

HoldOut: TypeAlias = Callable[[Integers, float, RandomKey], tuple[Integers, Integers]]
"""``(samples, fraction, key) -> (train, validation)``: a client's samples, split.

``samples`` are sorted. As many as the fraction says, rounded, are held out; one at
least, where there is any, is left to train on.
"""


def hold_out_for(dtype: InputDtype) -> HoldOut:
    """Return how samples of inputs of this type are held out."""
    return hold_out_last if dtype == "token" else hold_out_any


def hold_out_any(
    samples: Integers, fraction: float, key: RandomKey
) -> tuple[Integers, Integers]:
    """Hold out samples that are drawn by ``key``."""
    count = _num_held_out(len(samples), fraction)
    shuffled = key.numpy().permutation(samples)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def hold_out_last(
    samples: Integers,
    fraction: float,
    key: RandomKey,  # noqa: ARG001 - nothing is random here
) -> tuple[Integers, Integers]:
    """Hold out the last samples: of text, in whose order a client's windows are.

    A window holds what comes before its target, so that no character whose prediction
    is held out lies in a window that is left to train on.
    """
    end = len(samples) - _num_held_out(len(samples), fraction)
    return samples[:end], samples[end:]


def _num_held_out(num_samples: int, fraction: float) -> int:
    return min(int(fraction * num_samples + 0.5), max(num_samples - 1, 0))

"""Quotients of what may be 0."""

from torch import Tensor


def denominator(values: Tensor) -> Tensor:
    """Return non-negative ``values`` to divide by: 1e-30 in place of what is 0.

    A quotient whose numerator is 0 too is then 0.
    """
    return values.clamp_min(1e-30)

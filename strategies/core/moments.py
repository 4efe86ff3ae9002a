"""What the adaptive server optimizers step with."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """What the adaptive optimizers keep, each of shape (d,).

    Attributes
    ----------
    parameters, momentum, second_moment
        x, m and v.
    """

    parameters: Tensor
    momentum: Tensor
    second_moment: Tensor


AdaptiveStep = Callable[[Moments, Tensor], Moments]
"""``(moments, mean of the clients' parameters (d,)) -> moments``, float32."""

"""What can be set about ProtoNN."""

from dataclasses import dataclass
from typing import Literal

from knnper.config.ranges import (
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)
from knnper.config.sections import Settings

LossName = Literal["squared", "cross_entropy"]


@dataclass(frozen=True)
class ProtoNNSettings(Settings):
    """Size and training of a ProtoNN.

    Attributes
    ----------
    capacity
        m/n, prototypes as a fraction of the examples, (0, 1]; 0.1 to 1 in knn-per.txt,
        Figure 11. Every label that has examples keeps one prototype at least.
    projection_dim
        d̂, 100 to 1280 of p = 1280 in the paper; null or p and more is p.
    kernel_width
        γ is this by the median distance of prototypes and projected examples. 2.5 in
        ProtoNN's first implementation, 0.4 in later ones; the larger, the more the
        nearest prototype counts.
    loss
        ``cross_entropy``: the negative logarithm of the label's share. ``squared``:
        the squared error of the scores, as in Gupta et al. 2017.
    num_steps
        Steps of Adam, each on all examples; 0 leaves the prototypes where k-means puts
        them.
    learning_rate
        Of Adam, relative to the typical size of what it moves; 0.001 to 0.1.
    fraction_nonzero
        Part of the entries of each of W, B and Z that is kept, (0, 1]; the smallest
        are set to 0 after each step.
    """

    capacity: PositiveFraction = 1 / 3
    projection_dim: PositiveInt | None = None
    kernel_width: PositiveFloat = 1.5
    loss: LossName = "cross_entropy"
    num_steps: NonNegativeInt = 30
    learning_rate: PositiveFloat = 0.005
    fraction_nonzero: PositiveFraction = 1.0

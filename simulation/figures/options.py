"""What can be chosen of each figure, on the command line and in a figure file.

Every default stands here and nowhere else. What is null or empty follows the run.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from knnper.config.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    UnitInterval,
)
from knnper.config.sections import Settings

PanelName = Literal[
    "capacity", "knn-weight", "neighbors", "kernel-scale", "best-weight", "hardware"
]
"""One of the figures of the memory."""

SampleCount = Annotated[int, Field(ge=3)]


@dataclass(frozen=True)
class MemoryOptions(Settings):
    """Of the figures of the memory: knn-per.txt, Figures 1, 2, 5, 7, 8 and 9.

    Attributes
    ----------
    only
        Which of them.
    clients
        M, the new clients; null is as many as the run's unseen ones.
    alpha
        α of the lines of ``capacity``.
    size
        A client's images, on average, in ``knn-weight``; none is 1/50, 1/10, 2/5 and
        all of those it has.
    deals
        How often the images are dealt anew.
    seed
        Fixes every random choice.
    """

    only: Annotated[tuple[PanelName, ...], Field(min_length=1)] = (
        "capacity",
        "knn-weight",
        "neighbors",
        "kernel-scale",
        "best-weight",
        "hardware",
    )
    clients: PositiveInt | None = None
    alpha: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (
        0.1,
        0.3,
        0.5,
        0.7,
        1.0,
    )
    size: tuple[PositiveInt, ...] = ()
    deals: PositiveInt = 3
    seed: NonNegativeInt = 0


@dataclass(frozen=True)
class QualityOptions(Settings):
    """Of the figure of the model's quality: knn-per.txt, Figures 3, 12 and 13.

    Attributes
    ----------
    epochs
        Passes over the central data after which the model is kept.
    clients
        M, the new clients; null is as many as the unseen ones.
    alpha
        α of each line.
    deals
        How often the images are dealt anew.
    """

    epochs: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] = (
        0.0,
        0.1,
        0.3,
        1.0,
        3.0,
        10.0,
        30.0,
    )
    clients: PositiveInt | None = None
    alpha: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (0.1, 0.3, 1.0)
    deals: PositiveInt = 3


@dataclass(frozen=True)
class DriftOptions(Settings):
    """Of the figure of a shift: knn-per.txt, Figure 14.

    Attributes
    ----------
    clients
        M.
    steps
        T, batches that arrive.
    shift_at
        t0, the batches before the shift; fewer than ``steps``.
    alpha
        Of both Dirichlet draws.
    knn_weight
        λ of all clients; null lets each choose once.
    seed
        Fixes every random choice.
    """

    clients: PositiveInt = 100
    steps: Annotated[int, Field(ge=2)] = 100
    shift_at: PositiveInt = 50
    alpha: PositiveFloat = 0.3
    knn_weight: UnitInterval | None = None
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.shift_at >= self.steps:
            raise ValueError(
                f"found shift_at {self.shift_at} with steps {self.steps}, expected "
                "shift_at below steps"
            )


@dataclass(frozen=True)
class ProtoNNOptions(Settings):
    """Of the figure of ProtoNN: knn-per.txt, Figure 11.

    Attributes
    ----------
    clients
        The first so many of the run's clients; null is 50, or all with ``full``.
    capacity
        Prototypes by a client's examples; none is 0.1, 0.3, 0.6 and 1, or 0.1, 0.2 ...
        1 with ``full``.
    dim
        Projection dimensions; none is 4 of them up to that of the embeddings, or 13
        with ``full``.
    full
        All clients and the paper's whole grid.
    steps
        Steps of training; null is the default of ProtoNN's own settings.
    seed
        Fixes every random choice.
    """

    clients: PositiveInt | None = None
    capacity: tuple[PositiveFraction, ...] = ()
    dim: tuple[PositiveInt, ...] = ()
    full: bool = False
    steps: NonNegativeInt | None = None
    seed: NonNegativeInt = 0


@dataclass(frozen=True)
class CollapseOptions(Settings):
    """Of the figure of FedBasis' collapse, whose experiment says everything."""


@dataclass(frozen=True)
class ThreeApproachesOptions(Settings):
    """Of the figure of three approaches on synthetic users.

    Attributes
    ----------
    samples
        Of each user.
    clusters
        Of HypCluster.
    users
        p.
    seed
        Fixes every random choice.
    """

    samples: Annotated[tuple[SampleCount, ...], Field(min_length=1)] = (
        3,
        5,
        10,
        30,
        100,
        200,
    )
    clusters: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (
        1,
        2,
        3,
        4,
        5,
        6,
        8,
    )
    users: PositiveInt = 100
    seed: NonNegativeInt = 0

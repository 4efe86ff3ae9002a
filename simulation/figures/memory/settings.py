"""What the figures of the memory show."""

from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import Field

from knnper.config.ranges import (
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    UnitInterval,
)
from knnper.config.sections import Settings
from simulation.figures.knn_weight import knn_settings
from simulation.figures.newcomers import NewcomerPool
from simulation.figures.options import MemoryOptions
from simulation.partition.dirichlet import DirichletSettings
from simulation.partition.settings import PartitionSettings
from simulation.trained_model import TrainedModel
from strategies.core.memory import KnnSettings

_TENTHS = tuple(number / 10 for number in range(11))
_PAPER_SIZES = (1 / 50, 1 / 10, 2 / 5, 1.0)
"""Of the 250 images that a client of the paper has on average: 5, 25, 100 and 250."""


@dataclass(frozen=True)
class MemorySettings(Settings):
    """Who the new clients are, and which points are shown; the paper's by default.

    Attributes
    ----------
    num_clients
        M, of each deal.
    sizes
        Images that a client has on average, in the figure of λ.
    alpha
        α of all figures but the first.
    alphas
        α of the first figure, that of the capacity.
    num_deals
        How often the images are dealt anew; what points vary by.
    capacities
        Memory of a client as a fraction of the images it has.
    knn_weights
        λ, the same for all clients, where a figure has it on an axis.
    num_neighbors
        k.
    kernel_scales
        σ.
    imbalances
        ΔC, [0, 0.5].
    validation_fraction
        Part of its images on which a client chooses.
    knn
        k, kernel, σ, and how a client chooses its λ.
    """

    num_clients: PositiveInt
    sizes: tuple[PositiveInt, ...]
    alpha: PositiveFloat = 0.3
    alphas: tuple[PositiveFloat, ...] = MemoryOptions.alpha
    num_deals: PositiveInt = MemoryOptions.deals
    capacities: tuple[UnitInterval, ...] = _TENTHS
    knn_weights: tuple[UnitInterval, ...] = _TENTHS
    num_neighbors: tuple[PositiveInt, ...] = (1, 3, 5, 7, 10, 12, 14, 16)
    kernel_scales: tuple[PositiveFloat, ...] = (0.01, 0.03, 0.1, 1.0, 10.0, 100.0)
    imbalances: tuple[Annotated[float, Field(ge=0, le=0.5)], ...] = _TENTHS[:6]
    validation_fraction: ProperFraction = 0.2
    knn: KnnSettings = field(default_factory=KnnSettings)


def paper_sizes(mean_size: float) -> tuple[int, ...]:
    """Return the paper's average sizes, 5, 25, 100 and 250 of 250.

    For clients with another average, the same fractions of it, one image at least.
    """
    scaled = {max(1, round(fraction * mean_size)) for fraction in _PAPER_SIZES}
    return tuple(sorted(scaled))


def memory_settings(model: TrainedModel, options: MemoryOptions) -> MemorySettings:
    """Return the settings of the figures; what is not chosen follows the run.

    Parameters
    ----------
    model
        Its new clients are as many as took no part in training, with the run's α where
        it has one; they choose on as large a part of their images, with the run's k,
        kernel and σ.
    options
        What is chosen.
    """
    partition = model.experiment.partition.settings
    pool = NewcomerPool(model)
    num_clients = options.clients or max(pool.num_clients, 1)
    default = MemorySettings(
        num_clients,
        options.size or paper_sizes(pool.num_known / num_clients),
        alphas=options.alpha,
        num_deals=options.deals,
        knn=knn_settings(model.experiment),
    )
    return replace(
        default,
        alpha=partition.alpha
        if isinstance(partition, DirichletSettings)
        else default.alpha,
        validation_fraction=partition.validation_fraction
        if isinstance(partition, PartitionSettings)
        else default.validation_fraction,
    )

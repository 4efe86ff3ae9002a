"""What the figure of the global model's quality shows."""

from dataclasses import dataclass, field, replace

from knnper.config.ranges import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
)
from knnper.config.sections import Experiment, Settings
from simulation.figures.knn_weight import knn_settings
from simulation.partition.settings import PartitionSettings
from strategies.core.memory import KnnSettings


@dataclass(frozen=True)
class QualitySettings(Settings):
    """Where training is stopped, and who the new clients are.

    Attributes
    ----------
    epochs
        Passes over the central training data after which the model is kept, parts of
        one too; 0 is the model before training.
    alphas
        α of the clients' Dirichlet draws, one line each; the paper's by default.
    num_clients
        M; null is as many as take no part in training.
    num_deals
        How often the images are dealt anew; what points vary by.
    validation_fraction
        Part of its images on which a client chooses its λ.
    knn
        k, kernel, σ, and how a client chooses.
    """

    epochs: tuple[NonNegativeFloat, ...] = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    alphas: tuple[PositiveFloat, ...] = (0.1, 0.3, 1.0)
    num_clients: PositiveInt | None = None
    num_deals: PositiveInt = 3
    validation_fraction: ProperFraction = 0.2
    knn: KnnSettings = field(default_factory=KnnSettings)


def quality_settings(experiment: Experiment) -> QualitySettings:
    """Return the default settings, with those of kNN-Per as the experiment has them."""
    partition = experiment.partition.settings
    default = QualitySettings(knn=knn_settings(experiment))
    if not isinstance(partition, PartitionSettings):
        return default
    return replace(default, validation_fraction=partition.validation_fraction)

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
from simulation.figures.options import QualityOptions
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

    epochs: tuple[NonNegativeFloat, ...] = QualityOptions.epochs
    alphas: tuple[PositiveFloat, ...] = QualityOptions.alpha
    num_clients: PositiveInt | None = QualityOptions.clients
    num_deals: PositiveInt = QualityOptions.deals
    validation_fraction: ProperFraction = 0.2
    knn: KnnSettings = field(default_factory=KnnSettings)


def quality_settings(
    experiment: Experiment, options: QualityOptions
) -> QualitySettings:
    """Return what is chosen, with the experiment's own settings of kNN-Per."""
    partition = experiment.partition.settings
    default = QualitySettings(
        epochs=options.epochs,
        alphas=options.alpha,
        num_clients=options.clients,
        num_deals=options.deals,
        knn=knn_settings(experiment),
    )
    if not isinstance(partition, PartitionSettings):
        return default
    return replace(default, validation_fraction=partition.validation_fraction)

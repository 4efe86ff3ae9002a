"""How a figure's clients use their memory: k, kernel and σ as set."""

from torch import Tensor

from datastore.prediction.interpolation import interpolate
from knnper.config.sections import Experiment
from strategies.core.memory import KnnSettings


def knn_settings(experiment: Experiment) -> KnnSettings:
    """Return the run's own settings of kNN-Per, or the default ones."""
    chosen = experiment.personalization.settings
    return chosen if isinstance(chosen, KnnSettings) else KnnSettings()


def num_correct(
    local: Tensor, global_probabilities: Tensor, labels: Tensor, knn_weight: float
) -> int:
    """Return how many labels (n,) the mixture of two predictions (n, c) gets right."""
    mixed = interpolate(local, global_probabilities, knn_weight)
    return int((mixed.argmax(dim=1) == labels).sum())

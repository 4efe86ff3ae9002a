"""The partition ``dirichlet``, and draws of Dirichlet vectors."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnper.seeding import RandomKey
from knnper.settings import PositiveFloat
from knnper.simulation.partition.allocation import (
    Assignment,
    Integers,
    apportion,
    assign_counts,
    num_labels_of,
)
from knnper.simulation.partition.settings import CountedSettings

# Keeps logarithms finite, so that none of their differences is NaN.
_LARGEST_DROP = 1e300


def draw_log_dirichlet(
    concentration: float, shape: tuple[int, ...], generator: np.random.Generator
) -> NDArray[np.float64]:
    """Draw symmetric Dirichlet vectors along the last axis, as unnormalised logarithms.

    A Dirichlet vector is a vector of Gamma(α) draws divided by its sum. For small α
    these are all 0 in floating point; their logarithms are not: Gamma(α) is
    Gamma(α + 1) * U^(1/α), and -log U is a standard exponential draw.
    """
    # In place: with a million clients each array is large.
    log_weights = generator.standard_gamma(concentration + 1.0, shape)
    np.log(log_weights, out=log_weights)
    drops = generator.standard_exponential(shape)
    # A constant for each vector: its largest weight keeps its digits.
    drops -= drops.min(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        drops /= concentration
    log_weights -= np.minimum(drops, _LARGEST_DROP, out=drops)
    return log_weights


def normalise(log_weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights, which sum to 1 along the last axis."""
    weights: NDArray[np.float64] = log_weights - log_weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


@dataclass(frozen=True, kw_only=True)
class DirichletSettings(CountedSettings):
    """The heterogeneity of the clients.

    Attributes
    ----------
    alpha
        α; a smaller value gives a client fewer labels. 0.1, 0.3 and 1.0 in the paper.
    """

    alpha: PositiveFloat = 0.3


def dirichlet(
    train_labels: Integers,
    test_labels: Integers,
    settings: DirichletSettings,
    key: RandomKey,
) -> Assignment:
    """Allocate a fraction p_{y,m} of the samples of label y to client m.

    For each label y, p_y ~ Dir_M(α); the same p_y serves training and test samples
    (Marfoq et al. 2022, section 5). Where rounding leaves a client without training
    samples of a label, its test samples of that label go to the clients that have some.
    """
    num_labels = num_labels_of(train_labels, test_labels)
    shape = (num_labels, settings.num_clients)
    generator = key.child("weights").numpy()
    weights = normalise(draw_log_dirichlet(settings.alpha, shape, generator))
    totals = np.bincount(train_labels, minlength=num_labels)
    counts = apportion(weights, totals, key.child("round").numpy())
    return assign_counts(train_labels, test_labels, counts, key, weights)

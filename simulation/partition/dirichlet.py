"""Each label spread over the clients by a Dirichlet draw."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnper.experiment import PositiveFloat
from knnper.seeding import RandomKey
from knnper.simulation.partition.assignment import (
    Assignment,
    CountedSettings,
    Integers,
    apportion,
    assignment_of,
    deal,
    deal_test_like_train,
    num_labels_of,
)

_LARGEST_DROP = 1e300


def draw_log_dirichlet(
    concentration: float, shape: tuple[int, ...], generator: np.random.Generator
) -> NDArray[np.float64]:
    """Draw log-weights of symmetric Dirichlet vectors along the last axis.

    Parameters
    ----------
    concentration
        α > 0. Small values put nearly all weight on one entry.
    shape
        Of the result.

    Returns
    -------
    Finite; exp of it is proportional to the Dirichlet vector, see `normalise`.

    Notes
    -----
    A Dirichlet vector is a vector of Gamma(α) draws divided by its sum. For small α
    these are all 0 in floating point; their logarithms are not: Gamma(α) is
    Gamma(α + 1) * U^(1/α), and -log U is a standard exponential draw.
    """
    log_gammas = np.log(generator.standard_gamma(concentration + 1.0, shape))
    exponentials = generator.standard_exponential(shape)
    above_least = exponentials - exponentials.min(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        drops = np.minimum(above_least / concentration, _LARGEST_DROP)
    log_weights: NDArray[np.float64] = log_gammas - drops
    return log_weights


def normalise(log_weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights, which sum to 1 along the last axis."""
    weights = np.exp(log_weights - log_weights.max(axis=-1, keepdims=True))
    normalised: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return normalised


@dataclass(frozen=True, kw_only=True)
class DirichletSettings(CountedSettings):
    """How uneven the clients are.

    Attributes
    ----------
    alpha
        α; the smaller, the fewer labels a client has. 0.1, 0.3 and 1.0 in the paper.
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
    (knn-per.txt, section 5). Where rounding leaves a client without training samples
    of a label, its test samples of that label go to the clients that have some.

    Parameters
    ----------
    train_labels, test_labels
        Shapes (n_train,) and (n_test,).
    """
    num_labels = num_labels_of(train_labels, test_labels)
    shape = (num_labels, settings.num_clients)
    draws = draw_log_dirichlet(settings.alpha, shape, key.child("weights").numpy())
    weights = normalise(draws)
    totals = np.bincount(train_labels, minlength=num_labels)
    counts = apportion(weights, totals, key.child("round").numpy())
    train_owner = deal(train_labels, counts, key.child("train"))
    test_owner = deal_test_like_train(counts, test_labels, key.child("test"), weights)
    return assignment_of(train_owner, test_owner, settings.num_clients)

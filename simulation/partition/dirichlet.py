"""Each label spread over the clients by a Dirichlet draw."""

from dataclasses import dataclass

import numpy as np

from knnper.config.ranges import PositiveFloat
from knnper.config.seeding import RandomKey
from simulation.partition.allocation import (
    apportion,
    deal,
    deal_test_like_train,
    num_labels_of,
)
from simulation.partition.assignment import Assignment, Integers, assignment_of
from simulation.partition.log_dirichlet import draw_log_dirichlet, normalise
from simulation.partition.settings import CountedSettings


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

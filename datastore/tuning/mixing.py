"""The choice of λ alone, for a local hypothesis of any kind."""

from collections.abc import Sequence

import torch
from torch import Tensor

from datastore.tuning.candidates import weights_to_choose_from
from datastore.tuning.scores import CRITERIA
from datastore.tuning.settings import CriterionName


def choose_knn_weight(
    local_probabilities: Tensor,
    global_probabilities: Tensor,
    labels: Tensor,
    knn_weights: Sequence[float],
    criterion: CriterionName = "accuracy",
) -> float:
    """Return the λ that scores best on held-out examples; of equals the smallest.

    Parameters
    ----------
    local_probabilities, global_probabilities
        Of the m held-out examples, float32 of shape (m, c). Without any, all λ are
        equal.
    labels
        Theirs, int64 of shape (m,).
    knn_weights
        The values to choose from; see `weights_to_choose_from`.
    criterion
        A name of `datastore.tuning.scores.CRITERIA`.
    """
    weights = weights_to_choose_from(knn_weights)
    tried = torch.tensor(weights, dtype=torch.float64)
    scores = CRITERIA[criterion](
        local_probabilities, global_probabilities, labels, tried
    )
    # argmax returns the first of several largest.
    return weights[int(scores.argmax())]

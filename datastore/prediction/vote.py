"""From weighted neighbours to a distribution over the labels."""

import torch
from torch import Tensor


def neighbor_vote(log_weights: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return each label's share of the neighbours' weight; rows sum to 1.

    knn-per.txt, Eq. 6, normalised. The weights are taken relative to the largest of
    the row before the exponential, so none is lost at any distance.

    Parameters
    ----------
    log_weights
        Logarithms of the weights, float64 of shape (m, k'), k' at least 1.
    labels
        int64, shape (m, k'), in [0, c).
    num_classes
        c.

    Returns
    -------
    Tensor
        float32, shape (m, c).

    Raises
    ------
    ValueError
        If there are no neighbours: an empty store says nothing about the labels.
    """
    if log_weights.shape[1] == 0:
        raise ValueError(
            "expected at least one neighbour, found none; where the store is empty, "
            "use the global model"
        )
    # A scale near zero may have taken the whole row to -inf.
    finite = log_weights.clamp_min(torch.finfo(log_weights.dtype).min)
    shares = torch.softmax(finite, dim=1)
    votes = torch.zeros((len(shares), num_classes), dtype=shares.dtype)
    return votes.scatter_add_(1, labels, shares).float()

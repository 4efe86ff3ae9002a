"""The mixture of what the neighbours say and what the global model says."""

from torch import Tensor

from datastore.validation import require_probabilities


def interpolate(
    knn_probabilities: Tensor, global_probabilities: Tensor, knn_weight: float
) -> Tensor:
    """Return λ p_kNN + (1 - λ) p_global.

    knn-per.txt, Eq. 7. At λ = 0 and λ = 1 one of the two is returned as it is.

    Parameters
    ----------
    knn_probabilities, global_probabilities
        Shape (n, c), rows summing to 1. Logits are refused.
    knn_weight
        λ, in [0, 1].

    Returns
    -------
    Tensor
        Shape (n, c), rows summing to 1.

    Raises
    ------
    ValueError
        If λ is out of range, the shapes differ, or a row is no distribution.
    """
    if not 0 <= knn_weight <= 1:
        raise ValueError(f"expected a knn_weight in [0, 1], found {knn_weight}")
    require_probabilities("kNN probabilities", knn_probabilities)
    require_probabilities("global probabilities", global_probabilities)
    if knn_probabilities.shape != global_probabilities.shape:
        raise ValueError(
            "expected equal shapes, found kNN probabilities of shape "
            f"{tuple(knn_probabilities.shape)} and global ones of shape "
            f"{tuple(global_probabilities.shape)}"
        )
    return mixed(knn_probabilities, global_probabilities, knn_weight)


def mixed(
    knn_probabilities: Tensor, global_probabilities: Tensor, knn_weight: float
) -> Tensor:
    """Return what `interpolate` does of what is known to be distributions."""
    if knn_weight == 0:
        return global_probabilities
    if knn_weight == 1:
        return knn_probabilities
    return knn_weight * knn_probabilities + (1 - knn_weight) * global_probabilities

"""The choice of λ on a client's validation data."""

from collections.abc import Sequence

from torch import Tensor

from datastore.interpolation import interpolate


def choose_knn_weight(
    knn_probabilities: Tensor,
    global_probabilities: Tensor,
    labels: Tensor,
    grid: Sequence[float],
) -> float:
    """Return the λ of ``grid`` that predicts most validation labels.

    Ties go to the smaller λ, nearer to the global model. Without validation examples
    all λ tie, so the smallest of the grid is returned.

    Parameters
    ----------
    knn_probabilities, global_probabilities
        On the validation examples, shape (n, c).
    labels
        Of the validation examples, int64 of shape (n,).
    grid
        Values of λ in [0, 1], at least one, in any order.

    Raises
    ------
    ValueError
        If the grid is empty, or as `interpolate`.
    """
    if not grid:
        raise ValueError("expected at least one knn_weight to choose from, found none")

    def num_correct(knn_weight: float) -> int:
        mixed = interpolate(knn_probabilities, global_probabilities, knn_weight)
        return int((mixed.argmax(dim=1) == labels).sum())

    # max returns the first of several largest.
    return max(sorted(grid), key=num_correct)

"""The probability simplex."""

import torch
from torch import Tensor


def project_to_simplex(point: Tensor) -> Tensor:
    """Return the point of the simplex that is nearest to ``point``.

    Duchi, Shalev-Shwartz, Singer, Chandra, "Efficient Projections onto the l1-Ball for
    Learning in High Dimensions", ICML 2008, Figure 1.

    Parameters
    ----------
    point
        float64 of shape (n,), n of at least 1.

    Returns
    -------
    Tensor
        float64 of shape (n,), not negative, summing to 1.
    """
    # The same for any shift of all coordinates: large ones would swallow the 1.
    shifted = point - point.max()
    descending = shifted.sort(descending=True).values
    thresholds = (descending.cumsum(0) - 1) / torch.arange(1, len(point) + 1)
    num_positive = int((descending > thresholds).sum())
    return (shifted - thresholds[num_positive - 1]).clamp_min(0)

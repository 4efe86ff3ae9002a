"""A trained ProtoNN: prototypes that vote as stored examples would.

Gupta et al., "ProtoNN: Compressed and Accurate kNN for Resource-scarce Devices",
ICML 2017.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from datastore.validation import require_embeddings

BYTES_PER_NUMBER, BYTES_PER_INDEX = 4, 4


@dataclass(frozen=True, eq=False)
class ProtoNN:
    """Label scores ρ(x) = Σ_j z_j exp(-γ² |b_j - W x|²), as shares of their sum.

    Gupta et al. 2017, Eq. 1. A negative score counts as none.

    Attributes
    ----------
    projection
        W, float32 of shape (d̂, p).
    prototypes
        B, float32 of shape (m, d̂): the paper's, transposed.
    label_scores
        Z, float32 of shape (m, c): the paper's, transposed.
    inverse_width
        γ, positive.
    """

    projection: Tensor
    prototypes: Tensor
    label_scores: Tensor
    inverse_width: float

    @property
    def num_stored(self) -> int:
        """m, the number of prototypes."""
        return int(self.prototypes.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes that W, B and Z take; the sparse form where that is the smaller."""
        return sum(
            map(_num_bytes, (self.projection, self.prototypes, self.label_scores))
        )

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, c), for representations (n, p).

        Where no label has a positive score, all have the same share.

        Raises
        ------
        ValueError
            If there are no prototypes.
        DataError
            If a representation is not finite or p is another.
        """
        if self.num_stored == 0:
            raise ValueError(
                "expected at least one prototype, found none; where there are no "
                "examples, use the global model"
            )
        require_embeddings("queries", embeddings, self.projection.shape[1])
        projected = functional.linear(embeddings, self.projection)
        log_kernel = log_similarity(projected, self.prototypes, self.inverse_width)
        # A factor common to a row does not change shares: none is lost far away.
        nearest = log_kernel.max(dim=1, keepdim=True).values
        return shares((log_kernel - nearest).exp() @ self.label_scores)


def log_similarity(
    projected: Tensor, prototypes: Tensor, inverse_width: float
) -> Tensor:
    """Return -γ² |b_j - W x|², shape (n, m).

    Parameters
    ----------
    projected
        W x, shape (n, d̂).
    prototypes
        B, shape (m, d̂).
    inverse_width
        γ.
    """
    # |b - y|² expanded: a matrix product instead of n m d̂ differences.
    inner = projected @ prototypes.T
    squared = projected.square().sum(dim=1, keepdim=True) - 2 * inner
    squared = squared + prototypes.square().sum(dim=1)
    return -(inverse_width**2) * squared.clamp_min(0)


def shares(scores: Tensor) -> Tensor:
    """Return each label's share of the positive scores, shape (n, c)."""
    positive = scores.clamp_min(0)
    total = positive.sum(dim=1, keepdim=True)
    even = torch.full_like(positive, 1 / scores.shape[1])
    return torch.where(total > 0, positive / total.where(total > 0, 1.0), even)


def _num_bytes(tensor: Tensor) -> int:
    dense = tensor.numel() * BYTES_PER_NUMBER
    sparse = int(tensor.count_nonzero()) * (BYTES_PER_NUMBER + BYTES_PER_INDEX)
    return min(dense, sparse)

"""How much a neighbour counts, given its distance: log-weights."""

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

KernelName = Literal["paper", "squared"]

Kernel = Callable[[Tensor, float, int], Tensor]
"""``(squared_distances (m, k), kernel_scale, embedding_dim) -> log-weights (m, k)``."""


def paper_kernel(
    squared_distances: Tensor,
    kernel_scale: float,
    embedding_dim: int,  # noqa: ARG001 (all kernels have one signature)
) -> Tensor:
    """Return -d/σ with the Euclidean distance d.

    knn-per.txt, Eq. 6, with the scale σ of Appendix B.

    Parameters
    ----------
    squared_distances
        d², shape (m, k).
    kernel_scale
        σ, positive.
    embedding_dim
        p; not used.
    """
    return -squared_distances.sqrt() / kernel_scale


def squared_kernel(
    squared_distances: Tensor, kernel_scale: float, embedding_dim: int
) -> Tensor:
    """Return -d²/(p σ), as the paper's public reference implementation weighs.

    Parameters
    ----------
    squared_distances
        d², shape (m, k).
    kernel_scale
        σ, positive.
    embedding_dim
        p, the size of a representation.
    """
    return -squared_distances / (embedding_dim * kernel_scale)


KERNELS: Mapping[KernelName, Kernel] = {
    "paper": paper_kernel,
    "squared": squared_kernel,
}

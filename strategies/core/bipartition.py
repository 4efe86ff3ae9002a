"""The optimal bipartition of a set by the similarities of its members.

Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed
Multi-Task Optimization under Privacy Constraints", 2019, Algorithm 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.core.denominators import denominator

# What is held in float64 at once, of each vector.
_SLICE = 2**13


@dataclass(frozen=True)
class Bipartition:
    """Two parts of a set.

    Attributes
    ----------
    first, second
        Positions of the members of each, neither of them empty; the member at 0 is in
        the first.
    cross_similarity
        α_cross, the largest similarity of two members in different parts.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    cross_similarity: float


def cosines(vectors: Tensor) -> Tensor:
    """Return the cosines of all pairs of vectors, float64 of shape (n, n).

    Those of parallel vectors are 1 but for the rounding of float64. With a vector of 0
    they are 0.

    Parameters
    ----------
    vectors
        float32, shape (n, d).
    """
    products = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for part in torch.split(vectors, _SLICE, dim=1):
        exact = part.double()
        products.addmm_(exact, exact.T)
    norms = products.diagonal().sqrt()
    return products / denominator(torch.outer(norms, norms))


def bipartition(similarities: Tensor) -> Bipartition:
    """Return the two parts whose largest cross similarity is the smallest possible.

    The paper merges the most similar members until two parts are left. Here a part
    grows from the first member, always by the one that is most similar to any in it,
    and the order is cut where that similarity was smallest. Whatever two parts are
    made, growing crosses from one to the other in some step, by their largest cross
    similarity at most; the cut has the smallest of all steps, so none is better.

    Parameters
    ----------
    similarities
        α, symmetric, shape (n, n) with n of at least 2.

    Raises
    ------
    ValueError
        If there are fewer than two members.
    """
    num_members = len(similarities)
    if num_members < 2:
        raise ValueError(f"expected at least 2 members to part, found {num_members}")
    order, gains = [0], []
    closeness = similarities[0].clone()
    for _ in range(num_members - 1):
        closeness[order[-1]] = -torch.inf
        gain, nearest = closeness.max(dim=0)
        order.append(int(nearest))
        gains.append(float(gain))
        taken = closeness == -torch.inf
        closeness = torch.maximum(closeness, similarities[int(nearest)])
        closeness[taken] = -torch.inf
    cut = gains.index(min(gains)) + 1
    return Bipartition(tuple(order[:cut]), tuple(order[cut:]), gains[cut - 1])

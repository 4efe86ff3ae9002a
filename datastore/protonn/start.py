"""Where the training of a ProtoNN starts: projection, prototypes, γ."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from knnper.config.seeding import RandomKey

_KMEANS_STEPS = 10


def initial_projection(
    embedding_dim: int, wanted: int | None, rng: RandomKey
) -> Tensor:
    """Return W, shape (d̂, p): the identity where d̂ = p, else random.

    Gaussian entries as in Gupta et al. 2017, section 4, of variance 1/d̂, which keeps
    distances about what they were.

    Parameters
    ----------
    embedding_dim
        p.
    wanted
        d̂; None, p or more is p.
    rng
        Fixes the entries.
    """
    if wanted is None or wanted >= embedding_dim:
        return torch.eye(embedding_dim)
    entries = rng.numpy().standard_normal((wanted, embedding_dim))
    return torch.from_numpy(entries / math.sqrt(wanted)).float()


def prototypes_per_label(labels: Tensor, num_classes: int, capacity: float) -> Tensor:
    """Return how many prototypes each label has, int64 of shape (c,).

    About ``capacity`` of its examples, rounded so that the whole is too, and at least
    one of a label that has examples.
    """
    counts = torch.bincount(labels, minlength=num_classes)
    # Half-up rounding of the running sum gives what the whole rounds to.
    ends = (counts.cumsum(0).double() * capacity + 0.5).floor().long()
    rounded = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64))
    return torch.maximum(rounded, (counts > 0).long()).minimum(counts)


def initial_prototypes(
    projected: Tensor, labels: Tensor, num_each: Tensor, rng: RandomKey
) -> tuple[Tensor, Tensor]:
    """Return B, shape (m, d̂), and Z, one-hot of shape (m, c): k-means by label.

    Parameters
    ----------
    projected
        W x, shape (n, d̂).
    labels
        int64, shape (n,).
    num_each
        Prototypes of each label, shape (c,), none above its number of examples.
    rng
        Fixes from which examples k-means starts.
    """
    prototypes = [
        _kmeans(projected[labels == label], count, rng.child(label))
        for label, count in enumerate(num_each.tolist())
    ]
    owners = torch.repeat_interleave(torch.arange(len(num_each)), num_each)
    one_hot = functional.one_hot(owners, len(num_each)).float()
    return torch.cat(prototypes), one_hot


def inverse_width(projected: Tensor, prototypes: Tensor, kernel_width: float) -> float:
    """Return γ = ``kernel_width`` / median distance between the two; 1 if all is one.

    Distances of 0, of a prototype that is an example, are left out.

    Parameters
    ----------
    projected
        W x, shape (n, d̂).
    prototypes
        B, shape (m, d̂).
    kernel_width
        The numerator.
    """
    distances = torch.cdist(projected.double(), prototypes.double())
    apart = distances[distances > 0]
    return kernel_width / float(apart.median()) if len(apart) else 1.0


def _kmeans(points: Tensor, count: int, rng: RandomKey) -> Tensor:
    """Return ``count`` centres (count, d̂) of points (n, d̂): Lloyd's iterations."""
    order = torch.from_numpy(rng.numpy().permutation(len(points)))
    centres = points[order[:count]]
    if count in (0, len(points)):
        return centres
    for _ in range(_KMEANS_STEPS):
        nearest = torch.cdist(points, centres).argmin(dim=1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        sizes = torch.bincount(nearest, minlength=count)[:, None]
        centres = torch.where(sizes > 0, sums / sizes.clamp_min(1), centres)
    return centres

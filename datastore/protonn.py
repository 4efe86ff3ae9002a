"""ProtoNN: trained prototypes that vote in place of stored examples.

Gupta et al., "ProtoNN: Compressed and Accurate kNN for Resource-scarce Devices",
ICML 2017. A projection W, prototypes B and their label scores Z are trained together by
`fit_protonn`. Departures from the paper: Adam on all examples in place of accelerated
alternating SGD, as in later official implementations, and by default the cross-entropy
loss. γ keeps its initial value.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from knnper.datastore.examples import (
    Neighbors,
    no_contents,
    require_embeddings,
    require_labels,
)
from knnper.datastore.prediction import Vote
from knnper.seeding import RandomKey
from knnper.settings import (
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Settings,
)

BYTES_PER_NUMBER, BYTES_PER_INDEX = 4, 4
_KMEANS_STEPS = 10
_SMALLEST_SHARE = 1e-6
LossName = Literal["squared", "cross_entropy"]
Loss = Callable[[Tensor, Tensor], Tensor]
"""``(scores (n, c), labels (n,)) -> ()``."""


@dataclass(frozen=True, eq=False)
class ProtoNN:
    """Label scores ρ(x) = Σ_j z_j exp(-γ² |b_j - W x|²), normalised to sum to 1.

    Gupta et al. 2017, Eq. 1. Negative scores count as 0.
    """

    projection: Tensor  # W, float32 of shape (d̂, p)
    prototypes: Tensor  # B, float32 of shape (m, d̂), transposed from the paper
    label_scores: Tensor  # Z, float32 of shape (m, c), transposed from the paper
    inverse_width: float  # γ, positive

    @property
    def num_stored(self) -> int:
        """m, the number of prototypes."""
        return int(self.prototypes.shape[0])

    @property
    def num_bytes(self) -> int:
        """The size of W, B and Z in bytes, each in dense or sparse form if smaller."""
        parts = self.projection, self.prototypes, self.label_scores
        both = BYTES_PER_NUMBER + BYTES_PER_INDEX
        return sum(
            min(part.numel() * BYTES_PER_NUMBER, int(part.count_nonzero()) * both)
            for part in parts
        )

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, c), for representations (n, p).

        They are uniform if no label has a positive score.
        """
        if self.num_stored == 0:
            raise ValueError(
                "expected at least one prototype, found none; where there are no "
                "examples, use the global model"
            )
        require_embeddings("queries", embeddings, self.projection.shape[1])
        projected = functional.linear(embeddings, self.projection)
        log_kernel = log_similarity(projected, self.prototypes, self.inverse_width)
        # A common factor of a row cancels in the shares, and prevents underflow.
        nearest = log_kernel.max(dim=1, keepdim=True).values
        return shares((log_kernel - nearest).exp() @ self.label_scores)

    def vote(self, embeddings: Tensor) -> Vote:
        """Return the probabilities only, since prototypes are no stored examples."""
        none = torch.empty((len(embeddings), 0), dtype=torch.float64)
        return Vote(
            self(embeddings) if self.num_stored else None,
            Neighbors(none, none.long(), none.long(), no_contents()),
            none,
            self.num_stored,
        )


def log_similarity(
    projected: Tensor, prototypes: Tensor, inverse_width: float
) -> Tensor:
    """Return -γ² |b_j - W x|², shape (n, m)."""
    # |b - y|² expanded, so that a matrix product replaces n m d̂ differences.
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


@dataclass(frozen=True)
class ProtoNNSettings(Settings):
    """Size and training of a ProtoNN.

    Attributes
    ----------
    capacity
        m/n, the number of prototypes as a fraction of the examples, (0, 1]; 0.1 to 1 in
        Marfoq et al. 2022, Figure 11. Every label with examples has at least one.
    projection_dim
        d̂; 100 to 1280 of p = 1280 in the paper. Null, or p and more, is p.
    kernel_width
        γ times the median distance between prototypes and projected examples; useful
        from 0.4 to 2.5. 2.5 in ProtoNN's first implementation, 0.4 in later versions. A
        larger width gives the nearest prototype more weight.
    loss
        ``cross_entropy``: the negative logarithm of the label's share. ``squared``:
        the squared error of the scores, as in Gupta et al. 2017.
    num_steps
        Steps of Adam, each on all examples; useful from 10 to 100. 0 keeps the
        prototypes of k-means.
    learning_rate
        Learning rate of Adam, relative to the root mean square of W, B or Z; useful
        from 0.001 to 0.1.
    fraction_nonzero
        The fraction of non-zero entries in each of W, B and Z, (0, 1]; the smallest
        entries are set to 0 after each step.
    """

    capacity: PositiveFraction = 1 / 3
    projection_dim: PositiveInt | None = None
    kernel_width: PositiveFloat = 1.5
    loss: LossName = "cross_entropy"
    num_steps: NonNegativeInt = 30
    learning_rate: PositiveFloat = 0.005
    fraction_nonzero: PositiveFraction = 1.0


def initial_projection(
    embedding_dim: int, projection_dim: int | None, rng: RandomKey
) -> Tensor:
    """Return the initial W, shape (d̂, p): the identity if d̂ = p, else random.

    Entries are Gaussian, as in Gupta et al. 2017, section 4, with variance 1/d̂, which
    approximately preserves distances.
    """
    if projection_dim is None or projection_dim >= embedding_dim:
        return torch.eye(embedding_dim)
    entries = rng.numpy().standard_normal((projection_dim, embedding_dim))
    return torch.from_numpy(entries / math.sqrt(projection_dim)).float()


def prototypes_per_label(labels: Tensor, num_classes: int, capacity: float) -> Tensor:
    """Return the number of prototypes of each label, int64 of shape (c,).

    About ``capacity`` times its examples, rounded so that the sum is rounded correctly
    too, and at least one for a label with examples.
    """
    counts = torch.bincount(labels, minlength=num_classes)
    # Differences of the rounded running sums add up to the rounded total.
    ends = (counts.cumsum(0).double() * capacity + 0.5).floor().long()
    rounded = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64))
    return torch.maximum(rounded, (counts > 0).long()).minimum(counts)


def initial_prototypes(
    projected: Tensor, labels: Tensor, num_each: Tensor, rng: RandomKey
) -> tuple[Tensor, Tensor]:
    """Return B, (m, d̂), by k-means for each label, and Z, one-hot, (m, c)."""
    prototypes = [
        _kmeans(projected[labels == label], count, rng.child(label))
        for label, count in enumerate(num_each.tolist())
    ]
    owners = torch.repeat_interleave(torch.arange(len(num_each)), num_each)
    one_hot = functional.one_hot(owners, len(num_each)).float()
    return torch.cat(prototypes), one_hot


def inverse_width(projected: Tensor, prototypes: Tensor, kernel_width: float) -> float:
    """Return γ = ``kernel_width`` / the median distance between the two.

    Distances of 0, of prototypes that are examples, are excluded; γ is 1 if all are 0.
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


def squared_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean squared error of scores (n, c) against one-hot labels (n,)."""
    one_hot = functional.one_hot(labels, scores.shape[1]).to(scores.dtype)
    return functional.mse_loss(scores, one_hot)


def cross_entropy_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of -log of the label's share, for scores (n, c), labels (n,)."""
    of_label = shares(scores).gather(1, labels[:, None])
    return -of_label.clamp_min(_SMALLEST_SHARE).log().mean()


LOSSES: Mapping[LossName, Loss] = {
    "squared": squared_loss,
    "cross_entropy": cross_entropy_loss,
}


def fit_protonn(
    embeddings: Tensor,
    labels: Tensor,
    num_classes: int,
    settings: ProtoNNSettings,
    rng: RandomKey,
) -> ProtoNN:
    """Fit a ProtoNN to a client's examples: W, B and Z trained together.

    Gupta et al. 2017, Algorithm 1; see the module for departures. Without examples
    there are no prototypes. Only the start is random, by ``rng``.
    """
    require_embeddings("embeddings to fit", embeddings)
    require_labels(labels, len(embeddings), num_classes)
    dim = embeddings.shape[1]
    projection = initial_projection(
        dim, settings.projection_dim, rng.child("projection")
    )
    projected = functional.linear(embeddings, projection)
    num_each = prototypes_per_label(labels, num_classes, settings.capacity)
    prototypes, label_scores = initial_prototypes(
        projected, labels, num_each, rng.child("prototypes")
    )
    width = inverse_width(projected, prototypes, settings.kernel_width)
    start = ProtoNN(projection, prototypes, label_scores, width)
    if len(labels) == 0 or settings.num_steps == 0:
        return start
    return _trained(start, embeddings, labels, settings)


def _trained(
    start: ProtoNN, embeddings: Tensor, labels: Tensor, settings: ProtoNNSettings
) -> ProtoNN:
    # The gradient of W lies in the span of the examples, so W is trained in that
    # subspace only: most clients have far fewer examples than p. Sparsity needs all
    # entries of W.
    if settings.fraction_nonzero < 1 or len(embeddings) >= embeddings.shape[1]:
        return _descended(start, embeddings, labels, settings)
    basis = torch.linalg.qr(embeddings.T).Q
    within = replace(start, projection=start.projection @ basis)
    trained = _descended(within, embeddings @ basis, labels, settings)
    change = (trained.projection - within.projection) @ basis.T
    return replace(trained, projection=start.projection + change)


def _descended(
    start: ProtoNN, embeddings: Tensor, labels: Tensor, settings: ProtoNNSettings
) -> ProtoNN:
    """Return the model after ``num_steps`` steps of Adam."""
    parts = [
        part.clone().requires_grad_()
        for part in (start.projection, start.prototypes, start.label_scores)
    ]
    # The size of Adam's step does not depend on the size of the parameters, so each
    # part has its own learning rate, in proportion to its root mean square (1 if 0).
    sizes = [float(part.detach().square().mean().sqrt()) or 1.0 for part in parts]
    groups = [
        {"params": [part], "lr": settings.learning_rate * size}
        for part, size in zip(parts, sizes, strict=True)
    ]
    optimizer = torch.optim.Adam(groups)
    for _ in range(settings.num_steps):
        optimizer.zero_grad()
        projected = functional.linear(embeddings, parts[0])
        kernel = log_similarity(projected, parts[1], start.inverse_width).exp()
        loss = LOSSES[settings.loss](kernel @ parts[2], labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for part in parts:
            _keep_largest(part, settings.fraction_nonzero)
    projection, prototypes, label_scores = (part.detach() for part in parts)
    return ProtoNN(projection, prototypes, label_scores, start.inverse_width)


@torch.no_grad()
def _keep_largest(part: Tensor, fraction: float) -> None:
    """Set all but ``fraction`` of the numbers, those of largest size, to 0."""
    num_dropped = part.numel() - math.ceil(fraction * part.numel())
    if num_dropped > 0:
        flat = part.view(-1)
        flat[flat.abs().argsort(stable=True)[:num_dropped]] = 0.0

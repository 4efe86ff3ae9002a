"""ProtoNN: prototypes, trained to vote as stored examples would.

Gupta et al., "ProtoNN: Compressed and Accurate kNN for Resource-scarce Devices",
ICML 2017.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from knnper.datastore.examples import Neighbors, require_embeddings, require_labels
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


@dataclass(frozen=True, eq=False)
class ProtoNN:
    """Label scores ρ(x) = Σ_j z_j exp(-γ² |b_j - W x|²), as shares of their sum.

    Gupta et al. 2017, Eq. 1. A negative score counts as none.
    """

    projection: Tensor  # W, float32 of shape (d̂, p)
    prototypes: Tensor  # B, float32 of shape (m, d̂): the paper's, transposed
    label_scores: Tensor  # Z, float32 of shape (m, c): the paper's, transposed
    inverse_width: float  # γ, positive

    @property
    def num_stored(self) -> int:
        """m, the number of prototypes."""
        return int(self.prototypes.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes that W, B and Z take; the sparse form where that is the smaller."""
        parts = self.projection, self.prototypes, self.label_scores
        both = BYTES_PER_NUMBER + BYTES_PER_INDEX
        return sum(
            min(part.numel() * BYTES_PER_NUMBER, int(part.count_nonzero()) * both)
            for part in parts
        )

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, c), for representations (n, p).

        Where no label has a positive score, all have the same share.
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

    def vote(self, embeddings: Tensor) -> Vote:
        """Return the probabilities alone: prototypes are no neighbours with a name."""
        none = torch.empty((len(embeddings), 0), dtype=torch.float64)
        return Vote(
            self(embeddings) if self.num_stored else None,
            Neighbors(none, none.long(), none.long()),
            none,
            (),
            torch.zeros((1, self.label_scores.shape[1]), dtype=torch.int64),
            self.num_stored,
        )


def log_similarity(
    projected: Tensor, prototypes: Tensor, inverse_width: float
) -> Tensor:
    """Return -γ² |b_j - W x|², shape (n, m)."""
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


LossName = Literal["squared", "cross_entropy"]


@dataclass(frozen=True)
class ProtoNNSettings(Settings):
    """Size and training of a ProtoNN.

    Attributes
    ----------
    capacity
        m/n, prototypes as a fraction of the examples, (0, 1]; 0.1 to 1 in Marfoq et al.
        2022, Figure 11. Every label that has examples keeps one prototype at least.
    projection_dim
        d̂, 100 to 1280 of p = 1280 in the paper; null or p and more is p.
    kernel_width
        γ is this by the median distance of prototypes and projected examples. 2.5 in
        ProtoNN's first implementation, 0.4 in later ones; the larger, the more the
        nearest prototype counts.
    loss
        ``cross_entropy``: the negative logarithm of the label's share. ``squared``:
        the squared error of the scores, as in Gupta et al. 2017.
    num_steps
        Steps of Adam, each on all examples; 0 leaves the prototypes where k-means puts
        them.
    learning_rate
        Of Adam, relative to the typical size of what it moves; 0.001 to 0.1.
    fraction_nonzero
        Part of the entries of each of W, B and Z that is kept, (0, 1]; the smallest
        are set to 0 after each step.
    """

    capacity: PositiveFraction = 1 / 3
    projection_dim: PositiveInt | None = None
    kernel_width: PositiveFloat = 1.5
    loss: LossName = "cross_entropy"
    num_steps: NonNegativeInt = 30
    learning_rate: PositiveFloat = 0.005
    fraction_nonzero: PositiveFraction = 1.0


_KMEANS_STEPS = 10


def initial_projection(
    embedding_dim: int, projection_dim: int | None, rng: RandomKey
) -> Tensor:
    """Return W, shape (d̂, p): the identity where d̂ = p, else random.

    Gaussian entries as in Gupta et al. 2017, section 4, of variance 1/d̂, which keeps
    distances about what they were.
    """
    if projection_dim is None or projection_dim >= embedding_dim:
        return torch.eye(embedding_dim)
    entries = rng.numpy().standard_normal((projection_dim, embedding_dim))
    return torch.from_numpy(entries / math.sqrt(projection_dim)).float()


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
    """Return B, shape (m, d̂), and Z, one-hot of shape (m, c): k-means by label."""
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


_SMALLEST_SHARE = 1e-6
Loss = Callable[[Tensor, Tensor], Tensor]
"""``(scores (n, c), labels (n,)) -> ()``."""


def squared_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean squared error of scores (n, c) against one-hot labels (n,)."""
    one_hot = functional.one_hot(labels, scores.shape[1]).to(scores.dtype)
    return functional.mse_loss(scores, one_hot)


def cross_entropy_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of -log share of the label (n,), by scores (n, c)."""
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
    """Return a ProtoNN of a client's examples: W, B and Z trained together.

    Gupta et al. 2017, Algorithm 1, with Adam on all examples in place of accelerated
    alternating SGD, as in later official implementations. γ stays what it starts from.
    Without embeddings (n, p) there are no prototypes. ``rng`` fixes the start; nothing
    else is random.
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
    # The gradient of W lies in the span of the examples, so W is moved in there alone:
    # most clients have far fewer examples than p. Zeros need the whole of W.
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
    """Return the model after ``num_steps`` of Adam."""
    parts = [
        part.clone().requires_grad_()
        for part in (start.projection, start.prototypes, start.label_scores)
    ]
    # Adam's step does not know how large numbers are: each part has its own scale, the
    # root mean square of its numbers, or 1 if all are 0.
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

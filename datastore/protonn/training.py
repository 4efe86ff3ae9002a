"""The training of a ProtoNN on a client's examples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from datastore.protonn.model import ProtoNN, log_similarity, shares
from datastore.protonn.settings import LossName, ProtoNNSettings
from datastore.protonn.start import (
    initial_projection,
    initial_prototypes,
    inverse_width,
    prototypes_per_label,
)
from datastore.validation import require_embeddings, require_labels
from knnper.config.seeding import RandomKey

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

    Parameters
    ----------
    embeddings
        float32, shape (n, p). Without any the result has no prototypes.
    labels
        int64, shape (n,), in [0, c).
    num_classes
        c.
    settings
        Its size and training.
    rng
        Fixes the start; nothing else is random.

    Raises
    ------
    DataError
        If an embedding is not finite, a label is out of range, or lengths differ.
    """
    require_embeddings("embeddings to fit", embeddings)
    require_labels(labels, len(embeddings), num_classes)
    start = _start(embeddings, labels, num_classes, settings, rng)
    if len(labels) == 0 or settings.num_steps == 0:
        return start
    return _trained(start, embeddings, labels, settings)


def training_loss(
    model: ProtoNN, embeddings: Tensor, labels: Tensor, loss: LossName
) -> float:
    """Return what training lowers, on embeddings (n, p) and labels (n,)."""
    parts = (model.projection, model.prototypes, model.label_scores)
    return float(LOSSES[loss](_scores(parts, embeddings, model.inverse_width), labels))


def _start(
    embeddings: Tensor,
    labels: Tensor,
    num_classes: int,
    settings: ProtoNNSettings,
    rng: RandomKey,
) -> ProtoNN:
    projection = initial_projection(
        embeddings.shape[1], settings.projection_dim, rng.child("projection")
    )
    projected = functional.linear(embeddings, projection)
    num_each = prototypes_per_label(labels, num_classes, settings.capacity)
    prototypes, label_scores = initial_prototypes(
        projected, labels, num_each, rng.child("prototypes")
    )
    width = inverse_width(projected, prototypes, settings.kernel_width)
    return ProtoNN(projection, prototypes, label_scores, width)


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
    # Adam's step does not know how large numbers are: each part has its own scale.
    groups = [
        {"params": [part], "lr": settings.learning_rate * _typical_size(part)}
        for part in parts
    ]
    optimizer = torch.optim.Adam(groups)
    for _ in range(settings.num_steps):
        optimizer.zero_grad()
        scores = _scores(parts, embeddings, start.inverse_width)
        loss = LOSSES[settings.loss](scores, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for part in parts:
            _keep_largest(part, settings.fraction_nonzero)
    projection, prototypes, label_scores = (part.detach() for part in parts)
    return ProtoNN(projection, prototypes, label_scores, start.inverse_width)


def _scores(
    parts: Sequence[Tensor], embeddings: Tensor, inverse_width: float
) -> Tensor:
    """Return the scores (n, c) of W, B and Z for embeddings (n, p)."""
    projection, prototypes, label_scores = parts
    projected = functional.linear(embeddings, projection)
    kernel = log_similarity(projected, prototypes, inverse_width).exp()
    return kernel @ label_scores


def _typical_size(part: Tensor) -> float:
    """Return the root mean square of a part's numbers; 1 if all are 0."""
    return float(part.detach().square().mean().sqrt()) or 1.0


@torch.no_grad()
def _keep_largest(part: Tensor, fraction: float) -> None:
    """Set all but ``fraction`` of the numbers, those of largest size, to 0."""
    num_dropped = part.numel() - math.ceil(fraction * part.numel())
    if num_dropped > 0:
        flat = part.view(-1)
        flat[flat.abs().argsort(stable=True)[:num_dropped]] = 0.0

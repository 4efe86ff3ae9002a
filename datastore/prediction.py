"""kNN-Per's prediction: the vote of the nearest stored examples, mixed with the model.

`KnnPredictor` is λ p_kNN + (1 - λ) p_global (Marfoq et al. 2022, Eq. 6 and 7). Before
the mixture, p_global may be adapted to the client's own class frequencies; see
`knnper.datastore.class_prior`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from knnper.datastore.class_prior import (
    ClassPrior,
    adapt_probabilities,
    count_labels,
)
from knnper.datastore.examples import Neighbors, require_probabilities
from knnper.datastore.store import StoreReader

Apply = Callable[[Tensor], Tensor]
"""φ, from inputs (n, ...) to (n, p), or the head, from (n, p) to (n, c)."""

KernelName = Literal["paper", "squared"]
Kernel = Callable[[Tensor, float, int], Tensor]
"""From d² (m, k), the scale and p, the size of an embedding, to log-weights (m, k)."""


def paper_kernel(squared_distances: Tensor, kernel_scale: float, _: int) -> Tensor:
    """Return -d/σ with the Euclidean distance d (Marfoq et al. 2022, Eq. 6).

    The scale σ is that of Appendix B.
    """
    return -squared_distances.sqrt() / kernel_scale


def squared_kernel(
    squared_distances: Tensor, kernel_scale: float, embedding_dim: int
) -> Tensor:
    """Return -d²/(p σ), the kernel of the paper's public reference implementation."""
    return -squared_distances / (embedding_dim * kernel_scale)


KERNELS: Mapping[KernelName, Kernel] = {
    "paper": paper_kernel,
    "squared": squared_kernel,
}


@dataclass(frozen=True, eq=False)
class Vote:
    """The vote of a client's memory on n inputs; k' neighbours of each, c classes."""

    probabilities: Tensor | None  # p_kNN, float32 (n, c); None if the store is empty
    neighbors: Neighbors  # shape (n, k'), from one search; empty for prototypes
    weights: Tensor  # each neighbour's share of the vote, float64 of shape (n, k')
    num_stored: int  # stored examples or prototypes


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predictions for n inputs, with all parts that they are made of."""

    probabilities: Tensor  # λ p_kNN + (1 - λ) p_global, float32 of shape (n, c)
    global_probabilities: Tensor  # p_global, float32 of shape (n, c)
    # p_global adapted by the class prior, which replaces p_global in the mixture; None
    # without a class prior.
    adapted_probabilities: Tensor | None
    knn_weight: float  # the λ used: 0 if the store is empty
    vote: Vote  # p_kNN and the neighbours that it comes from

    @property
    def labels(self) -> Tensor:
        """The most probable class, int64 of shape (n,)."""
        return self.probabilities.argmax(dim=1)


class LocalClassifier(Protocol):
    """The local part of the mixture of Marfoq et al. 2022, Eq. 7."""

    @property
    def num_stored(self) -> int:
        """Return the number of stored examples or prototypes; 0 gives no vote."""

    def vote(self, embeddings: Tensor) -> Vote:
        """Vote on representations of shape (n, p)."""


def interpolate(
    knn_probabilities: Tensor, global_probabilities: Tensor, knn_weight: float
) -> Tensor:
    """Return λ p_kNN + (1 - λ) p_global, with λ in [0, 1].

    Marfoq et al. 2022, Eq. 7. Both arguments are of shape (n, c), rows summing to 1;
    logits raise a ValueError. At λ = 0 and λ = 1 one argument is returned unchanged.
    """
    if not 0 <= knn_weight <= 1:
        raise ValueError(f"expected a knn_weight in [0, 1], found {knn_weight}")
    require_probabilities("kNN probabilities", knn_probabilities)
    require_probabilities("global probabilities", global_probabilities)
    if knn_probabilities.shape != global_probabilities.shape:
        raise ValueError(
            "expected equal shapes, found kNN probabilities of shape "
            f"{tuple(knn_probabilities.shape)} and global probabilities of shape "
            f"{tuple(global_probabilities.shape)}"
        )
    if knn_weight == 0:
        return global_probabilities
    if knn_weight == 1:
        return knn_probabilities
    return knn_weight * knn_probabilities + (1 - knn_weight) * global_probabilities


@dataclass(frozen=True)
class KnnParameters:
    """The hyper-parameters that a client chose for its memory."""

    knn_weight: float  # λ, in [0, 1]
    num_neighbors: int  # k, at least 1
    kernel_scale: float  # σ, positive
    # Adapts the global model to the client's class frequencies; None leaves it as it
    # was trained.
    class_prior: ClassPrior | None = None


@dataclass(frozen=True)
class KnnPredictor:
    """h_{m,λ} of Marfoq et al. 2022, Eq. 7; the global model if the store is empty.

    The only predictor with a memory: evaluation, figures, sites and service use it.
    """

    # φ: from uint8 images (n, height, width, channels) to float32 (n, p).
    embed: Apply = field(repr=False)
    # From representations (n, p) to the global model's probabilities (n, c).
    head: Apply = field(repr=False)
    neighbors: LocalClassifier = field(repr=False)
    knn_weight: float  # λ, in [0, 1]: 1 is kNN only, 0 is the global model only
    # Adapts the global model to the stored labels; None leaves it as it was trained.
    class_prior: ClassPrior | None = None
    # Further figures on the choice of the hyper-parameters, by name.
    tuning: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, c), for n images; see `explain`.

        Rows sum to 1. Each image is embedded once.
        """
        if self.effective_knn_weight == 0 and self.class_prior is None:
            return self.head(self.embed(images))
        return self.explain(images).probabilities

    def explain(self, images: Tensor) -> Prediction:
        """Return the predictions for n images with all their parts.

        Raises
        ------
        DataError
            If an embedding is not finite.
        StoreMismatchError
            If the store was embedded by another model than the classifier's.
        """
        embeddings = self.embed(images)
        p_global = self.head(embeddings)
        vote = self.neighbors.vote(embeddings)
        p_adapted = None
        if self.class_prior is not None:
            counts = count_labels(vote.neighbors.contents, p_global.shape[1])
            p_adapted = adapt_probabilities(p_global, counts, self.class_prior)
        mixture, knn_weight = p_global if p_adapted is None else p_adapted, 0.0
        if vote.probabilities is not None:
            knn_weight = self.knn_weight
            mixture = interpolate(vote.probabilities, mixture, knn_weight)
        return Prediction(mixture, p_global, p_adapted, knn_weight, vote)

    @property
    def effective_knn_weight(self) -> float:
        """The λ used: 0 if the store is empty."""
        return self.knn_weight if self.neighbors.num_stored else 0.0

    def describe(self) -> Mapping[str, float]:
        """Return the λ used, the number of stored examples, and ``tuning``."""
        return {
            **self.tuning,
            "knn_weight": self.effective_knn_weight,
            "num_stored": float(self.neighbors.num_stored),
        }


def neighbor_vote(log_weights: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return each label's share of the neighbours' weight, float32 of shape (m, c).

    Rows sum to 1. Marfoq et al. 2022, Eq. 6, normalised. The weights are taken relative
    to the largest of the row before the exponential, so that no row underflows to 0,
    however far its neighbours are.

    Parameters
    ----------
    log_weights, labels
        float64 and int64, of shape (m, k') with k' at least 1: an empty store has no
        vote.
    """
    if log_weights.shape[1] == 0:
        raise ValueError(
            "expected at least one neighbour, found none; where the store is empty, "
            "use the global model"
        )
    return _sum_by_label(_vote_shares(log_weights), labels, num_classes)


def _vote_shares(log_weights: Tensor) -> Tensor:
    """Return each neighbour's share of the vote, of shape (m, k'); rows sum to 1."""
    # A kernel scale near zero can turn a whole row into -inf, and softmax into NaN.
    return torch.softmax(
        log_weights.clamp_min(torch.finfo(log_weights.dtype).min), dim=1
    )


def _sum_by_label(shares: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    votes = torch.zeros((len(shares), num_classes), dtype=shares.dtype)
    return votes.scatter_add_(1, labels, shares).float()


@dataclass(frozen=True)
class NeighborClassifier:
    """h^(k) of Marfoq et al. 2022, Eq. 6."""

    store: StoreReader
    num_neighbors: int  # k
    kernel: KernelName
    kernel_scale: float  # σ
    # Of the model that embeds the queries; a store embedded by another model raises
    # StoreMismatchError. None is the model with which the store was opened.
    fingerprint: str | None = None
    # Whether votes carry the owner's names of the neighbours.
    with_names: bool = False

    @property
    def num_stored(self) -> int:
        """n, the number of stored examples."""
        return len(self.store)

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return p_kNN, float32 of shape (n, c); the store must not be empty."""
        votes = self.vote(embeddings).probabilities
        if votes is None:
            raise ValueError("the store is empty: expected at least one neighbour")
        return votes

    def vote(self, embeddings: Tensor) -> Vote:
        """Return p_kNN for representations (n, p), with the neighbours behind it.

        Raises
        ------
        DataError
            If a representation is not finite or p differs from the store's.
        StoreMismatchError
            If the store was embedded by another model.
        """
        neighbors = self.store.search(
            embeddings, self.num_neighbors, self.fingerprint, with_names=self.with_names
        )
        log_weights = KERNELS[self.kernel](
            neighbors.squared_distances, self.kernel_scale, embeddings.shape[1]
        )
        shares = _vote_shares(log_weights)
        probabilities = None
        if shares.shape[1] > 0:
            probabilities = _sum_by_label(
                shares, neighbors.labels, self.store.num_classes
            )
        return Vote(probabilities, neighbors, shares, len(neighbors.contents))


def build_predictor(
    embed: Apply,
    head: Apply,
    store: StoreReader,
    kernel: KernelName,
    parameters: KnnParameters,
    *,
    with_names: bool = False,
    tuning: Mapping[str, float] | None = None,
) -> KnnPredictor:
    """Build the predictor of a model, a store and a client's hyper-parameters."""
    neighbors = NeighborClassifier(
        store,
        parameters.num_neighbors,
        kernel,
        parameters.kernel_scale,
        with_names=with_names,
    )
    return KnnPredictor(
        embed,
        head,
        neighbors,
        parameters.knn_weight,
        parameters.class_prior,
        tuning or {},
    )

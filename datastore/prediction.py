"""The global model with a client's own shares of the classes.

A client sees some classes more often than the federation does. With the shares π that
the global model learned from and the client's own q, Bayes' rule gives

    p(y|x) ∝ p_global(y|x) q(y) / π(y)

(Saerens, Latinne, Decaestecker, "Adjusting the Outputs of a Classifier to New a Priori
Probabilities: A Simple Procedure", Neural Computation 2002, section 2). The client
learns q from its labels: π counts for s examples, and n_y of its n examples are of
class y,

    q(y) = (n_y + s π(y)) / (n + s)

which is the posterior mean under a Dirichlet distribution. Of several s each counts by
how probable it makes the client's labels, so that q stays near π where they look as
everywhere, and follows them where they do not.

The rule holds for a model that is as sure as it is right. One that was trained for a
few rounds is less sure, and q would outvote it; so it may be sharpened, to p_global^β.
This is a temperature of 1/β (Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern
Neural Networks", ICML 2017, section 4.2).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from knnper.datastore.examples import Contents, require_probabilities
from knnper.datastore.store import StoreReader
from knnper.errors import ConfigError, Problem
from knnper.experiment import PositiveFloat, Settings


@dataclass(frozen=True)
class ClassPriorSettings(Settings):
    """How a client's own shares of the classes are learned.

    Attributes
    ----------
    strengths
        s: how many examples π counts for; useful from 1 to 300. Several are weighed by
        the client's labels. With none the global model stays as it is.
    class_shares
        π: how often each class is in what the global model learned from, as shares or
        as counts; none is all alike.
    sharpness
        The values of β that a client chooses from; useful from 1 to 6.
    """

    strengths: tuple[PositiveFloat, ...] = ()
    class_shares: tuple[PositiveFloat, ...] = ()
    sharpness: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (1.0,)


@dataclass(frozen=True)
class ClassPrior:
    """What a client uses.

    Attributes
    ----------
    settings
        How its shares of the classes are learned, of one strength at least.
    sharpness
        β.
    """

    settings: ClassPriorSettings
    sharpness: float = 1.0


def require_class_shares(settings: ClassPriorSettings, num_classes: int) -> None:
    """Refuse shares of other classes than the c of the task.

    Raises
    ------
    ConfigError
        If there are some, and not c.
    """
    found = len(settings.class_shares)
    if found not in (0, num_classes):
        message = (
            f"expected {num_classes} numbers, one for each class, or none for classes "
            f"that are all alike, found {found}"
        )
        raise ConfigError([Problem("class_shares", message)], "the class prior")


@dataclass(frozen=True)
class AdaptedHead:
    """The global model's head, adapted to what a client stores by now.

    Attributes
    ----------
    head
        From representations (n, p) to the global model's probabilities (n, c).
    store
        Its labels are counted anew at each call.
    prior
        How they count.
    """

    head: Callable[[Tensor], Tensor]
    store: StoreReader
    prior: ClassPrior

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, c), for representations (n, p)."""
        counts = count_labels(self.store.contents(), self.store.num_classes)
        return adapted(self.head(embeddings), counts, self.prior)


def count_labels(contents: Contents, num_classes: int) -> Tensor:
    """Return how many stored examples are of each class, int64 of shape (1, c)."""
    labels = torch.from_numpy(contents.labels)
    return torch.bincount(labels, minlength=num_classes)[None]


def adapted(probabilities: Tensor, label_counts: Tensor, prior: ClassPrior) -> Tensor:
    """Return the global model's probabilities to the power β times q/π, normalised.

    Parameters
    ----------
    probabilities
        Float32, shape (n, c), rows summing to 1.
    label_counts
        n_y, int64 of shape (n, c), or (1, c) for all rows. A row without examples
        changes nothing.
    prior
        s, π and β.

    Returns
    -------
    Tensor
        Float32, shape (n, c), rows summing to 1.

    Raises
    ------
    ConfigError
        As `require_class_shares`.
    """
    ratios = class_ratios(label_counts, prior.settings)
    found = reweighted(probabilities, ratios, prior.sharpness)
    return found.where(label_counts.sum(dim=1, keepdim=True) > 0, probabilities)


def reweighted(probabilities: Tensor, ratios: Tensor, sharpness: float) -> Tensor:
    """Return p^β r, normalised: float32 of shape (n, c), rows summing to 1.

    Parameters
    ----------
    probabilities
        p, shape (n, c), rows summing to 1.
    ratios
        r, positive, shape (n, c) or (1, c).
    sharpness
        β.
    """
    largest = probabilities.double().amax(dim=1, keepdim=True)
    # Relative to the largest, of which no power is 0.
    weighted = (probabilities / largest).pow(sharpness) * ratios
    return (weighted / weighted.sum(dim=1, keepdim=True)).float()


def class_ratios(label_counts: Tensor, settings: ClassPriorSettings) -> Tensor:
    """Return q/π, float64 of shape (m, c), for counts n_y of that shape.

    Raises
    ------
    ConfigError
        As `require_class_shares`.
    """
    num_classes = label_counts.shape[1]
    require_class_shares(settings, num_classes)
    given = settings.class_shares or (1.0,) * num_classes
    shares = torch.tensor(given, dtype=torch.float64)
    shares /= shares.sum()
    strengths = torch.tensor(settings.strengths, dtype=torch.float64)[:, None, None]
    counts, expected = label_counts.double(), strengths * shares
    totals = counts.sum(dim=1, keepdim=True)
    own = (counts + expected) / (totals + strengths)
    belief = torch.softmax(_log_evidence(counts, expected), dim=0)
    return (belief[:, :, None] * own).sum(dim=0) / shares


def _log_evidence(counts: Tensor, expected: Tensor) -> Tensor:
    """Return log P(labels | s), shape (s, m): the Dirichlet-multinomial distribution.

    Parameters
    ----------
    counts
        n_y, shape (m, c).
    expected
        s π(y), shape (s, 1, c).
    """
    total, strength = counts.sum(dim=1), expected.sum(dim=2)
    of_classes = torch.lgamma(counts + expected) - torch.lgamma(expected)
    of_total = torch.lgamma(strength) - torch.lgamma(total + strength)
    return of_total + of_classes.sum(dim=2)


class LocalHypothesis(Protocol):
    """The local part of the mixture of knn-per.txt, Eq. 7."""

    @property
    def num_stored(self) -> int:
        """Return the examples, or what stands for them; without any it says nothing."""

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, c), for representations (n, p)."""


def interpolate(
    knn_probabilities: Tensor, global_probabilities: Tensor, knn_weight: float
) -> Tensor:
    """Return λ p_kNN + (1 - λ) p_global.

    knn-per.txt, Eq. 7. At λ = 0 and λ = 1 one of the two is returned as it is.

    Parameters
    ----------
    knn_probabilities, global_probabilities
        Shape (n, c), rows summing to 1. Logits are refused.
    knn_weight
        λ, in [0, 1].

    Returns
    -------
    Tensor
        Shape (n, c), rows summing to 1.

    Raises
    ------
    ValueError
        If λ is out of range, the shapes differ, or a row is no distribution.
    """
    if not 0 <= knn_weight <= 1:
        raise ValueError(f"expected a knn_weight in [0, 1], found {knn_weight}")
    require_probabilities("kNN probabilities", knn_probabilities)
    require_probabilities("global probabilities", global_probabilities)
    if knn_probabilities.shape != global_probabilities.shape:
        raise ValueError(
            "expected equal shapes, found kNN probabilities of shape "
            f"{tuple(knn_probabilities.shape)} and global ones of shape "
            f"{tuple(global_probabilities.shape)}"
        )
    return mixed(knn_probabilities, global_probabilities, knn_weight)


def mixed(
    knn_probabilities: Tensor, global_probabilities: Tensor, knn_weight: float
) -> Tensor:
    """Return what `interpolate` does of what is known to be distributions."""
    if knn_weight == 0:
        return global_probabilities
    if knn_weight == 1:
        return knn_probabilities
    return knn_weight * knn_probabilities + (1 - knn_weight) * global_probabilities


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


@dataclass(frozen=True)
class KnnPredictor:
    """h_{m,λ} of knn-per.txt, Eq. 7. With an empty store it is the global model.

    Attributes
    ----------
    embed
        φ: from uint8 images (n, height, width, channels) to float32 (n, p).
    head
        From representations (n, p) to the global model's probabilities (n, c).
    neighbors
        The local hypothesis.
    knn_weight
        λ, in [0, 1]: 1 is kNN only, 0 is the global model only.
    tuning
        More figures on how it was chosen, by name.
    """

    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    neighbors: LocalHypothesis
    knn_weight: float
    tuning: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, c); rows sum to 1.

        Parameters
        ----------
        images
            uint8, shape (n, height, width, channels). Each is embedded once.

        Raises
        ------
        DataError
            If an embedding is not finite.
        """
        embeddings = self.embed(images)
        global_probabilities = self.head(embeddings)
        if self.effective_knn_weight == 0:
            return global_probabilities
        knn_probabilities = self.neighbors(embeddings)
        return interpolate(knn_probabilities, global_probabilities, self.knn_weight)

    @property
    def effective_knn_weight(self) -> float:
        """λ as it is used: 0 where the store is empty."""
        return self.knn_weight if self.neighbors.num_stored else 0.0

    def describe(self) -> Mapping[str, float]:
        """Return λ as it is used, the number of stored examples, and ``tuning``."""
        return {
            **self.tuning,
            "knn_weight": self.effective_knn_weight,
            "num_stored": float(self.neighbors.num_stored),
        }


def neighbor_vote(log_weights: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return each label's share of the neighbours' weight; rows sum to 1.

    knn-per.txt, Eq. 6, normalised. The weights are taken relative to the largest of
    the row before the exponential, so none is lost at any distance.

    Parameters
    ----------
    log_weights
        Logarithms of the weights, float64 of shape (m, k'), k' at least 1.
    labels
        int64, shape (m, k'), in [0, c).
    num_classes
        c.

    Returns
    -------
    Tensor
        float32, shape (m, c).

    Raises
    ------
    ValueError
        If there are no neighbours: an empty store says nothing about the labels.
    """
    if log_weights.shape[1] == 0:
        raise ValueError(
            "expected at least one neighbour, found none; where the store is empty, "
            "use the global model"
        )
    # A scale near zero may have taken the whole row to -inf.
    finite = log_weights.clamp_min(torch.finfo(log_weights.dtype).min)
    shares = torch.softmax(finite, dim=1)
    votes = torch.zeros((len(shares), num_classes), dtype=shares.dtype)
    return votes.scatter_add_(1, labels, shares).float()


@dataclass(frozen=True)
class NeighborClassifier:
    """h^(k) of knn-per.txt, Eq. 6.

    Attributes
    ----------
    store
        The client's memory.
    num_neighbors
        k.
    kernel
        A name of `KERNELS`.
    kernel_scale
        σ.
    """

    store: StoreReader
    num_neighbors: int
    kernel: KernelName
    kernel_scale: float

    @property
    def num_stored(self) -> int:
        """n, the number of stored examples."""
        return len(self.store)

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return p_kNN, float32 of shape (n, c), for representations (n, p).

        Raises
        ------
        ValueError
            If the store is empty.
        DataError
            If a representation is not finite or p differs from the store's.
        """
        neighbors = self.store.search(embeddings, self.num_neighbors)
        log_weights = KERNELS[self.kernel](
            neighbors.squared_distances, self.kernel_scale, self.store.embedding_dim
        )
        return neighbor_vote(log_weights, neighbors.labels, self.store.num_classes)

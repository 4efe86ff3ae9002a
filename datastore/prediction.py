"""kNN-Per's prediction: the neighbours' vote, mixed with the global model's.

`KnnPredictor` is λ p_kNN + (1 - λ) p_global (Marfoq et al. 2022, Eq. 6 and 7). Before
it is mixed, p_global may be adapted to the client's own shares of the classes.

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

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from knnper.datastore.examples import (
    Contents,
    Ids,
    Neighbors,
    Selection,
    StoreBusyError,
    require_probabilities,
)
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
    """What a client uses."""

    settings: ClassPriorSettings  # of one strength at least
    sharpness: float = 1.0  # β


def require_class_shares(settings: ClassPriorSettings, num_classes: int) -> None:
    """Refuse shares of other classes than the c of the task."""
    if len(settings.class_shares) not in (0, num_classes):
        message = (
            f"expected {num_classes} numbers, one for each class, or none for classes "
            f"that are all alike, found {len(settings.class_shares)}"
        )
        raise ConfigError([Problem("class_shares", message)], "the class prior")


def count_labels(contents: Contents, num_classes: int) -> Tensor:
    """Return how many stored examples are of each class, int64 of shape (1, c)."""
    found = contents.label_counts
    counts = torch.zeros((1, num_classes), dtype=torch.int64)
    counts[0, : len(found)] = torch.from_numpy(found)
    return counts


def adapted(probabilities: Tensor, label_counts: Tensor, prior: ClassPrior) -> Tensor:
    """Return the global model's probabilities (n, c), to the power β times q/π.

    Rows sum to 1. The counts n_y are of shape (n, c), or (1, c) for all rows; a row
    without examples changes nothing.
    """
    ratios = class_ratios(label_counts, prior.settings)
    found = reweighted(probabilities, ratios, prior.sharpness)
    return found.where(label_counts.sum(dim=1, keepdim=True) > 0, probabilities)


def reweighted(probabilities: Tensor, ratios: Tensor, sharpness: float) -> Tensor:
    """Return p^β r, normalised, for p (n, c) and positive r (n, c) or (1, c)."""
    largest = probabilities.double().amax(dim=1, keepdim=True)
    # Relative to the largest, of which no power is 0.
    weighted = (probabilities / largest).pow(sharpness) * ratios
    return (weighted / weighted.sum(dim=1, keepdim=True)).float()


def class_ratios(label_counts: Tensor, settings: ClassPriorSettings) -> Tensor:
    """Return q/π, float64 of shape (m, c), for counts n_y of that shape."""
    num_classes = label_counts.shape[1]
    require_class_shares(settings, num_classes)
    given = settings.class_shares or (1.0,) * num_classes
    shares = torch.tensor(given, dtype=torch.float64)
    shares /= shares.sum()
    strengths = torch.tensor(settings.strengths, dtype=torch.float64)[:, None, None]
    counts, expected = label_counts.double(), strengths * shares
    totals = counts.sum(dim=1, keepdim=True)
    own = (counts + expected) / (totals + strengths)
    # log P(labels | s), shape (s, m): the Dirichlet-multinomial distribution.
    strength = expected.sum(dim=2)
    of_classes = torch.lgamma(counts + expected) - torch.lgamma(expected)
    of_total = torch.lgamma(strength) - torch.lgamma(counts.sum(dim=1) + strength)
    belief = torch.softmax(of_total + of_classes.sum(dim=2), dim=0)
    return (belief[:, :, None] * own).sum(dim=0) / shares


_STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


def label_information(label_counts: Tensor) -> float:
    """Return how much a client's other labels tell of one, in nats an example.

    It is the mean of log q(y)/π(y) over all examples of M clients, with q from the
    client's other examples and π the shares of all clients together: about what the
    class prior can add to a model that is right otherwise, where the inputs of a class
    look the same everywhere. As no example counts for itself, a few that differ by
    chance do not add to it: it is 0 where clients have the same shares.
    ``label_counts``: int64 of shape (M, c).
    """
    totals = label_counts.sum(dim=0)
    given = ClassPriorSettings(_STRENGTHS, tuple(totals.clamp_min(1).tolist()))
    gain = 0.0
    for counts in label_counts:
        present = counts.nonzero()[:, 0]
        own = torch.nn.functional.one_hot(present, len(counts))
        ratios = class_ratios(counts - own, given).gather(1, present[:, None])[:, 0]
        gain += float((counts[present] * ratios.log()).sum())
    return gain / max(int(totals.sum()), 1)


@dataclass(frozen=True, eq=False)
class Vote:
    """What a client's memory says of n inputs, all from one state of it.

    c is the number of classes, k' the number of neighbours that were found.
    """

    probabilities: Tensor | None  # p_kNN, float32 (n, c); None where nothing is stored
    neighbors: Neighbors  # shape (n, k')
    weights: Tensor  # each neighbour's share of the vote, float64 of shape (n, k')
    # The owner's names of the neighbours, n rows of k', where they were asked for; None
    # for one without.
    names: Sequence[Sequence[str | None]]
    label_counts: Tensor  # stored examples of each class, int64 of shape (1, c)
    num_stored: int  # examples in the store, or what stands for them
    fingerprint: str = ""  # of the model that embedded them; empty where it has none


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predictions for n inputs, and all that explains them."""

    probabilities: Tensor  # λ p_kNN + (1 - λ) p_global, float32 of shape (n, c)
    global_probabilities: Tensor  # p_global, float32 of shape (n, c)
    # p_global with the class prior of what is stored, which is mixed in its place; None
    # where there is no class prior.
    adapted_probabilities: Tensor | None
    knn_weight: float  # λ as it was used: 0 with an empty store
    vote: Vote  # p_kNN, and whose it is

    @property
    def labels(self) -> Tensor:
        """The most probable class, int64 of shape (n,)."""
        return self.probabilities.argmax(dim=1)


class LocalHypothesis(Protocol):
    """The local part of the mixture of Marfoq et al. 2022, Eq. 7."""

    @property
    def num_stored(self) -> int:
        """Return the examples, or what stands for them; without any it says nothing."""

    def vote(self, embeddings: Tensor) -> Vote:
        """Return what it says of representations, shape (n, p)."""


def interpolate(
    knn_probabilities: Tensor, global_probabilities: Tensor, knn_weight: float
) -> Tensor:
    """Return λ p_kNN + (1 - λ) p_global, with λ in [0, 1].

    Marfoq et al. 2022, Eq. 7. All are of shape (n, c), rows summing to 1; logits are
    refused. At λ = 0 and λ = 1 one of the two is returned as it is.
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
    if knn_weight == 0:
        return global_probabilities
    if knn_weight == 1:
        return knn_probabilities
    return knn_weight * knn_probabilities + (1 - knn_weight) * global_probabilities


KernelName = Literal["paper", "squared"]
Kernel = Callable[[Tensor, float, int], Tensor]
"""From d² (m, k), the scale and p, the size of an embedding, to log-weights (m, k)."""


def paper_kernel(squared_distances: Tensor, kernel_scale: float, _: int) -> Tensor:
    """Return -d/σ with the Euclidean distance d.

    Marfoq et al. 2022, Eq. 6, with the scale σ of Appendix B.
    """
    return -squared_distances.sqrt() / kernel_scale


def squared_kernel(
    squared_distances: Tensor, kernel_scale: float, embedding_dim: int
) -> Tensor:
    """Return -d²/(p σ), as the paper's public reference implementation weighs."""
    return -squared_distances / (embedding_dim * kernel_scale)


KERNELS: Mapping[KernelName, Kernel] = {
    "paper": paper_kernel,
    "squared": squared_kernel,
}


@dataclass(frozen=True)
class KnnPredictor:
    """h_{m,λ} of Marfoq et al. 2022, Eq. 7. With an empty store it is the global model.

    Evaluation, figures, sites and the service call this one.
    """

    # φ: from uint8 images (n, height, width, channels) to float32 (n, p).
    embed: Callable[[Tensor], Tensor] = field(repr=False)
    # From representations (n, p) to the global model's probabilities (n, c).
    head: Callable[[Tensor], Tensor] = field(repr=False)
    neighbors: LocalHypothesis = field(repr=False)
    knn_weight: float  # λ, in [0, 1]: 1 is kNN only, 0 is the global model only
    # How the global model is adapted to the labels that are stored; None is not.
    class_prior: ClassPrior | None = None
    # More figures on how it was chosen, by name.
    tuning: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, c), for n images; see `explain`.

        Rows sum to 1. Each image is embedded once.
        """
        if self.effective_knn_weight == 0 and self.class_prior is None:
            return self.head(self.embed(images))
        return self.explain(images).probabilities

    def explain(self, images: Tensor) -> Prediction:
        """Return the predictions for n images, and what they come from.

        Raises
        ------
        DataError
            If an embedding is not finite.
        StoreMismatchError
            If another model than the classifier's has embedded the store.
        StoreBusyError
            If the store changes all the time.
        """
        embeddings = self.embed(images)
        global_probabilities = self.head(embeddings)
        vote = self.neighbors.vote(embeddings)
        prior = self.class_prior
        own = None
        if prior is not None:
            own = adapted(global_probabilities, vote.label_counts, prior)
        mixed, weight = global_probabilities if own is None else own, 0.0
        if vote.probabilities is not None:
            weight = self.knn_weight
            mixed = interpolate(vote.probabilities, mixed, weight)
        return Prediction(mixed, global_probabilities, own, weight, vote)

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

    Marfoq et al. 2022, Eq. 6, normalised. The weights are taken relative to the largest
    of the row before the exponential, so none is lost at any distance.
    ``log_weights``, float64, and ``labels`` are of shape (m, k'), the result (m, c).
    An empty store says nothing about the labels: k' is at least 1.
    """
    if log_weights.shape[1] == 0:
        raise ValueError(
            "expected at least one neighbour, found none; where the store is empty, "
            "use the global model"
        )
    return _by_label(_shares(log_weights), labels, num_classes)


def _shares(log_weights: Tensor) -> Tensor:
    """Return each neighbour's share of the vote, of shape (m, k'); rows sum to 1."""
    # A scale near zero may have taken the whole row to -inf.
    return torch.softmax(
        log_weights.clamp_min(torch.finfo(log_weights.dtype).min), dim=1
    )


def _by_label(shares: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    votes = torch.zeros((len(shares), num_classes), dtype=shares.dtype)
    return votes.scatter_add_(1, labels, shares).float()


MAX_NAMES = 100_000  # that are kept: some megabytes


class Names:
    """The owner's names of a store's examples; an id stands for the same for ever."""

    def __init__(self, store: StoreReader) -> None:
        self._store = store
        self._known: dict[int, str | None] = {}

    def of(self, ids: Ids) -> list[list[str | None]]:
        """Return the names of ids (n, k); None where there is none, or no longer."""
        if len(self._known) > MAX_NAMES:
            self.forget()
        # Another thread may forget meanwhile, which leaves this dictionary alone.
        rows, known = ids.tolist(), self._known
        if missing := {one for row in rows for one in row if one not in known}:
            every = self._store.contents().ids
            if len(every) <= MAX_NAMES:
                # One question to the database takes longer than most of its answer.
                missing |= set(every.tolist()).difference(known)
            asked = sorted(missing)
            found = self._store.external_ids(np.array(asked, np.int64))
            known.update(zip(asked, found, strict=True))
        return [[known[one] for one in row] for row in rows]

    def forget(self) -> None:
        """Keep no name of what was deleted."""
        self._known = {}


ATTEMPTS, PAUSE_S = 200, 0.005
"""To search a store that others change: a search takes about as long as a change."""


@dataclass(frozen=True)
class NeighborClassifier:
    """h^(k) of Marfoq et al. 2022, Eq. 6."""

    store: StoreReader
    num_neighbors: int  # k
    kernel: KernelName
    kernel_scale: float  # σ
    # Of the model that embeds what is asked; a store that another one has embedded is
    # refused. None is that with which the store was opened.
    fingerprint: str | None = None
    # Of the store's examples, to tell the neighbours'; None tells no names.
    names: Names | None = None

    @property
    def num_stored(self) -> int:
        """n, the number of stored examples."""
        return len(self.store)

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return p_kNN, float32 of shape (n, c); an empty store is refused."""
        votes = self.vote(embeddings).probabilities
        if votes is None:
            raise ValueError("the store is empty: expected at least one neighbour")
        return votes

    def vote(self, embeddings: Tensor) -> Vote:
        """Return p_kNN for representations (n, p), and whose votes it consists of.

        Raises
        ------
        DataError
            If a representation is not finite or p differs from the store's.
        StoreMismatchError
            If another model has embedded the store by now.
        StoreBusyError
            If the store changes all the time.
        """
        contents, found, names = self._looked_up(embeddings)
        num_classes = self.store.num_classes
        log_weights = KERNELS[self.kernel](
            found.squared_distances, self.kernel_scale, embeddings.shape[1]
        )
        shares, is_empty = _shares(log_weights), found.ids.shape[1] == 0
        return Vote(
            None if is_empty else _by_label(shares, found.labels, num_classes),
            found,
            shares,
            names,
            count_labels(contents, num_classes),
            len(contents),
            self.fingerprint or self.store.fingerprint,
        )

    def _looked_up(
        self, embeddings: Tensor
    ) -> tuple[Contents, Neighbors, list[list[str | None]]]:
        """Return contents, neighbours and names, all of one state of the store."""
        store, names = self.store, list[list[str | None]]()
        for _ in range(ATTEMPTS):
            # A store whose contents change gets new ones, never changes those it had.
            contents = store.contents()
            found = store.search(embeddings, self.num_neighbors, self.fingerprint)
            if self.names is not None:
                names = self.names.of(found.ids.numpy())
            if self._all_there(found, names) and store.contents() is contents:
                return contents, found, names
            # What leaves the database has a moment to leave the index, too.
            time.sleep(PAUSE_S)
        raise StoreBusyError(
            f"the store changed during each of {ATTEMPTS} searches; ask again in a "
            "moment"
        )

    def _all_there(self, found: Neighbors, names: list[list[str | None]]) -> bool:
        """Whether no neighbour left the database while the index still had it."""
        if not any(None in row for row in names):
            return True
        ids = set(found.ids.flatten().tolist())
        return len(self.store.select(Selection(ids=tuple(ids)))) == len(ids)

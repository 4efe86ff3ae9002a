"""How a client chooses λ, k and σ: candidates, evidence, criteria, ties."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from knnper.datastore.examples import require_probabilities
from knnper.datastore.prediction import (
    ClassPrior,
    ClassPriorSettings,
    Kernel,
    neighbor_vote,
    reweighted,
)
from knnper.datastore.search import View
from knnper.datastore.store import StoreReader
from knnper.experiment import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Settings,
    UnitInterval,
)


@dataclass(frozen=True)
class TunedParameters:
    """How a client's memory is used."""

    knn_weight: float  # λ, in [0, 1]
    num_neighbors: int  # k, at least 1
    kernel_scale: float  # σ, positive
    # How the global model is adapted to the client's shares of the classes, if it is.
    class_prior: ClassPrior | None = None


@dataclass(frozen=True)
class Candidates:
    """The combinations that a client chooses from; made by `candidates`.

    Of equally good ones the first counts: the smallest λ, then the smallest k, then
    the largest σ, with which neighbours count most alike.
    """

    knn_weights: tuple[float, ...]  # λ, ascending
    num_neighbors: tuple[int, ...]  # k, ascending
    kernel_scales: tuple[float, ...]  # σ, descending

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of λ, k and σ."""
        return len(self.knn_weights), len(self.num_neighbors), len(self.kernel_scales)


def weights_to_choose_from(knn_weights: Sequence[float]) -> tuple[float, ...]:
    """Return the values of λ, ascending; 0 is one wherever there are several."""
    weights = set(knn_weights)
    return tuple(sorted(weights if len(weights) == 1 else weights | {0.0}))


def candidates(
    knn_weights: Sequence[float],
    num_neighbors: Sequence[int],
    kernel_scales: Sequence[float],
) -> Candidates:
    """Return all combinations of these values, in any order and with repetitions."""
    if not (knn_weights and num_neighbors and kernel_scales):
        raise ValueError(
            "expected at least one knn_weight, num_neighbors and kernel_scale to "
            f"choose from, found {knn_weights}, {num_neighbors} and {kernel_scales}"
        )
    return Candidates(
        weights_to_choose_from(knn_weights),
        tuple(sorted(set(num_neighbors))),
        tuple(sorted(set(kernel_scales), reverse=True)),
    )


@dataclass(frozen=True)
class Queries:
    """m examples as the global model sees them."""

    embeddings: Tensor  # φ(x), float32 of shape (m, p)
    probabilities: Tensor  # p_global, shape (m, c), rows summing to 1
    labels: Tensor  # int64, shape (m,), in [0, c)
    # q/π of the examples that a query is looked up in, float64 of shape (m, c) or
    # (1, c), see `knnper.datastore.prediction`; None leaves the global model as it is.
    class_ratios: Tensor | None = None

    def __post_init__(self) -> None:
        require_probabilities("global probabilities", self.probabilities)

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def take(self, chosen: Tensor) -> "Queries":
        """Return those that a bool (m,) marks."""
        ratios = self.class_ratios
        return Queries(
            self.embeddings[chosen],
            self.probabilities[chosen],
            self.labels[chosen],
            None if ratios is None else ratios.expand(len(self), -1)[chosen],
        )

    def adapted(self, sharpness: float) -> "Queries":
        """Return them as the global model sees them with the class prior and a β."""
        if self.class_ratios is None:
            return self
        seen = reweighted(self.probabilities, self.class_ratios, sharpness)
        return replace(self, probabilities=seen)


@dataclass(frozen=True)
class Evidence:
    """Queries and what is near them in the store; nothing where no neighbour is."""

    queries: Queries  # m
    squared_distances: Tensor  # to their neighbours, ascending, float64, shape (m, k')
    neighbor_labels: Tensor  # int64, shape (m, k')

    def __len__(self) -> int:
        return len(self.queries) if self.squared_distances.shape[1] > 0 else 0

    def take(self, chosen: Tensor) -> "Evidence":
        """Return that of the queries which a bool (m,) marks."""
        return Evidence(
            self.queries.take(chosen),
            self.squared_distances[chosen],
            self.neighbor_labels[chosen],
        )

    def adapted(self, sharpness: float) -> "Evidence":
        """Return what they show of the global model with the class prior and a β."""
        return replace(self, queries=self.queries.adapted(sharpness))


def held_out(
    store: StoreReader | View, queries: Queries, num_neighbors: int
) -> Evidence:
    """Return the evidence of examples that are not in the store."""
    found = store.search(queries.embeddings, num_neighbors)
    return Evidence(queries, found.squared_distances, found.labels)


def left_one_out(
    store: StoreReader | View, queries: Queries, ids: Tensor, num_neighbors: int
) -> Evidence:
    """Return the evidence of stored examples, as if each were not in the store.

    One search for all of them with one neighbour more, of which the example itself is
    dropped by its id. Where more than k of its duplicates are found before it, the
    last is dropped, since the others are the nearest without it.
    """
    found = store.search(queries.embeddings, num_neighbors + 1)
    if len(ids) == 0:
        return Evidence(queries, found.squared_distances, found.labels)
    own = found.ids == ids[:, None]
    own[:, -1] |= ~own.any(dim=1)
    shape = (len(ids), found.ids.shape[1] - 1)
    return Evidence(
        queries,
        found.squared_distances[~own].reshape(shape),
        found.labels[~own].reshape(shape),
    )


def no_evidence(num_classes: int) -> Evidence:
    """Return what a client has that can score nothing."""
    none = torch.empty((0, 0))
    queries = Queries(none, torch.empty((0, num_classes)), torch.empty(0).long())
    return Evidence(queries, none.double(), none.long())


CriterionName = Literal["accuracy", "log_loss", "both"]
EvidenceName = Literal["validation", "leave_one_out", "auto"]
EvidenceKind = Literal["none", "validation", "leave_one_out"]
KnnWeights = Annotated[tuple[UnitInterval, ...], Field(min_length=1)]
PAPER_KNN_WEIGHTS: KnnWeights = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""The paper's grid of λ (Marfoq et al. 2022, section 5)."""


@dataclass(frozen=True)
class PriorPoint(Settings):
    """The λ that is expected of clients of one size.

    Attributes
    ----------
    num_examples
        Stored examples, training and validation together.
    knn_weight
        λ_0.
    """

    num_examples: PositiveInt
    knn_weight: UnitInterval


@dataclass(frozen=True)
class EvidenceSettings(Settings):
    """On what, and by what measure, a client chooses.

    Attributes
    ----------
    min_validation
        See ``evidence``; useful from 5 to 50.
    """

    criterion: CriterionName = "accuracy"
    evidence: EvidenceName = "validation"
    min_validation: PositiveInt = 50

    def evidence_of(self, num_train: int, num_validation: int) -> EvidenceKind:
        """Return what is scored of a client with splits of these sizes."""
        if self.evidence != "auto":
            return self.evidence
        enough = num_train > 0 and num_validation >= self.min_validation
        return "validation" if enough else "leave_one_out"


@dataclass(frozen=True)
class TuningSettings(EvidenceSettings):
    """On what, and by what measure, a client chooses.

    Attributes
    ----------
    criterion
        ``accuracy``: most examples right. ``log_loss``: the largest sum of
        log p(y|x) of the mixture. ``both``: most examples right, and a hundredth of
        that sum, which decides where few examples leave ties.
    evidence
        What is scored. ``validation``: the validation split, with the training split
        as the store. ``leave_one_out``: every example of both, with all others as the
        store. ``auto``: the former for a client that has training data and at least
        ``min_validation`` validation examples, the latter for the others.
    num_neighbors_grid
        The values of k to choose from; none is to keep the one that is set.
    kernel_scale_grid
        The values of σ to choose from; none is to keep the one that is set.
    prior
        The λ that is expected, by the size of a client; none is to expect nothing.
    prior_strength
        How many scored examples the prior counts for, s; useful from 1 to 100.
    """

    num_neighbors_grid: tuple[PositiveInt, ...] = ()
    kernel_scale_grid: tuple[PositiveFloat, ...] = ()
    prior: tuple[PriorPoint, ...] = ()
    prior_strength: NonNegativeFloat = 30.0


@dataclass(frozen=True)
class Prior:
    """A normal distribution of λ around λ_0, with variance 1 / (2 s)."""

    knn_weight: float  # λ_0
    strength: float  # s: how many scored examples it counts for


NO_PRIOR = Prior(0.0, 0.0)


def prior_of_size(
    points: Sequence[PriorPoint], strength: float, num_examples: int
) -> Prior:
    """Return what to expect of a client with ``num_examples`` stored."""
    if not points:
        return NO_PRIOR
    ordered = sorted(points, key=lambda point: point.num_examples)
    sizes = [math.log(point.num_examples) for point in ordered]
    weights = [point.knn_weight for point in ordered]
    expected = np.interp(math.log(max(num_examples, 1)), sizes, weights)
    return Prior(float(expected), strength)


def weights_by_size(
    sizes: Sequence[int], knn_weights: Sequence[float], num_points: int = 5
) -> tuple[PriorPoint, ...]:
    """Return the λ that clients chose as a function of their size, never falling."""
    # It takes a quarter of a second to import, for which few need wait.
    from scipy.optimize import isotonic_regression

    if len(sizes) != len(knn_weights):
        raise ValueError(
            f"expected one knn_weight for each size, found {len(knn_weights)} for "
            f"{len(sizes)}"
        )
    if num_points < 1:
        raise ValueError(f"expected at least one point, found {num_points}")
    known = np.array(sizes) > 0
    if not known.any():
        raise ValueError("expected at least one client with examples, found none")
    stored = np.array(sizes)[known]
    weights = np.array(knn_weights, np.float64)[known]
    # The part of each client, from 0 on and without gaps.
    ranks = np.searchsorted(np.sort(stored), stored)
    part = np.unique(ranks * num_points // len(stored), return_inverse=True)[1]
    counts = np.bincount(part)
    log_sizes = np.bincount(part, np.log(stored)) / counts
    means = np.bincount(part, weights) / counts
    rising = isotonic_regression(means, weights=counts).x
    return tuple(
        PriorPoint(round(math.exp(log_size)), float(weight))
        for log_size, weight in zip(log_sizes, rising, strict=True)
    )


NUMBERS_AT_ONCE = 1 << 20
"""The most probabilities, of all λ together, that are in memory at a time."""
SMALLEST_PROBABILITY = 1e-12
"""What a smaller probability of the true label counts as, as in the results."""
LOG_LIKELIHOOD_SHARE = 0.01
"""What log p(y|x) counts for beside being right."""
Criterion = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(knn (m, c), global (m, c), labels (m,), λ (l,)) -> scores (l,)``: sums over the m
examples, in which more is better."""


def num_correct(
    knn: Tensor, of_global: Tensor, labels: Tensor, knn_weights: Tensor
) -> Tensor:
    """Return how many labels have the largest probability, float64 of shape (l,)."""
    # In float32, as `interpolate` mixes: what wins here by a hair is what is served.
    share = knn_weights[:, None, None]
    mixed = share.float() * knn
    mixed += (1 - share).float() * of_global
    return (mixed.argmax(dim=2) == labels).sum(dim=1).double()


def log_likelihood(
    knn: Tensor, of_global: Tensor, labels: Tensor, knn_weights: Tensor
) -> Tensor:
    """Return Σ log p(y|x) of the mixtures, float64 of shape (l,)."""
    of_label = [
        one.gather(1, labels[:, None])[:, 0].double() for one in (knn, of_global)
    ]
    share = knn_weights[:, None]
    mixed = share * of_label[0] + (1 - share) * of_label[1]
    return mixed.clamp_min(SMALLEST_PROBABILITY).log().sum(dim=1)


def num_correct_and_likelihood(*asked: Tensor) -> Tensor:
    """Return `num_correct` and a hundredth of `log_likelihood`, float64 of shape (l,).

    Of two that are right equally often the one that is surer of it scores more. An
    example that is right outweighs three that are wrong beyond any doubt.
    """
    return num_correct(*asked) + LOG_LIKELIHOOD_SHARE * log_likelihood(*asked)


CRITERIA: Mapping[CriterionName, Criterion] = {
    "accuracy": num_correct,
    "log_loss": log_likelihood,
    "both": num_correct_and_likelihood,
}


def score(
    evidence: Evidence, candidates: Candidates, kernel: Kernel, criterion: Criterion
) -> Tensor:
    """Return what each combination scores, summed over the evidence.

    The k nearest are the first k of the neighbours that were found, so that all k, σ
    and λ are scored from one search. Memory beyond the evidence is bounded.
    """
    scores = torch.zeros(candidates.shape, dtype=torch.float64)
    weights = torch.tensor(candidates.knn_weights, dtype=torch.float64)
    queries, dim = evidence.queries, evidence.queries.embeddings.shape[1]
    num_classes = queries.probabilities.shape[1]
    num_found = evidence.squared_distances.shape[1]
    at_once = max(1, NUMBERS_AT_ONCE // max(len(weights) * num_classes, num_found))
    for start in range(0, len(evidence), at_once):
        rows = slice(start, start + at_once)
        seen = queries.probabilities[rows], queries.labels[rows], weights
        nearest = evidence.neighbor_labels[rows]
        for which, scale in enumerate(candidates.kernel_scales):
            log_weights = kernel(evidence.squared_distances[rows], scale, dim)
            for place, count in enumerate(candidates.num_neighbors):
                votes = neighbor_vote(
                    log_weights[:, :count], nearest[:, :count], num_classes
                )
                scores[:, place, which] += criterion(votes, *seen)
    return scores


def choose(
    evidence: Evidence,
    candidates: Candidates,
    kernel: Kernel,
    criterion: Criterion,
    prior: Prior = NO_PRIOR,
    class_prior: ClassPrior | None = None,
) -> TunedParameters:
    """Return the combination with the largest Σ_i score_i - s (λ - λ_0)²."""
    variants = [evidence]
    if class_prior is not None:
        variants.insert(0, evidence.adapted(class_prior.sharpness))
    scores = torch.stack(
        [score(one, candidates, kernel, criterion) for one in variants]
    )
    weights = torch.tensor(candidates.knn_weights, dtype=torch.float64)
    penalty = prior.strength * (weights - prior.knn_weight).square()
    # argmax returns the first of several largest.
    total = scores - penalty[:, None, None]
    if candidates.knn_weights[0] == 0:
        # Nothing that scores less than the global model as it is.
        global_score = scores[-1, 0, 0, 0]
        total = total.where(scores >= global_score, -torch.inf)
    # torch's own imports sympy, a third of a second in each new process.
    place = np.unravel_index(int(total.argmax()), total.shape)
    variant, weight, count, scale = map(int, place)
    return TunedParameters(
        candidates.knn_weights[weight],
        candidates.num_neighbors[count],
        candidates.kernel_scales[scale],
        class_prior if variant < len(variants) - 1 else None,
    )


def choose_class_prior(
    evidence: Evidence, settings: ClassPriorSettings
) -> ClassPrior | None:
    """Return how the global model would be adapted; None if there is no strength."""
    if not settings.strengths:
        return None
    mildest_first = sorted(settings.sharpness, key=lambda value: abs(math.log(value)))
    if len(evidence) == 0:
        return ClassPrior(settings, mildest_first[0])
    queries = evidence.queries

    def log_posterior(sharpness: float) -> float:
        seen = queries.adapted(sharpness).probabilities
        zero = torch.zeros(1, dtype=torch.float64)  # λ: the global model alone
        likelihood = log_likelihood(seen, seen, queries.labels, zero)
        return float(likelihood) - math.log(sharpness) ** 2 / 2

    return ClassPrior(settings, max(mildest_first, key=log_posterior))


def choose_knn_weight(
    local_probabilities: Tensor,
    global_probabilities: Tensor,
    labels: Tensor,
    knn_weights: Sequence[float],
    criterion: CriterionName = "accuracy",
) -> float:
    """Return the λ that scores best on held-out examples; of equals the smallest."""
    weights = weights_to_choose_from(knn_weights)
    tried = torch.tensor(weights, dtype=torch.float64)
    scores = CRITERIA[criterion](
        local_probabilities, global_probabilities, labels, tried
    )
    # argmax returns the first of several largest.
    return weights[int(scores.argmax())]

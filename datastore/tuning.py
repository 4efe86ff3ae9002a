"""The choice of λ, k and σ by a client.

`fill_and_tune` fills a client's store and chooses. The choice has three steps:

1. Evidence: examples are looked up in the store, each without being its own neighbour.
   Validation examples are looked up before they are stored; stored examples by
   leave-one-out.
2. Score: one search for the largest k scores every combination of a `ParameterGrid`,
   because the k nearest are the first k neighbours found.
3. Choice: the combination with the largest Σ_i score_i - s (λ - λ_0)². The second term
   is the logarithm of a normal prior of λ around λ_0, by the size of the client; s = 0
   drops it. No combination that scores less than the global model alone is chosen.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from knnper.datastore.class_prior import (
    ClassPrior,
    ClassPriorSettings,
    class_ratios,
    count_labels,
    reweight_classes,
)
from knnper.datastore.examples import NewExamples, require_probabilities
from knnper.datastore.memory import (
    CriterionName,
    EvidenceKind,
    KnnSettings,
    PriorPoint,
)
from knnper.datastore.prediction import (
    KERNELS,
    Apply,
    Kernel,
    KnnParameters,
    KnnPredictor,
    build_predictor,
    neighbor_vote,
)
from knnper.datastore.search import View
from knnper.datastore.store import Store, StoreReader

NUMBERS_AT_ONCE = 1 << 20
"""The most probabilities, of all λ together, in memory at a time."""
SMALLEST_PROBABILITY = 1e-12
"""A smaller probability of the true label counts as this, as in the results."""
LOG_LIKELIHOOD_SHARE = 0.01
"""Weight of log p(y|x) beside a correct prediction, which counts 1."""

Criterion = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(knn (m, c), global (m, c), labels (m,), λ (l,)) -> scores (l,)``: sums over the m
examples, larger is better."""


# The evidence


@dataclass(frozen=True)
class Queries:
    """m labelled examples with the global model's output for them."""

    embeddings: Tensor  # φ(x), float32 of shape (m, p)
    probabilities: Tensor  # p_global, shape (m, c), rows summing to 1
    labels: Tensor  # int64, shape (m,), in [0, c)
    # q/π of the examples that a query is looked up in, float64 of shape (m, c) or
    # (1, c), see `knnper.datastore.class_prior`; None without a class prior.
    class_ratios: Tensor | None = None

    def __post_init__(self) -> None:
        require_probabilities("global probabilities", self.probabilities)

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def take(self, chosen: Tensor) -> "Queries":
        """Return the queries that a bool mask (m,) selects."""
        ratios = self.class_ratios
        return Queries(
            self.embeddings[chosen],
            self.probabilities[chosen],
            self.labels[chosen],
            None if ratios is None else ratios.expand(len(self), -1)[chosen],
        )

    def adapted(self, sharpness: float) -> "Queries":
        """Return the queries with p_global adapted by the class prior with a β."""
        if self.class_ratios is None:
            return self
        adapted = reweight_classes(self.probabilities, self.class_ratios, sharpness)
        return replace(self, probabilities=adapted)


@dataclass(frozen=True)
class Evidence:
    """Queries with their nearest neighbours in the store; empty without neighbours."""

    queries: Queries  # m
    squared_distances: Tensor  # to the neighbours, ascending, float64, shape (m, k')
    neighbor_labels: Tensor  # int64, shape (m, k')

    def __len__(self) -> int:
        return len(self.queries) if self.squared_distances.shape[1] > 0 else 0

    def take(self, chosen: Tensor) -> "Evidence":
        """Return the evidence of the queries that a bool mask (m,) selects."""
        return Evidence(
            self.queries.take(chosen),
            self.squared_distances[chosen],
            self.neighbor_labels[chosen],
        )

    def adapted(self, sharpness: float) -> "Evidence":
        """Return the evidence with p_global adapted by the class prior with a β."""
        return replace(self, queries=self.queries.adapted(sharpness))


def no_evidence(num_classes: int) -> Evidence:
    """Return the evidence of a client without examples to score."""
    nothing = torch.empty((0, 0))
    queries = Queries(nothing, torch.empty((0, num_classes)), torch.empty(0).long())
    return Evidence(queries, nothing.double(), nothing.long())


def held_out(
    store: StoreReader | View, queries: Queries, num_neighbors: int
) -> Evidence:
    """Return the evidence of queries that are not in the store."""
    neighbors = store.search(queries.embeddings, num_neighbors)
    return Evidence(queries, neighbors.squared_distances, neighbors.labels)


def left_one_out(
    store: StoreReader | View, queries: Queries, ids: Tensor, num_neighbors: int
) -> Evidence:
    """Return the evidence of stored examples, each looked up among the others.

    One search finds k + 1 neighbours, and each query is dropped from its own by its id.
    A query with more than k duplicates may not be among them. Its last neighbour is
    dropped then, since the first k are the nearest of the others.
    """
    neighbors = store.search(queries.embeddings, num_neighbors + 1)
    if len(ids) == 0:
        return Evidence(queries, neighbors.squared_distances, neighbors.labels)
    is_query = neighbors.ids == ids[:, None]
    is_query[:, -1] |= ~is_query.any(dim=1)
    shape = (len(ids), neighbors.ids.shape[1] - 1)
    return Evidence(
        queries,
        neighbors.squared_distances[~is_query].reshape(shape),
        neighbors.labels[~is_query].reshape(shape),
    )


def validation_evidence(
    store: StoreReader,
    validation: NewExamples,
    head: Apply,
    num_neighbors: int,
    class_prior: ClassPriorSettings,
) -> Evidence:
    """Return the evidence of a split that is not stored."""
    counts = count_labels(store.contents(), store.num_classes)
    queries = _queries_of(validation, head, counts, class_prior)
    return held_out(store, queries, num_neighbors)


def left_out_evidence(
    store: StoreReader,
    positions: Tensor,
    head: Apply,
    num_neighbors: int,
    class_prior: ClassPriorSettings,
) -> Evidence:
    """Return the evidence of stored examples, by leave-one-out.

    Neighbours and class prior of each example come from all others.

    Parameters
    ----------
    positions
        Positions of the m examples in the store, int64 (m,).
    """
    contents = store.contents()
    ids = contents.ids[positions.numpy()]
    labels = torch.from_numpy(contents.labels)[positions]
    counts = count_labels(contents, store.num_classes)
    left_out = torch.nn.functional.one_hot(labels, store.num_classes)
    stored = NewExamples(store.vectors(ids), labels)
    queries = _queries_of(stored, head, counts - left_out, class_prior)
    return left_one_out(store, queries, torch.from_numpy(ids), num_neighbors)


def _queries_of(
    examples: NewExamples,
    head: Apply,
    label_counts: Tensor,
    class_prior: ClassPriorSettings,
) -> Queries:
    has_prior = bool(class_prior.strengths)
    return Queries(
        examples.embeddings,
        head(examples.embeddings),
        examples.labels,
        class_ratios(label_counts, class_prior) if has_prior else None,
    )


def evenly_spread(count: int, most: int | None) -> Tensor:
    """Return positions in [0, count), at most ``most``, ascending, int64."""
    if most is None or count <= most:
        return torch.arange(count)
    return torch.linspace(0, count - 1, most).round().long()


# The combinations to choose from


@dataclass(frozen=True)
class ParameterGrid:
    """The combinations of λ, k and σ that a client chooses from.

    The order breaks ties: the first of equally good combinations wins, which has the
    smallest λ, then the smallest k, then the largest σ (the most even vote).
    """

    knn_weights: tuple[float, ...]  # λ, ascending
    num_neighbors: tuple[int, ...]  # k, ascending
    kernel_scales: tuple[float, ...]  # σ, descending

    @classmethod
    def of(
        cls,
        knn_weights: Sequence[float],
        num_neighbors: Sequence[int],
        kernel_scales: Sequence[float],
    ) -> "ParameterGrid":
        """Combine values given in any order; repetitions count once."""
        if not (knn_weights and num_neighbors and kernel_scales):
            raise ValueError(
                "expected at least one knn_weight, num_neighbors and kernel_scale to "
                f"choose from, found {knn_weights}, {num_neighbors} and {kernel_scales}"
            )
        return cls(
            knn_weight_grid(knn_weights),
            tuple(sorted(set(num_neighbors))),
            tuple(sorted(set(kernel_scales), reverse=True)),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of λ, k and σ."""
        return len(self.knn_weights), len(self.num_neighbors), len(self.kernel_scales)


def knn_weight_grid(knn_weights: Sequence[float]) -> tuple[float, ...]:
    """Sort the values of λ, and add 0 unless λ is fixed to a single value."""
    weights = set(knn_weights)
    return tuple(sorted(weights if len(weights) == 1 else weights | {0.0}))


def parameter_grid(
    settings: KnnSettings, *, has_evidence: bool = True
) -> ParameterGrid:
    """Return the combinations of λ, k and σ that a client chooses from.

    Without examples to score, k and σ are the values set, or the only value of their
    grid.
    """
    counts = settings.tuning.num_neighbors_grid or (settings.num_neighbors,)
    scales = settings.tuning.kernel_scale_grid or (settings.kernel_scale,)
    if not has_evidence and len(set(counts)) > 1:
        counts = (settings.num_neighbors,)
    if not has_evidence and len(set(scales)) > 1:
        scales = (settings.kernel_scale,)
    return ParameterGrid.of(settings.knn_weights, counts, scales)


def is_fixed(settings: KnnSettings) -> bool:
    """Return whether there is nothing to choose: one λ, k and σ, no class prior."""
    has_prior = bool(settings.class_prior.strengths)
    return parameter_grid(settings).shape == (1, 1, 1) and not has_prior


# The score of a combination


def num_correct(
    p_knn: Tensor, p_global: Tensor, labels: Tensor, knn_weights: Tensor
) -> Tensor:
    """Count the labels with the largest probability, float64 of shape (l,)."""
    # In float32, as `interpolate` mixes: the smallest margins decide as when serving.
    share = knn_weights[:, None, None]
    mixed = share.float() * p_knn
    mixed += (1 - share).float() * p_global
    return (mixed.argmax(dim=2) == labels).sum(dim=1).double()


def log_likelihood(
    p_knn: Tensor, p_global: Tensor, labels: Tensor, knn_weights: Tensor
) -> Tensor:
    """Return Σ log p(y|x) of the mixtures, float64 of shape (l,)."""
    knn_of_label = p_knn.gather(1, labels[:, None])[:, 0].double()
    global_of_label = p_global.gather(1, labels[:, None])[:, 0].double()
    share = knn_weights[:, None]
    mixed = share * knn_of_label + (1 - share) * global_of_label
    return mixed.clamp_min(SMALLEST_PROBABILITY).log().sum(dim=1)


def num_correct_and_likelihood(
    p_knn: Tensor, p_global: Tensor, labels: Tensor, knn_weights: Tensor
) -> Tensor:
    """Return `num_correct` and a hundredth of `log_likelihood`, float64 of shape (l,).

    Of two mixtures with equally many correct predictions the more confident one scores
    more. A correct prediction outweighs three that are wrong with p(y|x) = 0.
    """
    likelihood = log_likelihood(p_knn, p_global, labels, knn_weights)
    correct = num_correct(p_knn, p_global, labels, knn_weights)
    return correct + LOG_LIKELIHOOD_SHARE * likelihood


CRITERIA: Mapping[CriterionName, Criterion] = {
    "accuracy": num_correct,
    "log_loss": log_likelihood,
    "both": num_correct_and_likelihood,
}


def score(
    evidence: Evidence, grid: ParameterGrid, kernel: Kernel, criterion: Criterion
) -> Tensor:
    """Score each combination, float64 of shape (λ, k, σ), summed over the evidence.

    Batches of queries bound the memory needed beyond the evidence.
    """
    scores = torch.zeros(grid.shape, dtype=torch.float64)
    weights = torch.tensor(grid.knn_weights, dtype=torch.float64)
    queries, dim = evidence.queries, evidence.queries.embeddings.shape[1]
    num_classes = queries.probabilities.shape[1]
    num_neighbors = evidence.squared_distances.shape[1]
    numbers_per_query = max(len(weights) * num_classes, num_neighbors)
    batch_size = max(1, NUMBERS_AT_ONCE // numbers_per_query)
    for start in range(0, len(evidence), batch_size):
        rows = slice(start, start + batch_size)
        p_global, labels = queries.probabilities[rows], queries.labels[rows]
        neighbor_labels = evidence.neighbor_labels[rows]
        for scale_at, scale in enumerate(grid.kernel_scales):
            log_weights = kernel(evidence.squared_distances[rows], scale, dim)
            for count_at, count in enumerate(grid.num_neighbors):
                p_knn = neighbor_vote(
                    log_weights[:, :count], neighbor_labels[:, :count], num_classes
                )
                scores[:, count_at, scale_at] += criterion(
                    p_knn, p_global, labels, weights
                )
    return scores


# The choice


@dataclass(frozen=True)
class Prior:
    """A normal distribution of λ around λ_0, with variance 1 / (2 s)."""

    knn_weight: float  # λ_0
    strength: float  # s, the number of scored examples that it counts for


NO_PRIOR = Prior(0.0, 0.0)


def prior_of_size(
    points: Sequence[PriorPoint], strength: float, num_examples: int
) -> Prior:
    """Interpolate the prior of a client with ``num_examples`` stored examples.

    λ_0 is linear in the logarithm of the size, constant beyond the outer points.
    """
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
    """Fit a prior: the mean λ that clients chose by their size, non-decreasing.

    Clients are divided into ``num_points`` groups of about equal numbers by size, and
    the groups' means are made non-decreasing by isotonic regression.
    """
    # Imported here: the import takes a quarter of a second, and few callers need it.
    from scipy.optimize import isotonic_regression

    if len(sizes) != len(knn_weights):
        raise ValueError(
            f"expected one knn_weight for each size, found {len(knn_weights)} for "
            f"{len(sizes)}"
        )
    if num_points < 1:
        raise ValueError(f"expected at least one point, found {num_points}")
    has_examples = np.array(sizes) > 0
    if not has_examples.any():
        raise ValueError("expected at least one client with examples, found none")
    stored = np.array(sizes)[has_examples]
    weights = np.array(knn_weights, np.float64)[has_examples]
    # The group of each client, numbered from 0 without gaps.
    ranks = np.searchsorted(np.sort(stored), stored)
    group = np.unique(ranks * num_points // len(stored), return_inverse=True)[1]
    counts = np.bincount(group)
    log_sizes = np.bincount(group, np.log(stored)) / counts
    means = np.bincount(group, weights) / counts
    rising = isotonic_regression(means, weights=counts).x
    return tuple(
        PriorPoint(round(math.exp(log_size)), float(weight))
        for log_size, weight in zip(log_sizes, rising, strict=True)
    )


def best_parameters(
    evidence: Evidence,
    grid: ParameterGrid,
    kernel: Kernel,
    criterion: Criterion,
    prior: Prior = NO_PRIOR,
    class_prior: ClassPrior | None = None,
) -> KnnParameters:
    """Return the combination with the largest Σ_i score_i - s (λ - λ_0)².

    With a class prior each combination is scored with it and without it; of equal
    scores the one with it wins.
    """
    variants = [evidence]
    if class_prior is not None:
        variants.insert(0, evidence.adapted(class_prior.sharpness))
    # Shape (variants, λ, k, σ).
    scores = torch.stack(
        [score(variant, grid, kernel, criterion) for variant in variants]
    )
    weights = torch.tensor(grid.knn_weights, dtype=torch.float64)
    penalty = prior.strength * (weights - prior.knn_weight).square()
    total = scores - penalty[:, None, None]
    if grid.knn_weights[0] == 0:
        # Exclude every combination that scores less than the unadapted global model.
        global_score = scores[-1, 0, 0, 0]
        total = total.where(scores >= global_score, -torch.inf)
    # argmax returns the first of equal maxima. torch.unravel_index would import sympy,
    # a third of a second in each new process.
    position = np.unravel_index(int(total.argmax()), total.shape)
    variant, weight, count, scale = map(int, position)
    return KnnParameters(
        grid.knn_weights[weight],
        grid.num_neighbors[count],
        grid.kernel_scales[scale],
        class_prior if variant < len(variants) - 1 else None,
    )


def choose_class_prior(
    evidence: Evidence, settings: ClassPriorSettings
) -> ClassPrior | None:
    """Choose β by the posterior of the global model alone; None if switched off.

    log β has a standard normal prior.
    """
    if not settings.strengths:
        return None
    mildest_first = sorted(settings.sharpness, key=lambda value: abs(math.log(value)))
    if len(evidence) == 0:
        return ClassPrior(settings, mildest_first[0])
    queries = evidence.queries

    def log_posterior(sharpness: float) -> float:
        adapted = queries.adapted(sharpness).probabilities
        global_only = torch.zeros(1, dtype=torch.float64)  # λ = 0
        likelihood = log_likelihood(adapted, adapted, queries.labels, global_only)
        return float(likelihood) - math.log(sharpness) ** 2 / 2

    return ClassPrior(settings, max(mildest_first, key=log_posterior))


def choose_parameters(
    evidence: Evidence, num_stored: int, settings: KnnSettings
) -> KnnParameters:
    """Choose λ, k, σ and the class prior of a client with ``num_stored`` examples."""
    tuning = settings.tuning
    return best_parameters(
        evidence,
        parameter_grid(settings, has_evidence=len(evidence) > 0),
        KERNELS[settings.kernel],
        CRITERIA[tuning.criterion],
        prior_of_size(tuning.prior, tuning.prior_strength, num_stored),
        choose_class_prior(evidence, settings.class_prior),
    )


def choose_knn_weight(
    local_probabilities: Tensor,
    global_probabilities: Tensor,
    labels: Tensor,
    knn_weights: Sequence[float],
    criterion: CriterionName = "accuracy",
) -> float:
    """Return the λ with the best score on held-out examples; the smallest of equals."""
    grid = knn_weight_grid(knn_weights)
    weights = torch.tensor(grid, dtype=torch.float64)
    scores = CRITERIA[criterion](
        local_probabilities, global_probabilities, labels, weights
    )
    # argmax returns the first of equal maxima.
    return grid[int(scores.argmax())]


@dataclass(frozen=True)
class Tuned:
    """The hyper-parameters that a client chose, and the evidence for them."""

    choice: KnnParameters  # λ, k, σ and the class prior
    kind: EvidenceKind
    evidence: Evidence  # the scored examples; empty if nothing could be scored

    def predictor(
        self, embed: Apply, head: Apply, store: StoreReader, settings: KnnSettings
    ) -> KnnPredictor:
        """Build the predictor of the global model's φ and head, and a store."""
        return build_predictor(
            embed,
            head,
            store,
            settings.kernel,
            self.choice,
            tuning=self._report(settings),
        )

    def _report(self, settings: KnnSettings) -> Mapping[str, float]:
        """Return the number of scored examples, and the choices beside λ."""
        num_scored, choice = float(len(self.evidence)), self.choice
        report = {
            "num_held_out": num_scored if self.kind == "validation" else 0.0,
            "num_left_out": num_scored if self.kind == "leave_one_out" else 0.0,
        }
        if settings.tuning.num_neighbors_grid:
            report["num_neighbors"] = float(choice.num_neighbors)
        if settings.tuning.kernel_scale_grid:
            report["kernel_scale"] = choice.kernel_scale
        if settings.class_prior.strengths:
            report["class_prior"] = float(choice.class_prior is not None)
        if choice.class_prior is not None and len(settings.class_prior.sharpness) > 1:
            report["sharpness"] = choice.class_prior.sharpness
        return report


def fill_and_tune(
    store: Store,
    train: NewExamples,
    validation: NewExamples,
    head: Apply,
    settings: KnnSettings,
    most_left_out: int | None = None,
) -> Tuned:
    """Fill an empty store with a client's data, and choose λ, k and σ.

    Parameters
    ----------
    head
        From representations (n, p) to the global model's probabilities (n, c).
    most_left_out
        The most examples to score by leave-one-out; None scores all.
    """
    kind: EvidenceKind = "none"
    if not is_fixed(settings):
        kind = settings.tuning.evidence_of(len(train), len(validation))
    most_neighbors = max(parameter_grid(settings).num_neighbors)
    class_prior = settings.class_prior
    evidence = no_evidence(store.num_classes)
    store.add(train)
    if kind == "validation":
        # Before the split is stored, so that no example is its own neighbour.
        evidence = validation_evidence(
            store, validation, head, most_neighbors, class_prior
        )
    store.add(validation)
    if kind == "leave_one_out":
        positions = evenly_spread(len(store), most_left_out)
        evidence = left_out_evidence(
            store, positions, head, most_neighbors, class_prior
        )
    return Tuned(choose_parameters(evidence, len(store), settings), kind, evidence)

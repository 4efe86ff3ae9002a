"""What a combination of λ, k and σ scores on some evidence."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from datastore.prediction.kernel import Kernel
from datastore.prediction.vote import neighbor_vote
from datastore.tuning.candidates import Candidates
from datastore.tuning.evidence import Evidence
from datastore.tuning.settings import CriterionName

NUMBERS_AT_ONCE = 1 << 20
"""The most probabilities, of all λ together, that are in memory at a time."""

SMALLEST_PROBABILITY = 1e-12
"""What a smaller probability of the true label counts as, as in the results."""

PART_OF_SURENESS = 0.01
"""What log p(y|x) counts for beside being right."""

Criterion = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(knn (m, c), global (m, c), labels (m,), λ (l,)) -> scores (l,)``: sums over the m
examples, in which more is better."""


def num_correct(
    knn_probabilities: Tensor,
    global_probabilities: Tensor,
    labels: Tensor,
    knn_weights: Tensor,
) -> Tensor:
    """Return how many labels have the largest probability, float64 of shape (l,).

    Parameters
    ----------
    knn_probabilities, global_probabilities
        float32, shape (m, c).
    labels
        int64, shape (m,).
    knn_weights
        λ, float64 of shape (l,).
    """
    # In float32, as `interpolate` mixes: what wins here by a hair is what is served.
    share = knn_weights[:, None, None]
    mixed = share.float() * knn_probabilities
    mixed += (1 - share).float() * global_probabilities
    return (mixed.argmax(dim=2) == labels).sum(dim=1).double()


def log_likelihood(
    knn_probabilities: Tensor,
    global_probabilities: Tensor,
    labels: Tensor,
    knn_weights: Tensor,
) -> Tensor:
    """Return Σ log p(y|x) of the mixtures, float64 of shape (l,).

    Parameters
    ----------
    knn_probabilities, global_probabilities
        float32, shape (m, c).
    labels
        int64, shape (m,).
    knn_weights
        λ, float64 of shape (l,).
    """
    knn, alone = (
        one.gather(1, labels[:, None])[:, 0].double()
        for one in (knn_probabilities, global_probabilities)
    )
    share = knn_weights[:, None]
    mixed = share * knn + (1 - share) * alone
    return mixed.clamp_min(SMALLEST_PROBABILITY).log().sum(dim=1)


def num_correct_by_sureness(
    knn_probabilities: Tensor,
    global_probabilities: Tensor,
    labels: Tensor,
    knn_weights: Tensor,
) -> Tensor:
    """Return `num_correct` and a hundredth of `log_likelihood`, float64 of shape (l,).

    Of two that are right equally often the one that is surer of it scores more. An
    example that is right outweighs three that are wrong beyond any doubt.

    Parameters
    ----------
    knn_probabilities, global_probabilities
        float32, shape (m, c).
    labels
        int64, shape (m,).
    knn_weights
        λ, float64 of shape (l,).
    """
    asked = knn_probabilities, global_probabilities, labels, knn_weights
    return num_correct(*asked) + PART_OF_SURENESS * log_likelihood(*asked)


CRITERIA: Mapping[CriterionName, Criterion] = {
    "accuracy": num_correct,
    "log_loss": log_likelihood,
    "both": num_correct_by_sureness,
}


def score(
    evidence: Evidence, candidates: Candidates, kernel: Kernel, criterion: Criterion
) -> Tensor:
    """Return what each combination scores, summed over the evidence.

    The k nearest are the first k of the neighbours that were found, so that all k, σ
    and λ are scored from one search. Memory beyond the evidence is bounded.

    Parameters
    ----------
    evidence
        Made for the largest k or more; nothing scores 0.
    candidates
        The combinations.
    kernel
        A value of `datastore.prediction.kernel.KERNELS`.
    criterion
        A value of `CRITERIA`.

    Returns
    -------
    Tensor
        float64, of the candidates' `shape`.
    """
    scores = torch.zeros(candidates.shape, dtype=torch.float64)
    weights = torch.tensor(candidates.knn_weights, dtype=torch.float64)
    for rows in _parts(evidence, len(weights)):
        labels = evidence.queries.labels[rows]
        probabilities = evidence.queries.probabilities[rows]
        for place, votes in _votes(evidence, rows, candidates, kernel):
            scores[:, *place] += criterion(votes, probabilities, labels, weights)
    return scores


def _parts(evidence: Evidence, num_weights: int) -> Iterator[slice]:
    num_classes = evidence.queries.probabilities.shape[1]
    num_found = evidence.squared_distances.shape[1]
    at_once = max(1, NUMBERS_AT_ONCE // max(num_weights * num_classes, num_found))
    for start in range(0, len(evidence), at_once):
        yield slice(start, start + at_once)


def _votes(
    evidence: Evidence, rows: slice, candidates: Candidates, kernel: Kernel
) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield p_kNN (m, c) for each k and σ, with their places."""
    embedding_dim = evidence.queries.embeddings.shape[1]
    num_classes = evidence.queries.probabilities.shape[1]
    distances = evidence.squared_distances[rows]
    labels = evidence.neighbor_labels[rows]
    for scale_place, scale in enumerate(candidates.kernel_scales):
        log_weights = kernel(distances, scale, embedding_dim)
        for count_place, count in enumerate(candidates.num_neighbors):
            votes = neighbor_vote(
                log_weights[:, :count], labels[:, :count], num_classes
            )
            yield (count_place, scale_place), votes

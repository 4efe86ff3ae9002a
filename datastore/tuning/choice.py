"""The choice of λ, k and σ: the best score, drawn towards what is expected."""

import math
from dataclasses import replace

import torch

from datastore.prediction.class_prior import ClassPrior, ClassPriorSettings
from datastore.prediction.kernel import Kernel
from datastore.tuning.candidates import Candidates, Choice
from datastore.tuning.evidence import Evidence, Queries
from datastore.tuning.prior import NO_PRIOR, Prior
from datastore.tuning.scores import Criterion, log_likelihood, score

ALONE = torch.zeros(1, dtype=torch.float64)
"""λ = 0."""


def choose(
    evidence: Evidence,
    candidates: Candidates,
    kernel: Kernel,
    criterion: Criterion,
    prior: Prior = NO_PRIOR,
    class_prior: ClassPrior | None = None,
) -> Choice:
    """Return the combination with the largest Σ_i score_i - s (λ - λ_0)².

    Of those, where λ = 0 is a candidate, that score no worse than λ = 0: whatever is
    expected, no client does worse on its evidence than with the global model.

    With ``log_loss`` this is the most probable one, a posteriori, under a normal prior
    of λ. With ``accuracy`` the prior counts as s more examples, each of which is right
    to the extent 1 - (λ - λ_0)². Ties go to the first of the candidates: the smallest
    λ, the smallest k, the largest σ. Without evidence λ is the one closest to λ_0, and
    without a prior the smallest: 0 if it is not fixed.

    Parameters
    ----------
    evidence
        What is scored.
    candidates
        The combinations.
    kernel
        A value of `datastore.prediction.kernel.KERNELS`.
    criterion
        A value of `datastore.tuning.scores.CRITERIA`.
    prior
        λ_0 and s.
    class_prior
        With one, all combinations are scored with it and without it, and of equally
        good ones one with it counts first.
    """
    seen = [evidence]
    if class_prior is not None:
        seen.insert(0, evidence.adapted(class_prior.sharpness))
    scores = torch.stack([score(one, candidates, kernel, criterion) for one in seen])
    weights = torch.tensor(candidates.knn_weights, dtype=torch.float64)
    penalty = prior.strength * (weights - prior.knn_weight).square()
    # argmax returns the first of several largest.
    total = scores - penalty[:, None, None]
    if candidates.knn_weights[0] == 0:
        total = total.where(scores >= scores[-1, 0, 0, 0], -torch.inf)
    best = torch.unravel_index(total.argmax(), total.shape)
    which, *place = (int(one) for one in best)
    chosen = candidates.at(place)
    is_adapted = which < len(seen) - 1
    return replace(chosen, class_prior=class_prior if is_adapted else None)


def choose_class_prior(
    evidence: Evidence, settings: ClassPriorSettings
) -> ClassPrior | None:
    """Return how the global model would be adapted; None if there is no strength.

    β is the one with the largest Σ_i log p(y_i|x_i) - (log β)² / 2: the most probable
    one if log β has a standard normal distribution. Without evidence it is the one
    closest to 1.

    Parameters
    ----------
    evidence
        What is scored, of the global model alone.
    settings
        The values of β, and how the client's shares are learned.
    """
    if not settings.strengths:
        return None
    in_doubt = sorted(settings.sharpness, key=lambda value: abs(math.log(value)))
    if len(evidence) == 0:
        return ClassPrior(settings, in_doubt[0])
    queries = evidence.queries
    sharpness = max(in_doubt, key=lambda value: _log_posterior(queries, value))
    return ClassPrior(settings, sharpness)


def _log_posterior(queries: Queries, sharpness: float) -> float:
    seen = queries.adapted(sharpness)
    likelihood = log_likelihood(
        seen.probabilities, seen.probabilities, seen.labels, ALONE
    )
    return float(likelihood) - math.log(sharpness) ** 2 / 2

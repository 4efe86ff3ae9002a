"""The choice of λ, k and σ: the best score, drawn towards what is expected."""

import torch

from datastore.prediction.kernel import Kernel
from datastore.tuning.candidates import Candidates, Choice
from datastore.tuning.evidence import Evidence
from datastore.tuning.prior import NO_PRIOR, Prior
from datastore.tuning.scores import Criterion, score


def choose(
    evidence: Evidence,
    candidates: Candidates,
    kernel: Kernel,
    criterion: Criterion,
    prior: Prior = NO_PRIOR,
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
    """
    scores = score(evidence, candidates, kernel, criterion)
    weights = torch.tensor(candidates.knn_weights, dtype=torch.float64)
    penalty = prior.strength * (weights - prior.knn_weight).square()
    # argmax returns the first of several largest.
    total = scores - penalty[:, None, None]
    if candidates.knn_weights[0] == 0:
        total = total.where(scores >= scores[0, 0, 0], -torch.inf)
    best = total.argmax()
    return candidates.at(
        [int(place) for place in torch.unravel_index(best, candidates.shape)]
    )

"""Private answers: a vote with noise, for which every stored example has a budget.

Ind-KNN of Zhu, Zhao, Guo and Wang, "Private Prediction Strikes Back! Private Kernelized
Nearest Neighbors with Individual Rényi Filter", UAI 2023 (arXiv 2306.07381). For each
query, stored examples vote if the cosine κ of their embedding with it is at least τ:

    m  = max(|voters| + N(0, σ₁²), 30)
    s  = Σ_voters min(κ_i, √(2 r_i m) σ₂) e_{y_i} + N(0, σ₂² m I)

r_i is the rest of the budget of example i, e_y the unit vector of class y. Only m and s
are released; the mixture with the global model is computed from them and costs nothing.
The paper's other kernel, exp(-|u - v|² / ν²), grows with the cosine: embeddings have
length 1. It selects the same voters at another τ, and only weighs them differently.

Guarantee
---------
Two stores are neighbours if one has an additional example i. The cosine of an example
depends on the example and the query alone, and its budget on its own charges. So, given
all earlier answers, both stores have the same other voters with the same contributions,
and i moves |voters| by 1 and s by its contribution f_i, in Euclidean norm. These are
two Gaussian mechanisms, (α / 2)(1/σ₁²)- and (α / 2)(f_i² / (σ₂² m))-Rényi private at
every order α (Mironov 2017): i is charged ρ = 1/(2σ₁²) + f_i²/(2 σ₂² m). An example
that cannot pay for the count does not vote, and f_i is cut to what the rest pays for,
so the charges of an example never exceed its budget, for any sequence of queries: the
individual Rényi filter of Feldman and Zrnic 2021.

Charges that sum to ρ give (ε, δ) as one Gaussian mechanism with the noise multiplier
σ = 1/√(2ρ) does. The shift that i causes at a release depends on earlier releases. The
privacy loss is therefore a Brownian motion with drift that is stopped at time 2ρ at the
latest, and at time 2ρ it has the distribution of that mechanism's loss (Smith and
Thakurta 2022; Koskela et al. 2023 for individual filters).

Departures from the paper and from its public code
--------------------------------------------------
- ε follows from ρ exactly, instead of from the best of several orders.
- An example votes only if it can pay for the count. The code counts it before that
  check, and lets budgets become negative.
- Noise is always added. The code answers without noise where no example votes.
- The vote counts if its largest score exceeds four deviations of the noise; else the
  global model answers. The paper answers with the largest score.
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.privacy import noise_multiplier_for
from knnper.settings import PositiveFloat, PositiveInt, Settings, UnitInterval

Delta = Annotated[float, Field(gt=0, lt=1)]
Threshold = Annotated[float, Field(gt=0, le=1)]

# Number of voters that the noise is at least made for: 30 in the paper's public code.
MIN_VOTERS = 30
# Deviations of the noise that the largest score must exceed. With ten classes, noise
# alone does so for one in 3,000 queries.
SIGNIFICANT = 4.0


@dataclass(frozen=True)
class PrivateAnswerSettings(Settings):
    """Private answers of a client's service (Zhu et al. 2023).

    Attributes
    ----------
    epsilon, delta
        ε at δ of every stored example over all answers ever given; ε is useful from 1
        to 10, δ far below 1 / (number of stored examples).
    threshold
        τ: examples with at least this cosine with the query vote. Choose it on examples
        that need no protection, such that about a tenth of them exceeds it.
    num_queries
        T, the queries to plan for, useful up to a few thousand. More are answered, by
        ever fewer examples. It sets σ₁, the deviation of the noise on the number of
        voters, to √(T / 6ρ), the paper's choice for a budget of ρ.
    vote_noise
        σ₂, the noise on the score of a class for each root of the number of voters;
        useful from 0.2 to 1. More noise makes the budget last for more queries.
    knn_weight
        λ, the weight of the vote; useful from 0.5 to 1. It is not the client's own λ,
        which is chosen on stored examples, so that ε would not cover it.
    """

    epsilon: PositiveFloat
    threshold: Threshold
    delta: Delta = 1e-5
    num_queries: PositiveInt = 2000
    vote_noise: PositiveFloat = 0.7
    knn_weight: UnitInterval = 0.7

    @functools.cached_property
    def budget(self) -> float:
        """ρ of each stored example."""
        return 1 / (2 * noise_multiplier_for(self.epsilon, self.delta) ** 2)

    @property
    def count_deviation(self) -> float:
        """σ₁."""
        return math.sqrt(self.num_queries / (6 * self.budget))

    @property
    def count_charge(self) -> float:
        """ρ that a voter is charged for the release of the number of voters."""
        return 1 / (2 * self.count_deviation**2)

    def can_vote(self, spent: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return whether examples with these charges ρ can vote, in the same shape.

        Examples with damaged charges, NaN, cannot.
        """
        return self.budget - spent >= self.count_charge


@dataclass(frozen=True, eq=False)
class NoisyVotes:
    """The released scores of n queries, and the charges of the N stored examples."""

    scores: NDArray[np.float64]  # s, shape (n, c)
    deviations: NDArray[np.float64]  # of the noise on each score, shape (n,)
    spent: NDArray[np.float64]  # ρ afterwards, shape (N,); secret


def normalised(embeddings: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale embeddings (n, p) to norm 1, except embeddings of zeros."""
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    unit: NDArray[np.float32] = embeddings / np.maximum(norms, np.float32(1e-30))
    return unit


def noisy_votes(
    cosines: NDArray[np.float32],
    labels: NDArray[np.int64],
    spent: NDArray[np.float64],
    num_classes: int,
    settings: PrivateAnswerSettings,
    rng: np.random.Generator,
) -> NoisyVotes:
    """Release the votes on n queries, one after the other; see the module.

    Parameters
    ----------
    cosines
        κ of each query with each stored example, shape (n, N).
    labels, spent
        Class of each stored example and its charges so far, ρ, both of shape (N,).
    num_classes
        c.
    rng
        Source of the noise. It protects only if its state is unpredictable.
    """
    spent = spent.copy()
    scores = np.empty((len(cosines), num_classes))
    deviations = np.empty(len(cosines))
    for query, row in enumerate(cosines):
        is_voter = (row >= settings.threshold) & settings.can_vote(spent)
        voters = np.flatnonzero(is_voter)
        noisy_count = len(voters) + rng.normal(0, settings.count_deviation)
        deviation = settings.vote_noise * math.sqrt(max(noisy_count, MIN_VOTERS))
        left = settings.budget - spent[voters] - settings.count_charge
        contributions = np.minimum(row[voters], deviation * np.sqrt(2 * left))
        scores[query] = np.bincount(labels[voters], contributions, num_classes)
        scores[query] += rng.normal(0, deviation, num_classes)
        deviations[query] = deviation
        # Rounding must not charge more than is left.
        vote_charges = np.minimum(contributions**2 / (2 * deviation**2), left)
        spent[voters] += settings.count_charge + vote_charges
    return NoisyVotes(scores, deviations, spent)


def mixed_probabilities(
    votes: NoisyVotes, global_probabilities: NDArray[np.float32], knn_weight: float
) -> NDArray[np.float32]:
    """Return λ p_vote + (1 - λ) p_global, shape (n, c); rows sum to 1.

    p_vote is proportional to the positive scores. Where no score exceeds `SIGNIFICANT`
    deviations of the noise, the row is p_global.
    """
    scores = np.maximum(votes.scores, 0)
    is_significant = scores.max(axis=1) > SIGNIFICANT * votes.deviations
    mixed = global_probabilities.copy()
    p_vote = scores[is_significant]
    p_vote /= p_vote.sum(axis=1, keepdims=True)
    p_global = global_probabilities[is_significant]
    mixed[is_significant] = knn_weight * p_vote + (1 - knn_weight) * p_global
    return mixed

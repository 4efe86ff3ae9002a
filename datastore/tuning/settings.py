"""How a client chooses λ, k and σ."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from knnper.config.ranges import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
)
from knnper.config.sections import Settings

CriterionName = Literal["accuracy", "log_loss", "both"]
EvidenceName = Literal["validation", "leave_one_out", "auto"]
EvidenceKind = Literal["none", "validation", "leave_one_out"]

KnnWeights = Annotated[tuple[UnitInterval, ...], Field(min_length=1)]

PAPER_KNN_WEIGHTS: KnnWeights = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""The paper's grid of λ (knn-per.txt, section 5)."""


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
class TuningSettings(Settings):
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
    min_validation
        See ``evidence``; useful from 5 to 50.
    num_neighbors_grid
        The values of k to choose from; none is to keep the one that is set.
    kernel_scale_grid
        The values of σ to choose from; none is to keep the one that is set.
    prior
        The λ that is expected, by the size of a client; none is to expect nothing.
    prior_strength
        How many scored examples the prior counts for, s; useful from 1 to 100.
    """

    criterion: CriterionName = "accuracy"
    evidence: EvidenceName = "validation"
    min_validation: PositiveInt = 50
    num_neighbors_grid: tuple[PositiveInt, ...] = ()
    kernel_scale_grid: tuple[PositiveFloat, ...] = ()
    prior: tuple[PriorPoint, ...] = ()
    prior_strength: NonNegativeFloat = 30.0

    def evidence_of(self, num_train: int, num_validation: int) -> EvidenceKind:
        """Return what is scored of a client with splits of these sizes."""
        if self.evidence != "auto":
            return self.evidence
        enough = num_train > 0 and num_validation >= self.min_validation
        return "validation" if enough else "leave_one_out"

"""Settings of a client's memory: what it stores, and how it chooses λ, k and σ.

Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local
Memorization", ICML 2022, Algorithm 1. `knnper.datastore.tuning` makes the choice,
`knnper.datastore.prediction` predicts with it.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from knnper.datastore.class_prior import ClassPriorSettings
from knnper.datastore.policy import StoreSettings
from knnper.datastore.prediction import KernelName
from knnper.seeding import RandomKey
from knnper.settings import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Settings,
    UnitInterval,
)

CriterionName = Literal["accuracy", "log_loss", "both"]
EvidenceName = Literal["validation", "leave_one_out", "auto"]
EvidenceKind = Literal["none", "validation", "leave_one_out"]
KnnWeights = Annotated[tuple[UnitInterval, ...], Field(min_length=1)]
PAPER_KNN_WEIGHTS: KnnWeights = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""The paper's grid of λ (Marfoq et al. 2022, section 5)."""


@dataclass(frozen=True)
class PriorPoint(Settings):
    """The λ expected of clients of one size.

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
    """The examples and the criterion by which a client chooses.

    Attributes
    ----------
    criterion
        ``accuracy``: the number of correct predictions. ``log_loss``: the sum of
        log p(y|x). ``both``: the number of correct predictions plus a hundredth of that
        sum, which breaks ties among few examples.
    evidence
        The examples that are scored. ``validation``: the validation split, with the
        training split in the store. ``leave_one_out``: every example of both splits,
        with all others in the store. ``auto``: ``validation`` for a client with
        training data and at least ``min_validation`` validation examples, else
        ``leave_one_out``.
    min_validation
        See ``evidence``; useful from 5 to 50.
    """

    criterion: CriterionName = "accuracy"
    evidence: EvidenceName = "validation"
    min_validation: PositiveInt = 50

    def evidence_of(self, num_train: int, num_validation: int) -> EvidenceKind:
        """Return the kind of evidence for a client with splits of these sizes."""
        if self.evidence != "auto":
            return self.evidence
        enough = num_train > 0 and num_validation >= self.min_validation
        return "validation" if enough else "leave_one_out"


@dataclass(frozen=True)
class TuningSettings(EvidenceSettings):
    """How a client chooses λ, k and σ.

    Attributes
    ----------
    num_neighbors_grid
        The values of k to choose from; empty keeps ``num_neighbors``.
    kernel_scale_grid
        The values of σ to choose from; empty keeps ``kernel_scale``.
    prior
        The expected λ by the size of a client; empty expects nothing.
    prior_strength
        s, the number of scored examples that the prior counts for; useful from 1 to
        100.
    """

    num_neighbors_grid: tuple[PositiveInt, ...] = ()
    kernel_scale_grid: tuple[PositiveFloat, ...] = ()
    prior: tuple[PriorPoint, ...] = ()
    prior_strength: NonNegativeFloat = 30.0


@dataclass(frozen=True)
class KnnSettings(Settings):
    """The local memory and its part in the prediction.

    Attributes
    ----------
    num_neighbors
        k; 10 in the paper, where 7 to 14 make little difference on CIFAR-10 and 5 to
        12 on CIFAR-100 (section 6, Figure 5).
    kernel
        ``paper``: exp(-d/σ), Eq. 6. ``squared``: exp(-d²/(p σ)), as in the public
        reference implementation.
    kernel_scale
        σ; of little effect in the paper from 0.1 to 100 on CIFAR-10 and from 1 to 100
        on CIFAR-100 (section 6); Appendix B says from 0.1 to 1000 (Figure 7).
    knn_weights
        The values of λ that a client chooses from, [0, 1]; the default is the paper's
        grid (section 5). 0 is the global model alone, 1 the neighbours alone. A single
        value fixes λ for every client. To several values 0 is always added.
    tuning
        How a client chooses λ, k and σ.
    class_prior
        How the global model is adapted to the client's own class frequencies, if that
        scores no worse; off by default, as in the paper.
    store
        What the store keeps, and how it is searched; everything, exactly, by default.
    """

    num_neighbors: PositiveInt = 10
    kernel: KernelName = "paper"
    kernel_scale: PositiveFloat = 1.0
    knn_weights: KnnWeights = PAPER_KNN_WEIGHTS
    tuning: TuningSettings = field(default_factory=TuningSettings)
    class_prior: ClassPriorSettings = field(default_factory=ClassPriorSettings)
    store: StoreSettings = field(default_factory=StoreSettings)


def default_memory() -> KnnSettings:
    """Return the settings of the memory where an experiment does not set them."""
    return KnnSettings(tuning=TuningSettings(evidence="auto"))


def store_settings_of(settings: KnnSettings, rng: RandomKey) -> StoreSettings:
    """Return a client's store settings, with a seed that no other client has."""
    seed = rng.child("store", settings.store.seed).entropy(num_bytes=7)
    return replace(settings.store, seed=seed)

"""What a client's memory is made of, how it is filled, and how λ, k and σ are chosen.

Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local
Memorization", ICML 2022, Algorithm 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from knnper.datastore.examples import NewExamples
from knnper.datastore.policy import StoreSettings
from knnper.datastore.prediction import (
    KERNELS,
    ClassPriorSettings,
    KernelName,
    KnnPredictor,
    NeighborClassifier,
    class_ratios,
    count_labels,
)
from knnper.datastore.store import Store, StoreReader
from knnper.datastore.tuning import (
    CRITERIA,
    PAPER_KNN_WEIGHTS,
    Candidates,
    Evidence,
    EvidenceKind,
    KnnWeights,
    Queries,
    TunedParameters,
    TuningSettings,
    candidates,
    choose,
    choose_class_prior,
    held_out,
    left_one_out,
    no_evidence,
    prior_of_size,
)
from knnper.experiment import PositiveFloat, PositiveInt, Settings
from knnper.seeding import RandomKey

Apply = Callable[[Tensor], Tensor]
"""φ, from inputs (n, ...) to (n, p), or the head, from (n, p) to (n, c)."""


def validation_evidence(
    store: StoreReader,
    validation: NewExamples,
    head: Apply,
    num_neighbors: int,
    class_prior: ClassPriorSettings,
) -> Evidence:
    """Return the evidence of a split that is not stored."""
    counts = count_labels(store.contents(), store.num_classes)
    queries = _queries(validation, head, counts, class_prior)
    return held_out(store, queries, num_neighbors)


def left_out_evidence(
    store: StoreReader,
    positions: Tensor,
    head: Apply,
    num_neighbors: int,
    class_prior: ClassPriorSettings,
) -> Evidence:
    """Return the evidence of stored examples, by leave-one-out.

    Each is looked up among all others, and the class prior comes from all others.
    """
    contents = store.contents()
    ids = contents.ids[positions.numpy()]
    labels = torch.from_numpy(contents.labels)[positions]
    counts = count_labels(contents, store.num_classes)
    own = torch.nn.functional.one_hot(labels, store.num_classes)
    stored = NewExamples(store.vectors(ids), labels)
    queries = _queries(stored, head, counts - own, class_prior)
    return left_one_out(store, queries, torch.from_numpy(ids), num_neighbors)


def _queries(
    examples: NewExamples,
    head: Apply,
    label_counts: Tensor,
    class_prior: ClassPriorSettings,
) -> Queries:
    adapts = bool(class_prior.strengths)
    return Queries(
        examples.embeddings,
        head(examples.embeddings),
        examples.labels,
        class_ratios(label_counts, class_prior) if adapts else None,
    )


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
        value is every client's λ. Several are a choice, of which 0 is always a part.
    tuning
        How it chooses.
    class_prior
        How the global model is adapted to the client's own shares of the classes,
        where that scores no worse; not at all by default, as in the paper.
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

    def candidates(self) -> Candidates:
        """Return what a client chooses from."""
        return candidates(
            self.knn_weights,
            self.tuning.num_neighbors_grid or (self.num_neighbors,),
            self.tuning.kernel_scale_grid or (self.kernel_scale,),
        )

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to choose: one λ, k and σ, and no class prior."""
        return self.candidates().shape == (1, 1, 1) and not self.class_prior.strengths

    def evidence_of(self, num_train: int, num_validation: int) -> EvidenceKind:
        """Return what a client with splits of these sizes chooses on."""
        if self.is_fixed:
            return "none"
        return self.tuning.evidence_of(num_train, num_validation)

    def candidates_without_evidence(self) -> Candidates:
        """Return what a client chooses from that can score nothing: λ alone."""
        all_of_them = self.candidates()
        counts, scales = all_of_them.num_neighbors, all_of_them.kernel_scales
        return candidates(
            self.knn_weights,
            counts if len(counts) == 1 else (self.num_neighbors,),
            scales if len(scales) == 1 else (self.kernel_scale,),
        )


def default_memory() -> KnnSettings:
    """Return how a client remembers where an experiment does not say."""
    return KnnSettings(tuning=TuningSettings(evidence="auto"))


@dataclass(frozen=True)
class Tuned:
    """What a client chose, and on what."""

    choice: TunedParameters  # λ, k, σ and the class prior
    kind: EvidenceKind  # What was scored
    evidence: Evidence  # The examples that were; none where nothing could be

    def predictor(
        self, embed: Apply, head: Apply, store: StoreReader, settings: KnnSettings
    ) -> KnnPredictor:
        """Return what is served with the global model's φ and head, and a store."""
        choice, kernel = self.choice, settings.kernel
        neighbors = NeighborClassifier(
            store, choice.num_neighbors, kernel, choice.kernel_scale
        )
        prior, report = choice.class_prior, self._report(settings)
        return KnnPredictor(embed, head, neighbors, choice.knn_weight, prior, report)

    def _report(self, settings: KnnSettings) -> Mapping[str, float]:
        """Return on how many examples was chosen, and what was beside λ."""
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
    """Fill an empty store of any kind with a client's data, and choose λ, k and σ.

    Leave-one-out is of all that is stored, or of ``most_left_out`` examples.
    """
    kind = settings.evidence_of(len(train), len(validation))
    most_neighbors = max(settings.candidates().num_neighbors)
    prior = settings.class_prior
    evidence = no_evidence(store.num_classes)
    store.add(train)
    if kind == "validation":
        # λ is scored on what the store does not hold yet.
        evidence = validation_evidence(store, validation, head, most_neighbors, prior)
    store.add(validation)
    if kind == "leave_one_out":
        asked = evenly_spread(len(store), most_left_out)
        evidence = left_out_evidence(store, asked, head, most_neighbors, prior)
    return Tuned(choose_on(evidence, len(store), settings), kind, evidence)


def evenly_spread(count: int, most: int | None = None) -> Tensor:
    """Return positions in [0, count), at most ``most``, ascending, int64."""
    if most is None or count <= most:
        return torch.arange(count)
    return torch.linspace(0, count - 1, most).round().long()


def store_settings_of(settings: KnnSettings, rng: RandomKey) -> StoreSettings:
    """Return a client's store settings, with a seed that no other client has."""
    seed = rng.child("store", settings.store.seed).entropy(num_bytes=7)
    return replace(settings.store, seed=seed)


def choose_on(
    evidence: Evidence, num_stored: int, settings: KnnSettings
) -> TunedParameters:
    """Return what a client that stores so many examples chooses."""
    tuning, from_what = settings.tuning, settings.candidates()
    if len(evidence) == 0:
        from_what = settings.candidates_without_evidence()
    prior = prior_of_size(tuning.prior, tuning.prior_strength, num_stored)
    class_prior = choose_class_prior(evidence, settings.class_prior)
    kernel, criterion = KERNELS[settings.kernel], CRITERIA[tuning.criterion]
    return choose(evidence, from_what, kernel, criterion, prior, class_prior)

"""kNN-Per: the global model and a local memory, mixed at each client.

Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local
Memorization", ICML 2022, Algorithm 1 (knn-per.txt).
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from datastore.examples import NewExamples, StoreSpec
from datastore.memory import memory_store
from datastore.prediction.classifier import NeighborClassifier
from datastore.prediction.kernel import KERNELS, KernelName
from datastore.prediction.predictor import KnnPredictor
from datastore.settings import StoreSettings, require_settings
from datastore.store import Store
from datastore.tuning.candidates import Candidates, Choice, candidates
from datastore.tuning.choice import choose
from datastore.tuning.evidence import (
    Evidence,
    Queries,
    held_out,
    left_one_out,
    no_evidence,
)
from datastore.tuning.prior import prior_of_size
from datastore.tuning.scores import CRITERIA
from datastore.tuning.settings import (
    PAPER_KNN_WEIGHTS,
    EvidenceKind,
    KnnWeights,
    TuningSettings,
)
from knnper.config.ranges import PositiveFloat, PositiveInt
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from knnper.data.examples import ClientData
from strategies.core.method import Method, MethodSpec, NoSettings
from strategies.core.records import ModelPayload, NoState
from strategies.core.task import Task
from strategies.fedavg import fedavg


@dataclass(frozen=True)
class KnnSettings(Settings):
    """The local memory and its part in the prediction.

    Attributes
    ----------
    num_neighbors
        k; 10 in the paper, where 7 to 14 make little difference (Figure 5).
    kernel
        ``paper``: exp(-d/σ), Eq. 6. ``squared``: exp(-d²/(p σ)), as in the public
        reference implementation.
    kernel_scale
        σ; anything from 0.1 to 1000 makes little difference (Appendix B).
    knn_weights
        The values of λ that a client chooses from, [0, 1]; the default is the paper's
        grid (section 5). 0 is the global model alone, 1 the neighbours alone. A single
        value is every client's λ. Several are a choice, of which 0 is always a part.
    tuning
        How it chooses.
    store
        What the store keeps, and how it is searched; everything, exactly, by default.
    """

    num_neighbors: PositiveInt = 10
    kernel: KernelName = "paper"
    kernel_scale: PositiveFloat = 1.0
    knn_weights: KnnWeights = PAPER_KNN_WEIGHTS
    tuning: TuningSettings = field(default_factory=TuningSettings)
    store: StoreSettings = field(default_factory=StoreSettings)

    def candidates(self) -> Candidates:
        """Return what a client chooses from."""
        return candidates(
            self.knn_weights,
            self.tuning.num_neighbors_grid or (self.num_neighbors,),
            self.tuning.kernel_scale_grid or (self.kernel_scale,),
        )

    def evidence_of(self, num_train: int, num_validation: int) -> EvidenceKind:
        """Return what a client with splits of these sizes chooses on."""
        if self.candidates().is_fixed:
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


def knn_per(task: Task, settings: NoSettings, personalization: KnnSettings) -> Method:
    """Return FedAvg on ``task`` with a local memory at each client.

    Raises
    ------
    ConfigError
        If the store's settings do not go together, or with the embeddings.
    """
    spec = StoreSpec(task.spec.num_classes)
    require_settings(personalization.store, spec, task.model.module.embedding_dim)

    def personalize(
        payload: ModelPayload,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> KnnPredictor:
        return memorize(task, payload.weights, data, personalization, rng)

    return replace(fedavg(task, settings, NoSettings()), personalize=personalize)


def memorize(
    task: Task,
    weights: Tensor,
    data: ClientData,
    settings: KnnSettings,
    rng: RandomKey,
) -> KnnPredictor:
    """Return the predictor of a client that remembers ``data``.

    λ, and k and σ where they are tuned, are chosen on the validation split with only
    the training split in the store, or by leave-one-out; see `TuningSettings`. The
    store that is served holds both splits, as the paper retrains on both (section 5).

    Parameters
    ----------
    task
        Gives φ and the global model.
    weights
        w of the global model, shape (num_weights,).
    data
        The client's training and validation splits; each image is embedded once.
    settings
        k, kernel, σ, the grid of λ, how to choose, and the store.
    rng
        Root of what a store's policy leaves to chance, with the policy's own seed.
    """
    embed = functools.partial(task.embed, weights)
    head = functools.partial(task.head, weights)
    train, validation = (
        _Embedded(embed(split.images), split.labels)
        for split in (data.train, data.validation)
    )
    kind = settings.evidence_of(len(data.train), len(data.validation))
    most = max(settings.candidates().num_neighbors)
    evidence = no_evidence(task.spec.num_classes)
    store = memory_store(
        train.embeddings,
        train.labels,
        task.spec.num_classes,
        replace(settings.store, seed=_seed(settings.store, rng)),
    )
    if kind == "validation":
        evidence = held_out(store, validation.queries(head), most)
    store.add(NewExamples(validation.embeddings, validation.labels))
    if kind == "leave_one_out":
        evidence = _left_one_out(store, head, most)
    choice = _choose(evidence, len(store), settings)
    return KnnPredictor(
        embed=embed,
        head=head,
        neighbors=NeighborClassifier(
            store, choice.num_neighbors, settings.kernel, choice.kernel_scale
        ),
        knn_weight=choice.knn_weight,
        tuning=_report(choice, kind, len(evidence), settings.tuning),
    )


@dataclass(frozen=True)
class _Embedded:
    """Representations (n, p) and labels (n,) of a split."""

    embeddings: Tensor
    labels: Tensor

    def queries(self, head: Callable[[Tensor], Tensor]) -> Queries:
        """Return them with the global model's probabilities."""
        return Queries(self.embeddings, head(self.embeddings), self.labels)


def _seed(store: StoreSettings, rng: RandomKey) -> int:
    return rng.child("store", store.seed).entropy(num_bytes=7)


def _left_one_out(
    store: Store, head: Callable[[Tensor], Tensor], num_neighbors: int
) -> Evidence:
    """Return the evidence of all that is stored."""
    contents = store.contents()
    stored = _Embedded(store.vectors(contents.ids), torch.from_numpy(contents.labels))
    ids = torch.from_numpy(contents.ids)
    return left_one_out(store, stored.queries(head), ids, num_neighbors)


def _choose(evidence: Evidence, num_stored: int, settings: KnnSettings) -> Choice:
    tuning = settings.tuning
    prior = prior_of_size(tuning.prior, tuning.prior_strength, num_stored)
    from_what = (
        settings.candidates()
        if len(evidence) > 0
        else settings.candidates_without_evidence()
    )
    criterion = CRITERIA[tuning.criterion]
    return choose(evidence, from_what, KERNELS[settings.kernel], criterion, prior)


def _report(
    choice: Choice, kind: EvidenceKind, num_scored: int, tuning: TuningSettings
) -> Mapping[str, float]:
    """Return on how many examples was chosen, and k and σ where they were."""
    report = {
        "num_held_out": float(num_scored if kind == "validation" else 0),
        "num_left_out": float(num_scored if kind == "leave_one_out" else 0),
    }
    if tuning.num_neighbors_grid:
        report["num_neighbors"] = float(choice.num_neighbors)
    if tuning.kernel_scale_grid:
        report["kernel_scale"] = choice.kernel_scale
    return report


SPEC = MethodSpec(
    title="kNN-Per",
    summary="The global model and each client's nearest stored examples, mixed.",
    source="Marfoq et al. 2022, Algorithm 1; knn-per.txt Eq. 3-7",
    build=knn_per,
    upload="1",
    download="1",
    client_state="0",
    unseen="the global model and the client's own store",
    reference_title="FedAvg",
    personalization_type=KnnSettings,
)

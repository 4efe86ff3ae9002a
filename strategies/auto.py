"""Auto: each client weights several personalisations by its own evidence.

A client fits every candidate m of M on all of its data to serve it. To score it, the
client also fits it five times on four fifths of the data and predicts the remaining
fifth (cross-validation). It serves the mixture

    p(y|x) = Σ_m w_m p_m(y|x),    w_m ∝ exp(s_m)

where s_m is the sum of the scores of candidate m over the held-out examples. With the
criterion ``log_loss`` that is log p_m(y|x), and the weights are those of pseudo-BMA
(Yao, Vehtari, Simpson, Gelman, "Using Stacking to Average Bayesian Predictive
Distributions", Bayesian Analysis 2018). With ``accuracy`` and ``both`` they are
exponential weights of temperature 1 (Dalalyan, Tsybakov, "Aggregation by Exponential
Weighting, Sharp PAC-Bayesian Bounds and Sparsity", Machine Learning 2008). Both put the
weight on one candidate if the evidence is clear, and spread it over several if there
are few examples, since the largest of several noisy scores is a poor choice.

Departures from pseudo-BMA: five folds in place of approximate leave-one-out, and a
candidate with less than a hundredth of the weight is dropped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import Field, PlainValidator
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData
from knnper.datastore.class_prior import ClassPriorSettings
from knnper.datastore.memory import (
    CriterionName,
    EvidenceName,
    EvidenceSettings,
    KnnSettings,
    PriorPoint,
    TuningSettings,
)
from knnper.datastore.tuning import CRITERIA
from knnper.errors import Problem
from knnper.experiment import Experiment
from knnper.seeding import RandomKey
from knnper.settings import Choice, SectionReader, Settings
from knnper.strategies.core.method import AsItIs, Method, Personalizer
from knnper.strategies.core.predictors import Predictor
from knnper.strategies.core.task import Task
from knnper.strategies.fine_tuning import FineTuning, FineTuningSettings, LinearProbe
from knnper.strategies.knn_fine_tuned import FineTunedMemory
from knnper.strategies.knn_per import KnnMemory

CANDIDATES: Mapping[str, type[Personalizer]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (AsItIs, KnnMemory, FineTuning, LinearProbe, FineTunedMemory)
    }
)
"""The possible candidates by name; none of them changes the rounds."""

NUM_FOLDS = 5
SMALLEST_WEIGHT = 0.01


def _candidate(section: object) -> Choice[Settings]:
    """Parse a section of the form of ``personalization``."""
    if isinstance(section, Choice):
        return section
    problems = list[Problem]()
    types = {name: kind.settings_type for name, kind in CANDIDATES.items()}
    choice = SectionReader({}, (), problems).choice(
        "candidate", types, value=section or {}
    )
    if choice is None:
        raise ValueError("; ".join(map(str, problems)))
    return choice


def default_candidates() -> tuple[Choice[Settings], ...]:
    """Return the global model, a memory, the class prior and fine-tuning."""
    memory = KnnSettings(
        tuning=TuningSettings(criterion="both", evidence="leave_one_out")
    )
    class_prior = KnnSettings(
        class_prior=ClassPriorSettings(
            strengths=(1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
            sharpness=(1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
        ),
        tuning=TuningSettings(
            criterion="both",
            evidence="leave_one_out",
            prior=(PriorPoint(num_examples=1, knn_weight=0.0),),
            prior_strength=6.0,
        ),
    )
    return (
        Choice("none", AsItIs.settings_type()),
        Choice("knn", class_prior),
        Choice("knn", memory),
        Choice("fine_tuning", FineTuningSettings(num_epochs=5)),
    )


@dataclass(frozen=True)
class AutoSettings(EvidenceSettings):
    """The candidates, and the evidence by which a client weights them.

    Attributes
    ----------
    criterion
        The score of an example. ``accuracy``: 1 if correct. ``log_loss``: log p(y|x).
        ``both``: 1 if correct, plus a hundredth of log p(y|x).
    evidence
        The examples that are scored. ``validation``: the validation split.
        ``leave_one_out``: both splits. ``auto``: ``validation`` for a client with
        training data and at least ``min_validation`` validation examples, else
        ``leave_one_out``.
    candidates
        Two or more sections of the form of ``personalization``: `none`, `knn`,
        `fine_tuning`, `linear_probe` or `knn_fine_tuned`. By default the global model,
        a memory, a memory with the class prior, and five epochs of fine-tuning.
    """

    criterion: CriterionName = "both"
    evidence: EvidenceName = "auto"
    candidates: Annotated[
        tuple[Annotated[Choice[Settings], PlainValidator(_candidate)], ...],
        Field(min_length=1),
    ] = field(default_factory=default_candidates)

    def labels(self) -> list[str]:
        """Return the candidates' names, with numbers for repeated ones: ``knn_2``."""
        names = [candidate.name for candidate in self.candidates]
        earlier = [names[:place].count(name) for place, name in enumerate(names)]
        return [
            f"{name}_{count + 1}" if count else name
            for name, count in zip(names, earlier, strict=True)
        ]


@dataclass(frozen=True)
class WeightedPredictor:
    """Serves Σ_m w_m p_m."""

    predictors: Sequence[Predictor]
    weights: Sequence[float]  # w, summing to 1
    chosen: Mapping[str, float]

    def __call__(self, images: Tensor) -> Tensor:
        """Return the mixture's probabilities, shape (n, c), of uint8 images."""
        pairs = zip(self.weights, self.predictors, strict=True)
        return torch.stack(
            [weight * predictor(images) for weight, predictor in pairs]
        ).sum(dim=0)

    def describe(self) -> Mapping[str, float]:
        """Return weights, scores and the number of examples behind them."""
        return self.chosen


class Auto(Personalizer):
    """Several personalisations, weighted by how each does on the client's own data."""

    title = "Auto"
    source = "Yao et al. 2018; Dalalyan and Tsybakov 2008"
    unseen = "weighs the candidates like any other client"
    needs_one_model = True
    trains = True

    settings: AutoSettings

    def __init__(self, task: Task, method: Method, settings: AutoSettings) -> None:
        super().__init__(task, method, settings)
        self.candidates = [
            CANDIDATES[candidate.name](task, method, candidate.settings)
            for candidate in settings.candidates
        ]

    @staticmethod
    @override
    def check(settings: AutoSettings, experiment: Experiment) -> Sequence[Problem]:
        checks = [
            CANDIDATES[candidate.name].check(candidate.settings, experiment)
            for candidate in settings.candidates
        ]
        return [problem for problems in checks for problem in problems]

    @override
    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> Predictor:
        if data.num_examples == 0:
            return super().personalize(payload, client_state, data, rng)

        def fitted(on: ClientData, key: RandomKey) -> list[Predictor]:
            return [
                candidate.personalize(payload, client_state, on, key)
                for candidate in self.candidates
            ]

        served = fitted(data, rng)
        if len(served) == 1:
            return served[0]
        num_train = len(data.train)
        kind = self.settings.evidence_of(num_train, len(data.validation))
        both, scores = data.train_and_validation(), torch.zeros(len(served)).double()
        positions = torch.arange(len(both))
        scored = positions[num_train if kind == "validation" else 0 :]
        for fold in range(min(NUM_FOLDS, len(scored))):
            # Every fifth example, since files may be sorted by class.
            fold_positions = scored[fold::NUM_FOLDS]
            other_positions = positions[~torch.isin(positions, fold_positions)]
            splits = (
                other_positions[other_positions < num_train],
                other_positions[other_positions >= num_train],
            )
            learned = ClientData(*(both.take(split) for split in splits))
            held_out = both.take(fold_positions)
            fold_predictors = fitted(learned, rng.child("fold", fold))
            scores += torch.stack(
                [
                    self._score(predictor(held_out.images), held_out.labels)
                    for predictor in fold_predictors
                ]
            )
        weights = torch.softmax(scores, dim=0)
        weights = weights.where(weights >= SMALLEST_WEIGHT, 0.0)
        weights /= weights.sum()
        used = [place for place, weight in enumerate(weights) if weight > 0]
        labels, is_validation = self.settings.labels(), kind == "validation"
        chosen = {
            "num_held_out": float(len(scored)) if is_validation else 0.0,
            "num_left_out": 0.0 if is_validation else float(len(scored)),
            **{
                f"weight_of_{n}": float(w) for n, w in zip(labels, weights, strict=True)
            },
            **{f"score_of_{n}": float(s) for n, s in zip(labels, scores, strict=True)},
        }
        return WeightedPredictor(
            [served[place] for place in used],
            [float(weights[place]) for place in used],
            chosen,
        )

    def _score(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of a candidate's scores, float64 of shape ()."""
        criterion, alone = CRITERIA[self.settings.criterion], torch.zeros(1).double()
        (total,) = criterion(probabilities, probabilities, labels, alone)
        is_finite = bool(torch.isfinite(probabilities).all())
        return total if is_finite else torch.tensor(-math.inf).double()

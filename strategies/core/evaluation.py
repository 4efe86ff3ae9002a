"""The evaluation of predictors, and the results of clients.

All methods, engines and reports use `evaluate` and `score`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from knnper.data.examples import Examples
from knnper.metrics import Compute
from knnper.strategies.core.predictors import Predictor

NUM_CALIBRATION_BINS = 15


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a predictor on labelled examples, as sums that can be pooled."""

    num_examples: int
    num_correct: int
    log_loss_sum: float  # Σ -log p(y|x), natural logarithm, p clipped at 1e-12
    # Calibration (Guo et al., "On Calibration of Modern Neural Networks", 2017, Eq. 3):
    # examples, sum of the largest probabilities and correct examples in each of 15
    # equal bins of confidence over [0, 1].
    bin_counts: tuple[int, ...]
    bin_confidence: tuple[float, ...]
    bin_correct: tuple[int, ...]
    # Σ_i P(y_i) over all examples and over the correct examples, if labels have weights
    # P(y); both None if all examples count the same.
    weight_sum: float | None = None
    weight_correct: float | None = None
    # The metrics of `run.metrics` by name; None is undefined on these examples.
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct examples; None without examples.

        With label weights P(y) it is Σ_i P(y_i) 1[correct] / Σ_i P(y_i), the
        personalised accuracy of Chen et al. 2023, section 5, step 5, and None if all
        labels have weight 0.
        """
        if self.weight_sum is not None and self.weight_correct is not None:
            return self.weight_correct / self.weight_sum if self.weight_sum else None
        return self.num_correct / self.num_examples if self.num_examples else None


@dataclass(frozen=True)
class ClientResult:
    """The results of one client: counts and metrics only, no data."""

    client: str  # the client's name
    seen: bool  # whether it could take part in training
    num_train: int  # training examples
    num_validation: int
    personal: Evaluation  # the personalised model on the test split
    reference: Evaluation  # the unpersonalised (global) model on the test split
    validation: Evaluation  # the unpersonalised model on the validation split
    # The choices made for this client, as in ``{"knn_weight": 0.7}``.
    chosen: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation:
    """Metrics of clients on their validation splits between two rounds."""

    reference: Evaluation  # the unpersonalised model
    # Examples and correct examples of the personalised models. A site sends no more
    # than these counts.
    num_personal: int = 0
    num_personal_correct: int = 0
    # The reason by name of each client that could not be personalised.
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientResults:
    """Results of several clients that were personalised in one task."""

    results: tuple[ClientResult, ...]  # in the order of the request, without failures
    # The reason by name of each client that could not be personalised.
    failures: Mapping[str, str] = field(default_factory=dict)
    # Clients that are served but share no metrics.
    withheld: tuple[str, ...] = ()


def evaluate(predictor: Predictor, examples: Examples) -> Evaluation:
    """Evaluate a predictor on labelled examples."""
    return score(predict(predictor, examples), examples.labels)


def predict(predictor: Predictor, examples: Examples) -> Tensor:
    """Predict the probabilities of examples, float32 of shape (n, c)."""
    # Not every predictor accepts an empty batch.
    return predictor(examples.images) if len(examples) else torch.empty((0, 0))


def score(
    probabilities: Tensor,
    labels: Tensor,
    class_weights: Tensor | None = None,
    metrics: Mapping[str, Compute] = MappingProxyType({}),
) -> Evaluation:
    """Evaluate probabilities (n, c) against int64 labels (n,).

    ``class_weights``: P(y), shape (c,), or None for equal weights. ``metrics``: further
    metrics to compute, by name, with equal weights.
    """
    if len(labels) == 0:
        empty = (0,) * NUM_CALIBRATION_BINS
        return Evaluation(0, 0, 0.0, empty, (0.0,) * NUM_CALIBRATION_BINS, empty)
    # A row that is not finite counts as wrong, with confidence 0.
    probabilities = probabilities.double()
    defined = torch.isfinite(probabilities).all(dim=1)
    probabilities = probabilities.where(defined[:, None], 0.0)
    confidence, predicted = probabilities.max(dim=1)
    correct = (predicted == labels) & defined
    of_label = probabilities.gather(1, labels[:, None]).squeeze(1)
    confidences = torch.zeros(NUM_CALIBRATION_BINS, dtype=torch.float64)
    bins = (confidence * NUM_CALIBRATION_BINS).long().clamp(0, NUM_CALIBRATION_BINS - 1)
    return Evaluation(
        num_examples=len(labels),
        num_correct=int(correct.sum()),
        log_loss_sum=float(-of_label.clamp_min(1e-12).log().sum()),
        bin_counts=tuple(_counts(bins, NUM_CALIBRATION_BINS).tolist()),
        bin_confidence=tuple(confidences.index_add_(0, bins, confidence).tolist()),
        bin_correct=tuple(_counts(bins[correct], NUM_CALIBRATION_BINS).tolist()),
        weight_sum=_weight_of(labels, class_weights),
        weight_correct=_weight_of(labels[correct], class_weights),
        metrics={
            name: compute(labels.numpy(), probabilities.numpy())
            for name, compute in metrics.items()
        },
    )


def _counts(values: Tensor, num_kinds: int) -> Tensor:
    return torch.bincount(values, minlength=num_kinds)


def _weight_of(labels: Tensor, class_weights: Tensor | None) -> float | None:
    """Return Σ_i P(y_i), independent of the order of the labels."""
    if class_weights is None:
        return None
    counts = _counts(labels, len(class_weights))
    return math.fsum((counts * class_weights).tolist())

"""What clients serve, the one evaluation function, and what a client reports."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from knnper.data.examples import Examples
from knnper.strategies.core.task import Task

NUM_CALIBRATION_BINS = 15


class Predictor(Protocol):
    """What a client serves once it is personalised."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, num_classes); rows sum to 1.

        ``images``: uint8, shape (n, height, width, channels).
        """

    def describe(self) -> Mapping[str, float]:
        """Return what was chosen for this client, as in ``{"knn_weight": 0.7}``."""


@runtime_checkable
class EmbeddingPredictor(Predictor, Protocol):
    """A predictor with a representation, on which a local memory can be put."""

    def embed(self, images: Tensor) -> Tensor:
        """Return φ(x), float32 of shape (n, p), of uint8 images."""

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the probabilities (n, c) of representations (n, p)."""

    def without_validation(self) -> "EmbeddingPredictor":
        """Return what this would be without training on the validation split."""


@dataclass(frozen=True)
class Evaluation:
    """How a predictor did on some labelled examples: sums that can be pooled."""

    num_examples: int
    num_correct: int
    log_loss_sum: float  # Σ -log p(y|x), natural logarithm, p clipped at 1e-12
    # bin_counts, bin_confidence, bin_correct: Per bin of confidence (15 equal widths
    # over [0, 1]): examples, sum of the largest probability, correct examples. Guo et
    # al., "On Calibration of Modern Neural Networks", 2017, Eq. 3.
    bin_counts: tuple[int, ...]
    bin_confidence: tuple[float, ...]
    bin_correct: tuple[int, ...]
    # weight_sum, weight_correct: Σ_i P(y_i) over all examples and over those that are
    # right, where labels count P(y); both None where all examples count the same.
    weight_sum: float | None = None
    weight_correct: float | None = None

    @property
    def accuracy(self) -> float | None:
        """The fraction that is right; None without examples.

        Where labels count P(y) it is Σ_i P(y_i) 1[right] / Σ_i P(y_i), the personalised
        accuracy of Chen et al. 2023, section 5, step 5. It is None where the
        examples have no label that counts.
        """
        if self.weight_sum is not None and self.weight_correct is not None:
            return self.weight_correct / self.weight_sum if self.weight_sum else None
        return self.num_correct / self.num_examples if self.num_examples else None


@dataclass(frozen=True)
class ClientResult:
    """What is known of a client in the end. Counts and metrics only."""

    client: str  # The client's name
    seen: bool  # Whether it could take part in training
    num_train: int  # Examples it learns from
    num_validation: int
    # personal, reference: On the test split: its personalised model, and the
    # unpersonalised (global) one.
    personal: Evaluation
    reference: Evaluation
    validation: Evaluation  # The unpersonalised model on the validation split
    # What the method chose for this client, as in ``{"knn_weight": 0.7}``.
    chosen: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientResults:
    """What several clients that were served together report."""

    # One a client, in the order in which they were asked, but for the failures.
    results: tuple[ClientResult, ...]
    # Why, by name, of the clients that could not be served.
    failures: Mapping[str, str] = field(default_factory=dict)
    # Clients that are served and keep the figures to themselves.
    withheld: tuple[str, ...] = ()


def evaluate(
    predictor: Predictor, examples: Examples, class_weights: Tensor | None = None
) -> Evaluation:
    """Return how ``predictor`` does on ``examples``.

    ``class_weights``: P(y), what an example of each label counts, float64 of shape
    (c,); None where all count the same.
    """
    # Without examples nothing is asked: not every predictor knows what to say to that.
    probabilities = predictor(examples.images) if len(examples) else torch.empty((0, 0))
    return score(probabilities, examples.labels, class_weights)


def score(
    probabilities: Tensor, labels: Tensor, class_weights: Tensor | None = None
) -> Evaluation:
    """Return how probabilities (n, c) fit int64 labels (n,).

    ``class_weights`` are as in `evaluate`.
    """
    if len(labels) == 0:
        empty = (0,) * NUM_CALIBRATION_BINS
        return Evaluation(0, 0, 0.0, empty, (0.0,) * NUM_CALIBRATION_BINS, empty)
    # What is not finite predicts nothing: it counts as wrong, with no confidence.
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
    )


def _counts(values: Tensor, num_kinds: int) -> Tensor:
    return torch.bincount(values, minlength=num_kinds)


def _weight_of(labels: Tensor, class_weights: Tensor | None) -> float | None:
    """Return Σ_i P(y_i), the same whatever the order of the labels."""
    if class_weights is None:
        return None
    counts = _counts(labels, len(class_weights))
    return math.fsum((counts * class_weights).tolist())


class Trained:
    """What a predictor tells of its training; a dataclass with these fields."""

    # What was chosen for this client, as in ``{"prox_weight": 0.1}``.
    chosen: Mapping[str, float]
    # Makes the predictor that was trained without the validation split; None where this
    # one was.
    trained_alone: Callable[[], Self] | None

    def without_validation(self) -> Self:
        """Return the predictor before it was trained on the validation split."""
        return self if self.trained_alone is None else self.trained_alone()

    def describe(self) -> Mapping[str, float]:
        """Return what was chosen."""
        return self.chosen


@dataclass(frozen=True)
class MixturePredictor(Trained):
    """Serves Σ_m π_m h_m."""

    task: Task  # Gives the architecture
    components: Sequence[Tensor]  # M tensors of shape (num_weights,)
    mixture_weights: Tensor  # π, shape (M,), summing to 1
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], MixturePredictor] | None" = None

    def __call__(self, images: Tensor) -> Tensor:
        """Return Σ_m π_m h_m(x), shape (n, c), of uint8 images."""
        return self.head(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        """Return the components' representations side by side, shape (n, M p)."""
        parts = [self.task.embed(weights, images) for weights in self.components]
        return torch.cat(parts, dim=1)

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the mixture's probabilities (n, c) of representations (n, M p)."""
        parts = embeddings.tensor_split(len(self.components), dim=1)
        mixed = [
            share * self.task.head(weights, part)
            for share, weights, part in zip(
                self.mixture_weights, self.components, parts, strict=True
            )
        ]
        return torch.stack(mixed).sum(dim=0)


@dataclass(frozen=True)
class ModelPredictor(Trained):
    """Serves h_w."""

    task: Task  # Gives the architecture
    weights: Tensor  # w, shape (num_weights,)
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], ModelPredictor] | None" = None

    def __call__(self, images: Tensor) -> Tensor:
        """Return h_w(x), shape (n, c), of uint8 images (n, height, width, channels)."""
        return self.task.probabilities(self.weights, images)

    def embed(self, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p)."""
        return self.task.embed(self.weights, images)

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the probabilities (n, c) of representations (n, p)."""
        return self.task.head(self.weights, embeddings)

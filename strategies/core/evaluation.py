"""The one evaluation function, and what a client reports of itself."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from knnper.data.examples import Examples
from strategies.core.method import Predictor

NUM_CALIBRATION_BINS = 15


@dataclass(frozen=True)
class Evaluation:
    """How a predictor did on some labelled examples: sums that can be pooled.

    Attributes
    ----------
    num_examples, num_correct
        Counts.
    log_loss_sum
        Σ -log p(y|x), natural logarithm, p clipped at 1e-12.
    bin_counts, bin_confidence, bin_correct
        Per bin of confidence (15 equal widths over [0, 1]): examples, sum of the
        largest probability, correct examples. Guo et al., "On Calibration of Modern
        Neural Networks", 2017, Eq. 3.
    weight_sum, weight_correct
        Σ_i P(y_i) over all examples and over those that are right, where labels count
        P(y); both None where all examples count the same.
    """

    num_examples: int
    num_correct: int
    log_loss_sum: float
    bin_counts: tuple[int, ...]
    bin_confidence: tuple[float, ...]
    bin_correct: tuple[int, ...]
    weight_sum: float | None = None
    weight_correct: float | None = None

    @property
    def accuracy(self) -> float | None:
        """The fraction that is right; None without examples.

        Where labels count P(y) it is Σ_i P(y_i) 1[right] / Σ_i P(y_i), the personalised
        accuracy of fedbasis-pflbed.txt, section 5, step 5. It is None where the
        examples have no label that counts.
        """
        if self.weight_sum is not None and self.weight_correct is not None:
            return self.weight_correct / self.weight_sum if self.weight_sum else None
        return self.num_correct / self.num_examples if self.num_examples else None


@dataclass(frozen=True)
class ClientResult:
    """What is known of a client after the hand-over. Counts and metrics only.

    Attributes
    ----------
    client
        The client's name.
    seen
        Whether it could take part in training.
    num_train, num_validation
        Examples it learns from.
    personal, reference
        On the test split: its personalised model, and the unpersonalised (global) one.
    validation
        The unpersonalised model on the validation split.
    chosen
        What the method chose for this client, as in ``{"knn_weight": 0.7}``.
    """

    client: str
    seen: bool
    num_train: int
    num_validation: int
    personal: Evaluation
    reference: Evaluation
    validation: Evaluation
    chosen: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientResults:
    """What several clients that were served together report.

    Attributes
    ----------
    results
        One a client, in the order in which they were asked, but for the failures.
    failures
        Why, by name, of the clients that could not be served.
    withheld
        Clients that are served and keep the figures to themselves.
    """

    results: tuple[ClientResult, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()


def evaluate(
    predictor: Predictor, examples: Examples, class_weights: Tensor | None = None
) -> Evaluation:
    """Return how ``predictor`` does on ``examples``.

    Parameters
    ----------
    class_weights
        P(y), what an example of each label counts, float64 of shape (c,); None where
        all count the same.
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
    bins = (confidence * NUM_CALIBRATION_BINS).long().clamp(0, NUM_CALIBRATION_BINS - 1)
    return Evaluation(
        num_examples=len(labels),
        num_correct=int(correct.sum()),
        log_loss_sum=float(-of_label.clamp_min(1e-12).log().sum()),
        bin_counts=_integers(torch.ones_like(confidence), bins),
        bin_confidence=tuple(_per_bin(confidence, bins).tolist()),
        bin_correct=_integers(correct.double(), bins),
        weight_sum=_weight_of(labels, class_weights),
        weight_correct=_weight_of(labels[correct], class_weights),
    )


def _weight_of(labels: Tensor, class_weights: Tensor | None) -> float | None:
    """Return Σ_i P(y_i), the same whatever the order of the labels."""
    if class_weights is None:
        return None
    counts = torch.bincount(labels, minlength=len(class_weights))
    return math.fsum((counts * class_weights).tolist())


def _per_bin(values: Tensor, bins: Tensor) -> Tensor:
    sums = torch.zeros(NUM_CALIBRATION_BINS, dtype=torch.float64)
    return sums.index_add_(0, bins, values)


def _integers(values: Tensor, bins: Tensor) -> tuple[int, ...]:
    return tuple(int(value) for value in _per_bin(values, bins))

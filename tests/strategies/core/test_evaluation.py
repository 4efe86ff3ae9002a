import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from knnper.data.examples import Examples
from knnper.strategies.core.evaluation import evaluate, predict, score


class Fixed:
    """Predicts given probabilities, whatever the images."""

    def __init__(self, rows: list[list[float]]) -> None:
        self._rows = torch.tensor(rows)

    def __call__(self, images: Tensor) -> Tensor:
        return self._rows[: len(images)]

    def describe(self) -> Mapping[str, float]:
        return {}


def examples(labels: list[int]) -> Examples:
    return Examples(
        torch.zeros((len(labels), 2, 2, 1), dtype=torch.uint8), torch.tensor(labels)
    )


def test_hand_computed_figures() -> None:
    predictor = Fixed([[0.75, 0.25], [0.5, 0.5], [0.0, 1.0]])
    counts = evaluate(predictor, examples([0, 1, 0]))
    # Right, wrong (the first of equals is predicted), wrong.
    assert (counts.num_examples, counts.num_correct) == (3, 1)
    assert counts.accuracy == 1 / 3
    expected = -math.log(0.75) - math.log(0.5) - math.log(1e-12)
    assert math.isclose(counts.log_loss_sum, expected)
    # Confidences 0.75, 0.5 and 1.0 fall into the bins floor(15 p), the last clipped.
    assert [i for i, n in enumerate(counts.bin_counts) if n] == [7, 11, 14]
    assert counts.bin_confidence[11] == 0.75
    assert counts.bin_correct[11] == 1
    assert sum(counts.bin_correct) == 1


def test_what_is_not_finite_is_wrong() -> None:
    nan = float("nan")
    counts = evaluate(Fixed([[nan, nan], [0.9, 0.1], [nan, 1.0]]), examples([0, 0, 1]))
    assert counts.num_correct == 1
    assert counts.bin_counts[0] == 2
    assert math.isfinite(counts.log_loss_sum)


def test_no_examples_have_no_accuracy() -> None:
    counts = evaluate(Fixed([]), examples([]))
    assert counts.accuracy is None
    assert counts.num_examples == sum(counts.bin_counts) == 0


class TestClassWeights:
    """Σ_i P(y_i) 1[right] / Σ_i P(y_i): Chen et al. 2023, section 5, step 5."""

    def test_hand_computed(self) -> None:
        predictor = Fixed([[0.9, 0.1, 0], [0.2, 0.8, 0], [0.6, 0.4, 0], [0, 0, 1.0]])
        weights = torch.tensor([0.75, 0.25, 0.0], dtype=torch.float64)
        data = examples([0, 0, 1, 2])
        counts = score(predict(predictor, data), data.labels, weights)
        # Right, wrong, wrong, right; the last one is of a label without weight.
        assert counts.weight_correct == 0.75
        assert counts.weight_sum == 0.75 + 0.75 + 0.25
        assert counts.accuracy == 0.75 / 1.75
        # All else is as without weights.
        bare = dataclasses.replace(counts, weight_sum=None, weight_correct=None)
        assert bare == evaluate(predictor, data)
        assert bare.accuracy == 2 / 4

    def test_labels_without_test_examples_give_no_accuracy(self) -> None:
        weights = torch.tensor([0.0, 1.0], dtype=torch.float64)
        counts = score(torch.tensor([[0.9, 0.1]]), torch.tensor([0]), weights)
        assert counts.weight_sum == 0
        assert counts.accuracy is None


def test_what_labels_count_does_not_depend_on_the_order_of_examples() -> None:
    # 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in their last bits.
    weights = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    results = [
        score(torch.eye(3)[labels], labels, weights)
        for labels in (torch.tensor([0, 1, 2]), torch.tensor([2, 1, 0]))
    ]
    assert len({result.weight_correct for result in results}) == 1
    assert len({result.weight_sum for result in results}) == 1

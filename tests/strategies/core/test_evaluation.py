import math
from collections.abc import Mapping

import torch
from torch import Tensor

from knnper.data.examples import Examples
from strategies.core.evaluation import evaluate


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
    found = evaluate(predictor, examples([0, 1, 0]))
    # Right, wrong (the first of equals is predicted), wrong.
    assert (found.num_examples, found.num_correct) == (3, 1)
    assert found.accuracy == 1 / 3
    expected = -math.log(0.75) - math.log(0.5) - math.log(1e-12)
    assert math.isclose(found.log_loss_sum, expected)
    # Confidences 0.75, 0.5 and 1.0 fall into the bins floor(15 p), the last clipped.
    assert [i for i, n in enumerate(found.bin_counts) if n] == [7, 11, 14]
    assert found.bin_confidence[11] == 0.75
    assert found.bin_correct[11] == 1
    assert sum(found.bin_correct) == 1


def test_what_is_not_finite_is_wrong() -> None:
    nan = float("nan")
    found = evaluate(Fixed([[nan, nan], [0.9, 0.1], [nan, 1.0]]), examples([0, 0, 1]))
    assert found.num_correct == 1
    assert found.bin_counts[0] == 2
    assert math.isfinite(found.log_loss_sum)


def test_no_examples_have_no_accuracy() -> None:
    found = evaluate(Fixed([]), examples([]))
    assert found.accuracy is None
    assert found.num_examples == sum(found.bin_counts) == 0

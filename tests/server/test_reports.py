import dataclasses
from typing import Any

import pytest
import torch

from knnper.data.examples import Examples
from knnper.server.results import evaluation_problem, result_problem
from knnper.strategies.core.predictors import ClientResult, Evaluation, evaluate
from tests.server.made_evaluations import evaluation

GOOD = evaluation(4, 3)
RESULT = ClientResult("a", True, 5, 1, GOOD, GOOD, GOOD, {"knn_weight": 0.5})
BINS = GOOD.bin_counts
WEIGHTED = dataclasses.replace(GOOD, weight_sum=0.5, weight_correct=0.5)


@pytest.mark.parametrize("good", [GOOD, WEIGHTED, Evaluation(0, 0, 0.0, (), (), ())])
def test_what_can_be_true_is_taken(good: Evaluation) -> None:
    assert evaluation_problem(good) is None
    assert result_problem(RESULT) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"num_correct": 99},
        {"num_correct": -1},
        {"num_examples": 5},
        {"num_examples": 10**400},
        {"num_examples": "4"},
        {"log_loss_sum": float("nan")},
        {"log_loss_sum": -1.0},
        {"log_loss_sum": 111.0},
        {"log_loss_sum": "x"},
        {"bin_counts": ()},
        {"bin_counts": (5, -1, *BINS[2:])},
        {"bin_correct": (4, *BINS[1:])},
        {"bin_confidence": (float("inf"), *(0.0,) * 14)},
        {"bin_confidence": (5.0, *(0.0,) * 14)},
        {"weight_sum": 1.0},
        {"weight_correct": 1.0},
        {"weight_sum": 5.0, "weight_correct": 1.0},
        {"weight_sum": 1.0, "weight_correct": 2.0},
        {"weight_sum": 1.0, "weight_correct": -0.5},
        {"weight_sum": -0.0005, "weight_correct": 0.0001},
        {"weight_sum": -0.0005, "weight_correct": -0.0005},
        {"weight_sum": float("inf"), "weight_correct": float("inf")},
        {"weight_sum": 1.0, "weight_correct": float("nan")},
        {"weight_sum": 1.0, "weight_correct": "x"},
    ],
)
def test_what_cannot_be_true_is_refused(changed: dict[str, Any]) -> None:
    wrong = dataclasses.replace(GOOD, **changed)
    assert evaluation_problem(wrong)
    assert result_problem(dataclasses.replace(RESULT, reference=wrong))


@pytest.mark.parametrize(
    "changed",
    [
        {"num_train": -1},
        {"num_validation": True},
        {"chosen": {"k": float("nan")}},
        {"chosen": {"k\n": 1.0}},
        {"chosen": {"k" * 65: 1.0}},
        {"chosen": {f"k{number}": 1.0 for number in range(65)}},
    ],
)
def test_reports_that_cannot_be_true_are_refused(changed: dict[str, Any]) -> None:
    assert result_problem(dataclasses.replace(RESULT, **changed))


def test_no_more_can_be_right_than_there_are() -> None:
    assert "at most 3" in str(evaluation_problem(GOOD, 3))
    assert evaluation_problem(None) == "expected an Evaluation, found a NoneType"


class Certain:
    """Says the first class of everything."""

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return torch.eye(3)[torch.zeros(len(images), dtype=torch.int64)]

    def describe(self) -> dict[str, float]:
        return {}


def test_evaluations_as_they_are_made_can_be_true() -> None:
    images = torch.zeros(201, 1, 1, 1, dtype=torch.uint8)
    made = evaluate(Certain(), Examples(images, torch.arange(201) % 3))
    assert made.num_correct == 67
    assert evaluation_problem(made) is None

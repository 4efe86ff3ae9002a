import dataclasses
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.data.examples import Examples
from knnper.strategies.core.task import Evaluation, evaluate, score


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


class TestClassWeights:
    """Σ_i P(y_i) 1[right] / Σ_i P(y_i): Chen et al. 2023, section 5, step 5."""

    def test_hand_computed(self) -> None:
        predictor = Fixed([[0.9, 0.1, 0], [0.2, 0.8, 0], [0.6, 0.4, 0], [0, 0, 1.0]])
        weights = torch.tensor([0.75, 0.25, 0.0], dtype=torch.float64)
        found = evaluate(predictor, examples([0, 0, 1, 2]), weights)
        # Right, wrong, wrong, right; the last one is of a label without weight.
        assert found.weight_correct == 0.75
        assert found.weight_sum == 0.75 + 0.75 + 0.25
        assert found.accuracy == 0.75 / 1.75
        assert (found.num_examples, found.num_correct) == (4, 2)

    def test_all_else_is_as_without_weights(self) -> None:
        predictor, data = Fixed([[0.9, 0.1], [0.2, 0.8]]), examples([0, 0])
        weighted = evaluate(predictor, data, torch.ones(2, dtype=torch.float64))
        bare = dataclasses.replace(weighted, weight_sum=None, weight_correct=None)
        assert bare == evaluate(predictor, data)
        assert bare.accuracy == weighted.accuracy == 0.5

    def test_labels_that_nobody_is_tested_on_give_no_accuracy(self) -> None:
        weights = torch.tensor([0.0, 1.0], dtype=torch.float64)
        found = evaluate(Fixed([[0.9, 0.1]]), examples([0]), weights)
        assert found.weight_sum == 0
        assert found.accuracy is None

    @settings(max_examples=50, deadline=None)
    @given(
        trained=st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any),
        right=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    )
    def test_a_balanced_test_counts_as_one_that_is_distributed_as_training(
        self, trained: list[int], right: list[int]
    ) -> None:
        """4 examples of a label, of which some are right, stand for any number."""
        outcomes = [
            (label, place < right[label]) for label in range(3) for place in range(4)
        ]
        like_training = [one for one in outcomes for _ in range(trained[one[0]])]

        def evaluated(
            pairs: list[tuple[int, bool]], weights: Tensor | None = None
        ) -> Evaluation:
            labels = torch.tensor([label for label, _ in pairs])
            hits = torch.tensor([hit for _, hit in pairs])
            predicted = torch.where(hits, labels, (labels + 1) % 3)
            return score(torch.eye(3)[predicted], labels, weights)

        counts = torch.tensor(trained, dtype=torch.float64)
        balanced = evaluated(outcomes, counts / counts.sum())
        plain = evaluated(like_training)
        assert balanced.accuracy == pytest.approx(plain.accuracy)


def test_what_labels_count_does_not_depend_on_the_order_of_examples() -> None:
    # 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in their last bits.
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    first, last = ([1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1])
    sums = {
        score(one_hot(labels, torch.tensor(right)), labels, weights).weight_correct
        for right in (first, last)
    }
    assert len(sums) == 1
    totals = {
        score(torch.eye(4)[given], given, weights).weight_sum
        for given in (labels, labels[[0, 5, 1, 4, 2, 3]], labels[[3, 0, 2, 1, 4, 5]])
    }
    assert len(totals) == 1


def one_hot(labels: Tensor, right: Tensor) -> Tensor:
    """Return probabilities of the labels where they are right, else of another."""
    return torch.eye(4)[torch.where(right.bool(), labels, 3)]

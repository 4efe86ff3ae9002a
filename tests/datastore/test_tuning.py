"""The choice of λ."""

import pytest
import torch

from datastore.tuning import choose_knn_weight

GRID = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
KNN = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
GLOBAL = torch.tensor([[0.4, 0.6], [0.2, 0.8], [0.45, 0.55]])


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        # Row 0 turns to class 0 above λ = 1/6, row 1 above 3/8, row 2 never.
        ([1, 1, 1], 0.0),
        ([0, 1, 1], 0.3),
        ([0, 0, 1], 0.5),
        ([0, 0, 0], 0.5),
    ],
)
def test_the_smallest_of_the_best_weights_is_chosen(
    labels: list[int], expected: float
) -> None:
    assert choose_knn_weight(KNN, GLOBAL, torch.tensor(labels), GRID) == expected


def test_the_grid_may_come_in_any_order() -> None:
    labels = torch.tensor([0, 0, 1])

    assert choose_knn_weight(KNN, GLOBAL, labels, (1.0, 0.9, 0.5, 0.7, 0.0)) == 0.5


def test_without_validation_examples_the_smallest_weight_is_chosen() -> None:
    none = torch.empty((0, 2))
    labels = torch.empty(0, dtype=torch.int64)

    assert choose_knn_weight(none, none, labels, (0.7, 0.3)) == 0.3


def test_an_empty_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one knn_weight"):
        choose_knn_weight(KNN, GLOBAL, torch.tensor([0, 0, 1]), ())

"""The mixture, its two ends, and what it refuses."""

import pytest
import torch
from torch import Tensor

from knnper.datastore.prediction import interpolate

KNN = torch.tensor([[1.0, 0.0], [0.3, 0.7]])
GLOBAL = torch.tensor([[0.2, 0.8], [0.6, 0.4]])


def test_mixture_by_hand() -> None:
    torch.testing.assert_close(
        interpolate(KNN, GLOBAL, 0.25), torch.tensor([[0.4, 0.6], [0.525, 0.475]])
    )


def test_the_ends_are_bit_identical() -> None:
    third = torch.softmax(torch.tensor([[0.1, 0.2, -0.3]]), dim=1)
    other = torch.softmax(torch.tensor([[2.1, -0.7, 1.3]]), dim=1)

    assert torch.equal(interpolate(third, other, 0.0), other)
    assert torch.equal(interpolate(third, other, 1.0), third)


@pytest.mark.parametrize("knn_weight", [-0.1, 1.1, float("nan")])
def test_a_weight_out_of_range_is_refused(knn_weight: float) -> None:
    with pytest.raises(ValueError, match=r"a knn_weight in \[0, 1\], found"):
        interpolate(KNN, GLOBAL, knn_weight)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"shape \(2, 2\) and global ones of .*\(1, 2\)"
    ):
        interpolate(KNN, GLOBAL[:1], 0.5)
    with pytest.raises(ValueError, match=r"of shape \(n, c\), found shape \(2,\)"):
        interpolate(KNN[0], GLOBAL, 0.5)


@pytest.mark.parametrize("knn_weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "logits",
    [
        torch.tensor([[0.5, 0.5], [3.0, -2.0]]),
        torch.tensor([[0.5, 0.5], [0.5, 0.6]]),
        torch.tensor([[0.5, 0.5], [torch.nan, 0.5]]),
    ],
    ids=["range", "sum", "nan"],
)
def test_logits_are_refused(logits: Tensor, knn_weight: float) -> None:
    with pytest.raises(ValueError, match=r"global probabilities: .* row 1; .*softmax"):
        interpolate(KNN, logits, knn_weight)
    with pytest.raises(ValueError, match=r"kNN probabilities: .* row 1; .*softmax"):
        interpolate(logits, GLOBAL, knn_weight)

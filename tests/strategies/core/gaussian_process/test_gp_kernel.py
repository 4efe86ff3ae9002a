import math

import pytest
import torch

from knnper.strategies.core.gaussian_process import Kernel, KernelName

POINTS = torch.tensor([[0.0, 0.0], [3.0, 4.0]])


def test_rbf_by_hand() -> None:
    # |z - z'| / l = 5 / 2.5 = 2: 3 exp(-4 / 2).
    matrix = Kernel("rbf", output_scale=3.0, length_scale=2.5).matrix(POINTS, POINTS)
    far = 3 * math.exp(-2)
    assert matrix.dtype == torch.float64
    assert matrix.flatten().tolist() == pytest.approx([3, far, far, 3])


def test_linear_by_hand() -> None:
    first, second = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    # ½ (1·3 + 2·4) / 2² and ½ (2·2) / 2².
    kernel = Kernel("linear", output_scale=0.5, length_scale=2.0)
    assert kernel.matrix(first, second).tolist() == [[11 / 8, 0.5]]


@pytest.mark.parametrize("name", ["rbf", "linear"])
def test_the_diagonal_is_that_of_the_matrix(name: KernelName) -> None:
    kernel = Kernel(name, output_scale=1.7, length_scale=0.3)
    points = torch.linspace(-1, 2, 12).reshape(4, 3)
    expected = kernel.matrix(points, points).diagonal()
    torch.testing.assert_close(kernel.diagonal(points), expected)


def test_equal_points_have_a_gradient() -> None:
    points = torch.ones(2, 2, requires_grad=True)
    Kernel("rbf", 1.0, 1.0).matrix(points, points).sum().backward()  # type: ignore[no-untyped-call]
    assert points.grad is not None
    assert points.grad.tolist() == [[0, 0], [0, 0]]

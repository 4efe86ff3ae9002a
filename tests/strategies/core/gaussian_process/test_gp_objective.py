import math

import pytest
import torch
from torch import Tensor

from knnper.seeding import RandomKey
from knnper.strategies.core.gaussian_process import (
    ClassTree,
    Kernel,
    Split,
    levels_of,
    log_expected_sigmoid,
    posterior,
    predictive_losses,
)

CPU = torch.device("cpu")
RBF = Kernel("rbf", output_scale=4.0, length_scale=1.0)
TREE = ClassTree(
    (0, 1, 3, 4),
    (Split(0, (0, 3), (1, 4)), Split(1, (3,), (0,)), Split(1, (1,), (4,))),
)
LABELS = torch.tensor([0, 1, 3, 4, 0, 1, 3, 0])


def points(seed: int = 5) -> Tensor:
    return torch.from_numpy(RandomKey(seed).numpy().normal(size=(len(LABELS), 2)))


def test_levels_by_hand() -> None:
    levels = levels_of(TREE, 5, CPU)
    assert levels.signs.tolist() == [[1, -1, 0, 1, -1], [-1, 1, 0, 1, -1]]
    assert levels.nodes.tolist() == [[0, 0, -1, 0, 0], [1, 2, -1, 1, 2]]


def test_the_loss_is_the_sum_over_the_nodes_each_solved_alone() -> None:
    covariance = RBF.matrix(points(), points())
    found = predictive_losses(levels_of(TREE, 5, CPU), covariance, LABELS, 6)
    expected = torch.zeros(len(LABELS), dtype=torch.float64)
    for split in TREE.splits:
        signs = split.signs(5)[LABELS]
        below = signs != 0
        node = posterior(covariance[below][:, below], signs[below], 6)
        mean, variance = node.left_out()
        expected[below] -= log_expected_sigmoid(signs[below] * mean, variance)
    torch.testing.assert_close(found, expected.float())


def test_what_nothing_is_known_of_is_even() -> None:
    # Representations without covariance: each of two nodes costs log 2.
    covariance = torch.eye(len(LABELS), dtype=torch.float64)
    found = predictive_losses(levels_of(TREE, 5, CPU), covariance, LABELS, 3)
    assert found.tolist() == pytest.approx([2 * math.log(2)] * len(LABELS))


def test_the_gradient_is_that_of_finite_differences() -> None:
    # Without iterations ω is ¼ whatever the representations are, so that nothing that
    # the loss depends on is taken as constant.
    levels = levels_of(TREE, 5, CPU)

    def loss(embeddings: Tensor) -> Tensor:
        covariance = RBF.matrix(embeddings, embeddings)
        signs, nodes = levels.signs[:, LABELS], levels.nodes[:, LABELS]
        found = posterior(covariance * (nodes[:, :, None] == nodes[:, None]), signs, 0)
        mean, variance = found.left_out()
        return -log_expected_sigmoid(signs * mean, variance).sum()

    assert torch.autograd.gradcheck(loss, points().requires_grad_())
    embeddings = points().requires_grad_()
    covariance = RBF.matrix(embeddings, embeddings)
    whole = predictive_losses(levels, covariance, LABELS, 0).sum()
    (found,) = torch.autograd.grad(whole, embeddings)
    (expected,) = torch.autograd.grad(loss(embeddings), embeddings)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_it_falls_as_classes_come_apart() -> None:
    embeddings, levels = points(), levels_of(TREE, 5, CPU)
    centers = torch.tensor([[0, 0], [9, 0], [0, 0], [0, 9], [9, 9]]).double()
    apart = embeddings / 4 + centers[LABELS]
    before, after = (
        predictive_losses(levels, RBF.matrix(z, z), LABELS, 10).mean()
        for z in (embeddings, apart)
    )
    assert float(after) < 0.6 * float(before)


def test_one_class_has_nothing_to_learn() -> None:
    levels = levels_of(ClassTree((3,), ()), 5, CPU)
    embeddings = points().requires_grad_()
    covariance = RBF.matrix(embeddings, embeddings)
    losses = predictive_losses(levels, covariance, torch.full((8,), 3), 4)
    assert losses.tolist() == [0.0] * 8
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert embeddings.grad is not None
    assert not bool(embeddings.grad.any())


def test_representations_that_are_zero_have_a_gradient() -> None:
    embeddings = torch.zeros(8, 2, dtype=torch.float64, requires_grad=True)
    covariance = Kernel("linear", 1.0, 1.0).matrix(embeddings, embeddings)
    losses = predictive_losses(levels_of(TREE, 5, CPU), covariance, LABELS, 3)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert embeddings.grad is not None
    assert bool(torch.isfinite(embeddings.grad).all())

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.seeding import RandomKey
from knnper.strategies.core.gaussian_process import (
    Kernel,
    TreeClassifier,
    fit_classifier,
)

RBF = Kernel("rbf", output_scale=8.0, length_scale=1.0)
CORNERS = torch.tensor([[0.0, 0.0], [0.0, 4.0], [5.0, 0.0], [5.0, 4.0]])


def fit(embeddings: Tensor, labels: Tensor, num_classes: int = 5) -> TreeClassifier:
    return fit_classifier(embeddings, labels, num_classes, RBF, num_iterations=20)


def test_it_learns_what_it_is_shown() -> None:
    labels = torch.tensor([3, 0, 1, 2]).repeat(5)
    noise = torch.from_numpy(RandomKey(1).numpy().normal(0, 0.2, (20, 2))).float()
    classifier = fit(CORNERS.repeat(5, 1) + noise, labels)
    found = classifier(CORNERS)
    assert found.argmax(dim=1).tolist() == [3, 0, 1, 2]
    assert float(found.max(dim=1).values.min()) > 0.6
    # The fifth class was not among the 20 examples.
    assert found[:, 4].tolist() == pytest.approx([1 / 21] * 4)


def test_two_classes_by_hand() -> None:
    # Opposite points with a linear kernel: at z = 0 nothing is known, and at z the
    # probabilities mirror those at -z.
    linear = Kernel("linear", output_scale=3.0, length_scale=1.0)
    points, labels = torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 1])
    classifier = fit_classifier(points, labels, 2, linear, num_iterations=20)
    found = classifier(torch.tensor([[0.0], [1.5], [-1.5]]))
    assert found[0].tolist() == [0.5, 0.5]
    assert found[1].tolist() == pytest.approx(found[2].flip(0).tolist())
    assert float(found[1, 0]) > 0.6


def test_a_class_is_as_likely_as_its_branches() -> None:
    classifier = fit(CORNERS[:3], torch.tensor([0, 1, 2]), num_classes=3)
    queries = torch.tensor([[1.0, 1.0], [4.0, 3.0]])
    root, below = classifier.nodes
    (outer,) = {0, 1, 2} - {*below.split.left, *below.split.right}
    left, right = (log.exp() for log in root.log_branches(queries))
    of_outer, of_inner = (left, right) if outer in root.split.left else (right, left)
    found = classifier(queries).double()
    torch.testing.assert_close(found[:, outer], of_outer, rtol=1e-5, atol=0)
    down = below.log_branches(queries)[0].exp()
    inner = found[:, below.split.left[0]]
    torch.testing.assert_close(inner, of_inner * down, rtol=1e-5, atol=0)


def test_without_examples_all_classes_are_alike() -> None:
    found = fit(torch.empty(0, 2), torch.empty(0, dtype=torch.int64))(CORNERS)
    assert found.tolist() == [[pytest.approx(0.2)] * 5] * 4


def test_one_class_gets_more_with_every_example() -> None:
    # n / (n + 1) for the known class, the rest for the four others.
    for number in (1, 3):
        found = fit(CORNERS[:number], torch.full((number,), 2))(CORNERS[:1])
        rest = 1 / (number + 1) / 4
        expected = [rest, rest, number / (number + 1), rest, rest]
        assert found[0].tolist() == pytest.approx(expected)


@settings(max_examples=25, deadline=None)
@given(num_examples=st.integers(0, 12), seed=st.integers(0, 99), far=st.booleans())
def test_rows_sum_to_one_and_are_positive(
    num_examples: int, seed: int, far: bool
) -> None:
    generator = RandomKey(seed).numpy()
    embeddings = torch.from_numpy(generator.normal(size=(num_examples, 2))).float()
    labels = torch.from_numpy(generator.integers(0, 4, num_examples))
    kernel = Kernel("linear", 100.0, 0.01) if far else RBF
    classifier = fit_classifier(embeddings, labels, 5, kernel, num_iterations=5)
    found = classifier(1000 * CORNERS if far else CORNERS)
    assert found.dtype == torch.float32
    assert bool((found > 0).all())
    torch.testing.assert_close(found.sum(dim=1), torch.ones(4))


def test_no_queries_give_no_rows() -> None:
    classifier = fit(CORNERS, torch.arange(4))
    assert classifier(CORNERS[:0]).shape == (0, 5)


def test_many_queries_are_answered_as_few() -> None:
    classifier = fit(CORNERS, torch.arange(4))
    found = classifier(CORNERS.repeat(300, 1))
    torch.testing.assert_close(found, classifier(CORNERS).repeat(300, 1))

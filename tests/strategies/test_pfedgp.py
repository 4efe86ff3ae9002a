"""pFedGP: kernel, posterior, objective and classifier, and rounds by hand."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from knnper.data.examples import ClientData, Examples, InputSpec, no_examples
from knnper.embedding_model import EmbeddingModel
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.core.predictors import HeadPredictor
from knnper.strategies.core.task import Task
from knnper.strategies.pfedgp import (
    ClassTree,
    GPKernel,
    GPKernelName,
    PFedGP,
    PFedGPSettings,
    Posterior,
    SharedNetwork,
    Split,
    TreeClassifier,
    class_tree,
    expected_polya_gamma,
    fit_classifier,
    levels_of,
    log_expected_sigmoid,
    posterior,
    posterior_given,
    predictive_losses,
)
from tests.strategies.tiny import KEY, noisy, normed_task, run_rounds, task_of

POINTS = torch.tensor([[0.0, 0.0], [3.0, 4.0]])


def test_rbf_by_hand() -> None:
    # |z - z'| / l = 5 / 2.5 = 2: 3 exp(-4 / 2).
    matrix = GPKernel("rbf", output_scale=3.0, length_scale=2.5).matrix(POINTS, POINTS)
    far = 3 * math.exp(-2)
    assert matrix.dtype == torch.float64
    assert matrix.flatten().tolist() == pytest.approx([3, far, far, 3])


def test_linear_by_hand() -> None:
    first, second = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    # ½ (1·3 + 2·4) / 2² and ½ (2·2) / 2².
    kernel = GPKernel("linear", output_scale=0.5, length_scale=2.0)
    assert kernel.matrix(first, second).tolist() == [[11 / 8, 0.5]]


@pytest.mark.parametrize("name", ["rbf", "linear"])
def test_the_diagonal_is_that_of_the_matrix(name: GPKernelName) -> None:
    kernel = GPKernel(name, output_scale=1.7, length_scale=0.3)
    points = torch.linspace(-1, 2, 12).reshape(4, 3)
    expected = kernel.matrix(points, points).diagonal()
    torch.testing.assert_close(kernel.diagonal(points), expected)


def test_equal_points_have_a_gradient() -> None:
    points = torch.ones(2, 2, requires_grad=True)
    GPKernel("rbf", 1.0, 1.0).matrix(points, points).sum().backward()  # type: ignore[no-untyped-call]
    assert points.grad is not None
    assert points.grad.tolist() == [[0, 0], [0, 0]]


def line(points: Sequence[float]) -> Tensor:
    return torch.tensor(points)[:, None]


def test_near_classes_stay_together() -> None:
    # Means: class 7 at 0, class 2 at 1, class 5 at 10, class 9 at 12. The first split
    # is {7, 2} from {5, 9}, then each pair.
    labels = torch.tensor([7, 7, 2, 5, 9])
    tree = class_tree(line([-1, 1, 1, 10, 12]), labels)
    assert tree.classes == (2, 5, 7, 9)
    root, *below = tree.splits
    assert {root.left, root.right} == {(2, 7), (5, 9)}
    assert [split.depth for split in below] == [1, 1]
    assert tree.depth == 2


def test_the_clusters_are_moved_to_their_means() -> None:
    # Nearer to 0 than to 10: 0, 4, 4.5, 4.9, whose mean is 3.35; that of 5.2 and 10 is
    # 7.6. The middle is now 5.475: 5.2 changes sides, and then nothing does.
    tree = class_tree(line([0, 4, 4.5, 4.9, 5.2, 10]), torch.arange(6))
    assert {tree.splits[0].left, tree.splits[0].right} == {(0, 1, 2, 3, 4), (5,)}


@settings(max_examples=40, deadline=None)
@given(
    num_classes=st.integers(1, 12),
    num_places=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_every_class_has_a_leaf_of_its_own(
    num_classes: int, num_places: int, seed: int
) -> None:
    generator = RandomKey(seed).numpy()
    embeddings = torch.from_numpy(generator.integers(0, num_places, (20, 2))).float()
    labels = torch.from_numpy(generator.integers(0, num_classes, 20))
    tree = class_tree(embeddings, labels)
    assert tree.classes == tuple(sorted(set(labels.tolist())))
    assert len(tree.splits) == len(tree.classes) - 1
    for split in tree.splits:
        assert split.left
        assert split.right
        assert not set(split.left) & set(split.right)
    for label in tree.classes:
        path = [split for split in tree.splits if label in split.left + split.right]
        assert [split.depth for split in path] == list(range(len(path))), label
    assert class_tree(embeddings, labels) == tree


def test_means_that_are_the_same_or_undefined_are_halved() -> None:
    for value in (1.0, torch.nan):
        tree = class_tree(torch.full((5, 2), value), torch.arange(5))
        assert [(split.left, split.right) for split in tree.splits[:2]] == [
            ((0, 1, 2), (3, 4)),
            ((0, 1), (2,)),
        ]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def covariance_of(num_examples: int, seed: int = 0) -> Tensor:
    generator = RandomKey(seed).numpy()
    points = torch.from_numpy(generator.normal(size=(num_examples, 3)))
    return GPKernel("rbf", 4.0, 1.0).matrix(points, points)


@pytest.mark.parametrize("tilt", [0.0, 1e-4, 0.9e-3, 1.1e-3, 0.5, 3.0, 40.0])
def test_the_mean_of_polya_gamma_is_that_of_its_series(tilt: float) -> None:
    # Polson et al. 2013, Eq. 1: with g_k ~ Exp(1),
    # PG(1, c) = Σ_k g_k / (2π² ((k - ½)² + c² / (4π²))).
    k = np.arange(1, 200_000)
    terms = 1 / ((k - 0.5) ** 2 + tilt**2 / (4 * np.pi**2))
    tail = 1 / k[-1]  # Σ_{k>N} 1/k²
    series = (terms.sum() + tail) / (2 * np.pi**2)
    mean = float(expected_polya_gamma(tensor(tilt)))
    assert mean == pytest.approx(series, rel=1e-9)


def test_opposite_points_by_hand() -> None:
    # f = ±u with u ~ N(0, s): two observations of one number. Given ω, the precision
    # of u is 1/s + 2ω, and Σ κ_i z_i = ½ + ½ = 1, so that its mean equals its variance.
    s, omega = 3.0, 0.25
    for _ in range(200):
        v = 1 / (1 / s + 2 * omega)
        c = math.sqrt(v * v + v)
        omega = math.tanh(c / 2) / (2 * c)
    points = torch.tensor([[1.0], [-1.0]])
    covariance = GPKernel("linear", s, 1.0).matrix(points, points)
    solution = posterior(covariance, tensor(1.0, -1.0), num_iterations=200)
    v = 1 / (1 / s + 2 * omega)
    assert solution.precision.tolist() == pytest.approx([omega, omega])
    assert solution.mean.tolist() == pytest.approx([v, -v])
    assert solution.variance.tolist() == pytest.approx([v, v])
    # Elsewhere, at z = 2, f = 2u.
    query = torch.tensor([[2.0]])
    kernel = GPKernel("linear", s, 1.0)
    mean, variance = solution.elsewhere(kernel.matrix(points, query), tensor(4 * s))
    assert float(mean) == pytest.approx(2 * v)
    assert float(variance) == pytest.approx(4 * v)


def brute_force(covariance: Tensor, signs: Tensor, precision: Tensor) -> Posterior:
    """Return mean and variance with inverse matrices, as the formulas are written."""
    inverse = np.linalg.inv(covariance.numpy()) + np.diag(precision.numpy())
    sigma = np.linalg.inv(inverse)
    mean = torch.from_numpy(sigma @ signs.numpy() / 2)
    variance = torch.from_numpy(np.diag(sigma).copy())
    return Posterior(signs, precision, covariance, mean, variance)


def test_the_posterior_is_that_of_the_inverse_matrices() -> None:
    covariance, signs = covariance_of(6), tensor(1, -1, 1, 1, 0, -1)
    precision = tensor(0.25, 0.1, 0.2, 0.05, 0, 0.15)
    expected = brute_force(covariance, signs, precision)
    solution = posterior_given(covariance, signs, precision)
    torch.testing.assert_close(solution.mean, expected.mean)
    torch.testing.assert_close(solution.variance, expected.variance)


def test_elsewhere_at_the_examples_is_the_posterior() -> None:
    covariance, signs = covariance_of(5), tensor(1, -1, 1, 0, -1)
    solution = posterior(covariance, signs, num_iterations=5)
    mean, variance = solution.elsewhere(covariance, covariance.diagonal())
    torch.testing.assert_close(mean, solution.mean)
    torch.testing.assert_close(variance, solution.variance)


def test_left_out_is_the_posterior_without_the_example() -> None:
    covariance, signs = covariance_of(5), tensor(1, -1, 1, -1, -1)
    whole = posterior(covariance, signs, num_iterations=5)
    mean, variance = whole.left_out()
    for place in range(5):
        kept = torch.arange(5) != place
        rest = posterior_given(covariance, signs * kept, whole.precision * kept)
        assert float(mean[place]) == pytest.approx(float(rest.mean[place]))
        assert float(variance[place]) == pytest.approx(float(rest.variance[place]))


def test_what_is_not_finite_stays_so() -> None:
    covariance = covariance_of(3).clone()
    covariance[0, 0] = torch.nan
    assert bool(posterior(covariance, tensor(1, -1, 1), 2).mean.isnan().any())


def test_the_quadrature_at_its_limits() -> None:
    # Symmetric about 0: ½. Without variance: log σ. Far off: finite.
    logs = log_expected_sigmoid(tensor(0, 1, -1e6), tensor(5, 0, 1))
    at_one = -math.log1p(math.exp(-1))
    assert logs.tolist() == pytest.approx([math.log(0.5), at_one, -1e6], rel=1e-5)


CPU = torch.device("cpu")

RBF = GPKernel("rbf", output_scale=4.0, length_scale=1.0)

TREE = ClassTree(
    (0, 1, 3, 4), (Split(0, (0, 3), (1, 4)), Split(1, (3,), (0,)), Split(1, (1,), (4,)))
)

LABELS = torch.tensor([0, 1, 3, 4, 0, 1, 3, 0])


def points(seed: int = 5) -> Tensor:
    return torch.from_numpy(RandomKey(seed).numpy().normal(size=(len(LABELS), 2)))


def test_levels_by_hand() -> None:
    signs, nodes = levels_of(TREE, 5, CPU)
    assert signs.tolist() == [[1, -1, 0, 1, -1], [-1, 1, 0, 1, -1]]
    assert nodes.tolist() == [[0, 0, -1, 0, 0], [1, 2, -1, 1, 2]]


def test_the_loss_is_the_sum_over_the_nodes_each_solved_alone() -> None:
    covariance = RBF.matrix(points(), points())
    losses = predictive_losses(*levels_of(TREE, 5, CPU), covariance, LABELS, 6)
    expected = torch.zeros(len(LABELS), dtype=torch.float64)
    for split in TREE.splits:
        signs = split.signs(5)[LABELS]
        below = signs != 0
        node = posterior(covariance[below][:, below], signs[below], 6)
        mean, variance = node.left_out()
        expected[below] -= log_expected_sigmoid(signs[below] * mean, variance)
    torch.testing.assert_close(losses, expected.float())


def test_representations_that_are_zero_have_a_gradient() -> None:
    embeddings = torch.zeros(8, 2, dtype=torch.float64, requires_grad=True)
    covariance = GPKernel("linear", 1.0, 1.0).matrix(embeddings, embeddings)
    losses = predictive_losses(*levels_of(TREE, 5, CPU), covariance, LABELS, 3)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert embeddings.grad is not None
    assert bool(torch.isfinite(embeddings.grad).all())


WIDE = GPKernel("rbf", output_scale=8.0, length_scale=1.0)

CORNERS = torch.tensor([[0.0, 0.0], [0.0, 4.0], [5.0, 0.0], [5.0, 4.0]])


def fit(embeddings: Tensor, labels: Tensor, num_classes: int = 5) -> TreeClassifier:
    return fit_classifier(embeddings, labels, num_classes, WIDE, num_iterations=20)


def test_two_classes_by_hand() -> None:
    # Opposite points with a linear kernel: at z = 0 nothing is known, and at z the
    # probabilities mirror those at -z.
    linear = GPKernel("linear", output_scale=3.0, length_scale=1.0)
    points, labels = torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 1])
    classifier = fit_classifier(points, labels, 2, linear, num_iterations=20)
    probabilities = classifier(torch.tensor([[0.0], [1.5], [-1.5]]))
    assert probabilities[0].tolist() == [0.5, 0.5]
    assert probabilities[1].tolist() == pytest.approx(probabilities[2].flip(0).tolist())
    assert float(probabilities[1, 0]) > 0.6


def test_a_class_is_as_likely_as_its_branches() -> None:
    classifier = fit(CORNERS[:3], torch.tensor([0, 1, 2]), num_classes=3)
    queries = torch.tensor([[1.0, 1.0], [4.0, 3.0]])
    root, below = classifier.nodes
    (outer,) = {0, 1, 2} - {*below.split.left, *below.split.right}
    left, right = (log.exp() for log in root.log_branches(queries))
    of_outer, of_inner = (left, right) if outer in root.split.left else (right, left)
    probabilities = classifier(queries).double()
    torch.testing.assert_close(probabilities[:, outer], of_outer, rtol=1e-5, atol=0)
    down = below.log_branches(queries)[0].exp()
    inner = probabilities[:, below.split.left[0]]
    torch.testing.assert_close(inner, of_inner * down, rtol=1e-5, atol=0)


def test_without_examples_all_classes_are_alike() -> None:
    probabilities = fit(torch.empty(0, 2), torch.empty(0, dtype=torch.int64))(CORNERS)
    assert probabilities.tolist() == [[pytest.approx(0.2)] * 5] * 4


def test_one_class_gets_more_with_every_example() -> None:
    # n / (n + 1) for the known class, the rest for the four others.
    for number in (1, 3):
        probabilities = fit(CORNERS[:number], torch.full((number,), 2))(CORNERS[:1])
        rest = 1 / (number + 1) / 4
        expected = [rest, rest, number / (number + 1), rest, rest]
        assert probabilities[0].tolist() == pytest.approx(expected)


def test_many_queries_are_answered_as_few() -> None:
    classifier = fit(CORNERS, torch.arange(4))
    probabilities = classifier(CORNERS.repeat(300, 1))
    torch.testing.assert_close(probabilities, classifier(CORNERS).repeat(300, 1))


TWO_PIXELS = InputSpec((1, 2, 1), num_classes=3, mean=(0.0,), std=(1.0,))

LINEAR = PFedGPSettings(kernel="linear", output_scale=2.0, num_iterations=1)


class ScaledModel(EmbeddingModel):
    """φ(x) = (a x₁, b x₂) of two pixels; a = b = 1 at first, and an unused head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dim, self.num_classes = 2, 3
        self.scale = nn.Parameter(torch.ones(2))
        self.classifier = nn.Linear(2, 3)

    def embed(self, x: Tensor) -> Tensor:
        return self.scale * x.flatten(start_dim=1)


def scaled_task(**training: Any) -> Task:
    return task_of(ScaledModel, TWO_PIXELS, TrainingSettings(**training))


def client(examples: Mapping[tuple[int, int], int]) -> ClientData:
    """Make a client from labels by black (0) and white (1) pixels."""
    images = 255 * torch.tensor(list(examples), dtype=torch.uint8)
    labels = torch.tensor(list(examples.values()))
    train = Examples(images.reshape(-1, 1, 2, 1), labels)
    return ClientData(train, no_examples(TWO_PIXELS))


def omega_of(mean: float, variance: float) -> float:
    c = math.sqrt(mean**2 + variance)
    return math.tanh(c / 2) / (2 * c)


def log_sigmoid_mean(mean: float, variance: float) -> float:
    f = np.linspace(mean - 12 * variance**0.5, mean + 12 * variance**0.5, 100_001)
    density = np.exp(-((f - mean) ** 2) / (2 * variance))
    return math.log(np.average(1 / (1 + np.exp(-f)), weights=density))


def two_point_loss(a: float, b: float, omega: tuple[float, float]) -> float:
    """Return the loss of (1, 0) with label 0 and (1, 1) with label 1, by hand.

    K = s [[a², a²], [a², a² + b²]], s = 2, and the observations are κ/ω = ±½/ω with
    variance 1/ω. One example predicts the other: mean K₁₂ t / (K + 1/ω), variance
    K - K₁₂² / (K + 1/ω).
    """
    k11, k12, k22 = 2 * a * a, 2 * a * a, 2 * (a * a + b * b)
    first, second = k11 + 1 / omega[0], k22 + 1 / omega[1]
    of_first = log_sigmoid_mean(k12 * -0.5 / omega[1] / second, k11 - k12**2 / second)
    of_second = log_sigmoid_mean(-k12 * 0.5 / omega[0] / first, k22 - k12**2 / first)
    return -(of_first + of_second) / 2


def one_iteration() -> tuple[float, float]:
    """Return ω after one round of coordinate ascent at a = b = 1.

    K = [[2, 2], [2, 4]] and K⁻¹ = [[1, -½], [-½, ½]]. With ω = ¼ at first,
    Σ⁻¹ = K⁻¹ + ¼ I = [[5/4, -½], [-½, ¾]], of determinant 11/16, so that
    Σ = [[12, 8], [8, 20]] / 11 and the mean is Σ (½, -½) = (2, -6) / 11.
    """
    return omega_of(2 / 11, 12 / 11), omega_of(-6 / 11, 20 / 11)


def test_one_round_by_hand() -> None:
    rate, step = 0.5, 1e-5
    task = scaled_task(learning_rate=rate, batch_size=2)
    clients = {"a": client({(1, 0): 0, (1, 1): 1}), "b": client({(1, 0): 2})}
    state, _ = run_rounds(PFedGP(task, LINEAR), clients, num_rounds=1)
    omega = one_iteration()
    by_a = two_point_loss(1 + step, 1, omega) - two_point_loss(1 - step, 1, omega)
    by_b = two_point_loss(1, 1 + step, omega) - two_point_loss(1, 1 - step, omega)
    # b has one class: it learns nothing, and counts for one of three examples.
    expected = [1 - 2 / 3 * rate * by / (2 * step) for by in (by_a, by_b)]
    assert state.network[:2].tolist() == pytest.approx(expected, abs=2e-5)
    assert abs(expected[0] - 1) > 0.01
    assert abs(expected[1] - 1) > 0.01


def test_the_loss_of_a_round_by_hand() -> None:
    task = scaled_task(batch_size=2)
    data = client({(1, 0): 0, (1, 1): 1})
    payload = SharedNetwork(task.initial_weights)
    _, update = PFedGP(task, LINEAR).client_update(payload, None, data, 1, KEY)
    expected = two_point_loss(1, 1, one_iteration())
    assert update.train_loss == pytest.approx(expected, abs=1e-4)
    assert update.num_examples == 2


def test_the_network_moves_and_the_head_stays() -> None:
    task = normed_task(batch_size=4, learning_rate=0.1, weight_decay=0.1)
    clients = {name: noisy(9 + i, 0, seed=i) for i, name in enumerate("abc")}
    state, _ = run_rounds(PFedGP(task, PFedGPSettings()), clients, num_rounds=3)
    moved = state.network != task.initial_weights
    assert not bool(moved[task.head_mask].any())
    assert bool(moved[~task.head_mask].all())


def served(
    task: Task, data: ClientData, settings: PFedGPSettings | None = None, seed: int = 3
) -> HeadPredictor:
    method = PFedGP(task, settings or PFedGPSettings())
    payload = method.broadcast(
        SharedNetwork(task.initial_weights), UNSEEN_CLIENT, RandomKey(2)
    )
    predictor = method.personalize(payload, None, data, RandomKey(seed))
    assert isinstance(predictor, HeadPredictor)
    return predictor


def test_an_unseen_client_is_served_what_its_own_examples_say() -> None:
    task = scaled_task()
    data = client({(0, 0): 2, (0, 1): 2, (1, 0): 0, (1, 1): 0})
    settings = PFedGPSettings(length_scale=0.3)
    probabilities = served(task, data, settings)(data.train.images)
    assert probabilities.argmax(dim=1).tolist() == [2, 2, 0, 0]
    # The class it never saw: one in n + 1.
    assert probabilities[:, 1].tolist() == pytest.approx([0.2] * 4)


def test_the_examples_are_limited_by_chance() -> None:
    task, queries = normed_task(), noisy(6, 0, seed=8).train.images
    data, few = noisy(9, 3, seed=1), PFedGPSettings(max_examples=4)
    first, again, other = (served(task, data, few, seed) for seed in (3, 3, 4))
    assert first.describe() == {"num_gp_examples": 4.0}
    assert torch.equal(first(queries), again(queries))
    assert not torch.equal(first(queries), other(queries))
    assert first.without_validation().describe() == {"num_gp_examples": 4.0}
    # Where all fit there is no chance.
    all_of_them = (served(task, data, seed=seed)(queries) for seed in (3, 4))
    assert torch.equal(*all_of_them)

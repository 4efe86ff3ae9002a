"""pFedGP: Gaussian-process classifiers on a shared representation.

Achituve, Shamsian, Navon, Chechik, Fetaya, "Personalized Federated Learning with
Gaussian Processes", NeurIPS 2021, section 4 and Algorithm 1, with the tree of binary
processes of Achituve, Navon, Yemini, Chechik, Fetaya, "GP-Tree: A Gaussian Process
Classifier for Few-Shot Incremental Learning", ICML 2021; a baseline of Marfoq et al.
2022 (section 5, Tables 2 and 3), which gives no formulas. The server averages φ only. A
client's classifier is a Gaussian process over its own examples with the kernel

    k(x, x') = s κ(φ(x) / l, φ(x') / l)

so that no head is trained. A round maximises the predictive likelihood
Σ_i log p(y_i | x_i, other examples) by φ.

Departures from the papers:

- The Pólya-Gamma variables are not drawn by Gibbs sampling. Their means are found by
  coordinate ascent (mean field), so that a client's classifier is a function of its
  data and its likelihood has no sampling noise.
- The likelihood is that of each example of a mini-batch given the others, in closed
  form. The paper uses all of a client's data in one step; the authors' code divides it
  in two, class by class, and predicts one part from the other.
- The mean weights clients by their examples; the authors' code weights them equally.
- Gaussian processes are exact, without inducing points.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from knnper.data.examples import ClientData
from knnper.embedding_model import EmbeddingModel
from knnper.errors import Problem
from knnper.experiment import Experiment
from knnper.seeding import RandomKey
from knnper.settings import PositiveFloat, PositiveInt, Settings
from knnper.strategies.core.averaging import Updates, average_weights
from knnper.strategies.core.method import Method, wrong_shape
from knnper.strategies.core.predictors import HeadPredictor
from knnper.strategies.core.records import ModelUpdate, NoState, Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd

_MAX_PASSES = 100  # of 2-means
_NODES, _WEIGHTS = np.polynomial.hermite.hermgauss(20)
_SMALLEST = 1e-12  # a variance, or a probability
_SMALL_TILT = 1e-3
_QUERIES_AT_ONCE = 1024
GPKernelName = Literal["rbf", "linear"]


@dataclass(frozen=True)
class Split:
    """An inner node of the tree, which separates two groups of classes."""

    depth: int  # 0 at the root
    left: tuple[int, ...]  # classes; at least one
    right: tuple[int, ...]  # classes, disjoint from the left; at least one

    def signs(self, num_classes: int) -> Tensor:
        """Return 1 for left classes, -1 for right ones, else 0, (num_classes,)."""
        signs = torch.zeros(num_classes, dtype=torch.float64)
        signs[list(self.left)], signs[list(self.right)] = 1.0, -1.0
        return signs


@dataclass(frozen=True)
class ClassTree:
    """A binary tree with a class at each leaf."""

    classes: tuple[int, ...]  # at the leaves, ascending
    splits: tuple[Split, ...]  # inner nodes, parents before their children

    @property
    def depth(self) -> int:
        """The number of levels of inner nodes."""
        return max((split.depth + 1 for split in self.splits), default=0)


def class_tree(embeddings: Tensor, labels: Tensor) -> ClassTree:
    """Build the tree by recursive 2-means of the class means (GP-Tree, section 4.1).

    Departure from the paper: 2-means starts from the two means that are farthest apart,
    not from two random ones, so that the same data give the same tree.
    """
    means = {
        label: embeddings[labels == label].double().mean(dim=0)
        for label in sorted(set(labels.tolist()))
    }
    return ClassTree(tuple(means), tuple(_splits(tuple(means), means, 0)))


def _splits(
    classes: Sequence[int], means: Mapping[int, Tensor], depth: int
) -> Iterator[Split]:
    if len(classes) < 2:
        return
    is_left = _two_means(torch.stack([means[label] for label in classes])).tolist()
    pairs = list(zip(classes, is_left, strict=True))
    left_labels = tuple(label for label, on_left in pairs if on_left)
    right = tuple(label for label, on_left in pairs if not on_left)
    yield Split(depth, left_labels, right)
    yield from _splits(left_labels, means, depth + 1)
    yield from _splits(right, means, depth + 1)


def _two_means(points: Tensor) -> Tensor:
    """Return the mask of the first of two clusters of k ≥ 2 points, shape (k, p).

    No cluster is empty. If all points are equal, the first half is one cluster.
    """
    distances = torch.cdist(points, points)
    centers = points[list(divmod(int(distances.argmax()), len(points)))]
    for _ in range(_MAX_PASSES):
        to_first, to_second = torch.cdist(points, centers).T
        is_left: Tensor = to_first <= to_second
        if bool(is_left.all()) or not bool(is_left.any()):
            return torch.arange(len(points)) < (len(points) + 1) // 2
        before = centers
        centers = torch.stack([points[is_left].mean(0), points[~is_left].mean(0)])
        if torch.equal(centers, before):
            break
    return is_left


@dataclass(frozen=True)
class GPKernel:
    """s κ(z / l, z' / l), with κ(z, z') = exp(-|z - z'|² / 2) or zᵀ z'."""

    name: GPKernelName  # ``rbf`` or ``linear``
    # s, the prior variance of the latent function (of z with |z| = l if linear).
    output_scale: float
    length_scale: float  # l

    def matrix(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the covariances between points (n, p) and (m, p), float64 (n, m)."""
        z, other = (points.double() / self.length_scale for points in (first, second))
        between = z @ other.T
        if self.name == "rbf":
            squares = z.square().sum(dim=1)[:, None] + other.square().sum(dim=1)
            # Without torch.cdist, which has no gradient at distance zero.
            between = torch.exp(-(squares - 2 * between).clamp_min(0) / 2)
        return self.output_scale * between

    def diagonal(self, points: Tensor) -> Tensor:
        """Return the prior variances of points (n, p), float64 of shape (n,)."""
        z = points.double() / self.length_scale
        is_linear = self.name == "linear"
        diagonal = z.square().sum(dim=1) if is_linear else z.new_ones(len(z))
        return self.output_scale * diagonal


def expected_polya_gamma(tilt: Tensor) -> Tensor:
    """Return E ω = tanh(c/2) / (2c) for ω ~ PG(1, c), of the shape of c ≥ 0.

    Polson et al. 2013, section 2.3; 1/4 in the limit c = 0.
    """
    near_zero = 0.25 - tilt.square() / 48
    elsewhere = torch.tanh(tilt / 2) / (2 * tilt.clamp_min(_SMALL_TILT))
    return torch.where(tilt < _SMALL_TILT, near_zero, elsewhere)


@dataclass(frozen=True)
class Posterior:
    """q(f) at n examples; leading axes are a batch of problems."""

    signs: Tensor  # y, ±1 or 0, shape (..., n)
    precision: Tensor  # E ω, shape (..., n); 0 where the sign is 0
    factor: Tensor  # lower triangular L with L Lᵀ = I + Ω^½ K Ω^½, shape (..., n, n)
    mean: Tensor  # of f, Σκ, shape (..., n)
    variance: Tensor  # of f, the diagonal of Σ, shape (..., n)

    def elsewhere(self, covariance: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of f at m points, each of shape (m,).

        ``covariance`` with the examples is of shape (n, m), and the ``prior`` variance
        (m,).

        Rasmussen, Williams, "Gaussian Processes for Machine Learning", 2006,
        Eq. 3.21 and 3.24, with the observations Ω⁻¹κ of precision Ω.
        """
        coefficients = self.signs / 2 - self.precision * self.mean  # K⁻¹ Σκ
        explained = _whitened(self.factor, self.precision, covariance)
        return coefficients @ covariance, prior - explained.square().sum(dim=0)

    def left_out(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of f at each example given all others, (..., n).

        The example's own observation is divided out of its marginal: Rasmussen,
        Williams 2006, Eq. 5.12, with ω as all examples determine it.
        """
        remaining = 1 - self.precision * self.variance
        return (
            self.mean - self.signs / 2 * self.variance
        ) / remaining, self.variance / remaining


def posterior(covariance: Tensor, signs: Tensor, num_iterations: int) -> Posterior:
    """Compute the mean-field posterior for K (..., n, n) and y, ±1 or 0, (..., n).

    Gradients flow through the covariance; ω is constant.
    """
    with torch.no_grad():
        precision = signs.abs() / 4
        for _ in range(num_iterations):
            result = posterior_given(covariance, signs, precision)
            tilt = (result.mean.square() + result.variance.clamp_min(0)).sqrt()
            precision = signs.abs() * expected_polya_gamma(tilt)
    return posterior_given(covariance, signs, precision)


def posterior_given(covariance: Tensor, signs: Tensor, precision: Tensor) -> Posterior:
    """Compute p(f | y, ω), with arguments as in `posterior`."""
    root = precision.sqrt()
    identity = torch.eye(signs.shape[-1], dtype=signs.dtype, device=signs.device)
    scaled = root[..., None] * covariance * root[..., None, :]
    # Eigenvalues are at least 1, so it fails only if a number is not finite.
    factor, failed = torch.linalg.cholesky_ex(identity + scaled)
    factor = factor.where(failed[..., None, None] == 0, torch.nan)
    explained = _whitened(factor, precision, covariance)
    target = signs[..., None] / 2
    mean = covariance @ target - explained.mT @ (explained @ target)
    variance = covariance.diagonal(dim1=-2, dim2=-1) - explained.square().sum(dim=-2)
    return Posterior(signs, precision, factor, mean.squeeze(-1), variance)


def _whitened(factor: Tensor, precision: Tensor, covariance: Tensor) -> Tensor:
    """Return L⁻¹ Ω^½ K, of the shape of K; its square is the variance explained."""
    scaled = precision.sqrt()[..., None] * covariance
    whitened: Tensor = torch.linalg.solve_triangular(factor, scaled, upper=False)
    return whitened


def log_expected_sigmoid(mean: Tensor, variance: Tensor) -> Tensor:
    """Return log E σ(f) for f ~ N(mean, variance), of the shape of both.

    Gauss-Hermite quadrature with 20 nodes, in logarithms, so that the loss stays finite
    for a wrong and confident f.
    """
    # Nodes and weights for a standard Gaussian variable.
    scaled = torch.from_numpy(math.sqrt(2) * _NODES).to(mean.device)
    shares = torch.from_numpy(np.log(_WEIGHTS / math.sqrt(math.pi))).to(mean.device)
    # The square root has no gradient at variance 0.
    deviation = variance.clamp_min(_SMALLEST).sqrt()
    values = mean[..., None] + deviation[..., None] * scaled
    return torch.logsumexp(functional.logsigmoid(values) + shares, dim=-1)


@dataclass(frozen=True)
class GPNode:
    """The Gaussian process of an inner node."""

    split: Split  # the two groups of classes
    embeddings: Tensor  # of the n examples below it, shape (n, p)
    kernel: GPKernel  # between representations
    posterior: Posterior  # q(f) at the examples

    def log_branches(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(left) and log p(right) of queries (m, p), shape (m,)."""
        covariance = self.kernel.matrix(self.embeddings, queries)
        prior = self.kernel.diagonal(queries)
        mean, variance = self.posterior.elsewhere(covariance, prior)
        log_left = log_expected_sigmoid(mean, variance)
        return log_left, log_expected_sigmoid(-mean, variance)


@dataclass(frozen=True)
class TreeClassifier:
    """p(y|x) from representations, by a tree of Gaussian processes."""

    num_examples: int  # n, training examples
    num_classes: int  # c, of the task
    tree: ClassTree  # over the classes of the examples
    nodes: tuple[GPNode, ...]  # one for each split of the tree, in its order

    def __call__(self, queries: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (m, c), of representations (m, p).

        The probability of a class is the product over the branches on its path. Classes
        without examples share 1 / (n + 1), the probability of a new class in a Chinese
        restaurant process with concentration 1.
        """
        parts = torch.split(queries, _QUERIES_AT_ONCE)  # n covariances each
        known = torch.cat([self._among_known(part) for part in parts])
        num_new = self.num_classes - len(self.tree.classes)
        shares = torch.ones(self.num_classes, dtype=torch.float64)
        if num_new > 0:
            of_new = 1 / (self.num_examples + 1)
            shares.fill_(of_new / num_new)
            shares[list(self.tree.classes)] = 1 - of_new
        return (known * shares).clamp_min(_SMALLEST).float()

    def _among_known(self, queries: Tensor) -> Tensor:
        """Return p(class | class in the tree), (m, c); 1 for classes outside of it."""
        log_paths = torch.zeros(len(queries), self.num_classes, dtype=torch.float64)
        for node in self.nodes:
            log_left, log_right = node.log_branches(queries)
            log_paths[:, list(node.split.left)] += log_left[:, None]
            log_paths[:, list(node.split.right)] += log_right[:, None]
        return log_paths.exp()


def fit_classifier(
    embeddings: Tensor,
    labels: Tensor,
    num_classes: int,
    kernel: GPKernel,
    num_iterations: int,
) -> TreeClassifier:
    """Fit the classifier to n examples.

    Costs O(n³) at the root, and less in the nodes below, which have fewer examples.
    """

    def fitted(split: Split) -> GPNode:
        signs = split.signs(num_classes)[labels]
        below = signs != 0
        points = embeddings[below]
        covariance = kernel.matrix(points, points)
        node_posterior = posterior(covariance, signs[below], num_iterations)
        return GPNode(split, points, kernel, node_posterior)

    tree = class_tree(embeddings, labels)
    nodes = tuple(fitted(split) for split in tree.splits)
    return TreeClassifier(len(labels), num_classes, tree, nodes)


def levels_of(
    tree: ClassTree, num_classes: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the branch and the inner node of each class on each level of a tree.

    The branch is 1 left, -1 right and 0 below the leaf, float64; the node is its
    number, int64; both of shape (depth, num_classes).
    """
    signs = torch.zeros(tree.depth, num_classes, dtype=torch.float64)
    nodes = torch.full((tree.depth, num_classes), -1)
    for number, split in enumerate(tree.splits):
        signs[split.depth] += split.signs(num_classes)
        nodes[split.depth, [*split.left, *split.right]] = number
    return signs.to(device), nodes.to(device)


def predictive_losses(
    class_signs: Tensor,
    class_nodes: Tensor,
    covariance: Tensor,
    labels: Tensor,
    num_iterations: int,
) -> Tensor:
    """Return -Σ log p(branch) over the nodes on the path to each label, shape (n,).

    Each branch is predicted from the other examples below the same node. Nodes of a
    level share no example. They are therefore solved as one Gaussian process with zero
    covariance between nodes, and all levels as one batch. Below its leaf a label has
    sign 0, so it adds nothing, whatever its node. ``class_signs`` and ``class_nodes``
    are those of `levels_of`.
    """
    signs, nodes = class_signs[:, labels], class_nodes[:, labels]
    same_node = nodes[:, :, None] == nodes[:, None, :]
    node_posterior = posterior(covariance * same_node, signs, num_iterations)
    mean, variance = node_posterior.left_out()
    log_likelihood = signs.abs() * log_expected_sigmoid(signs * mean, variance)
    return -log_likelihood.sum(dim=0).float()


@dataclass(frozen=True)
class PFedGPSettings(Settings):
    """The Gaussian processes; kernel and scales default to those of the paper.

    Attributes
    ----------
    kernel
        κ: ``rbf`` is exp(-|z - z'|² / 2), ``linear`` is zᵀ z'.
    output_scale
        s, the prior variance of the latent function; useful from 1 to 20. Neither s nor
        l is trained, since φ can learn any scale.
    length_scale
        l, in units of representations; useful from 0.1 to 10.
    num_iterations
        Iterations of coordinate ascent for the means of the Pólya-Gamma variables; 5 to
        20.
    max_examples
        The most examples of a client in its classifier, drawn at random; its cost is
        cubic in their number.
    """

    kernel: GPKernelName = "rbf"
    output_scale: PositiveFloat = 8.0
    length_scale: PositiveFloat = 1.0
    num_iterations: PositiveInt = 10
    max_examples: PositiveInt = 1000


@dataclass(frozen=True)
class SharedNetwork(Record):
    """The state of the server, and the payload of every client.

    Not a `ModelState`, since its head is never trained and no client serves it.
    """

    network: Tensor  # φ and the initial head, shape (num_weights,)


class PFedGP(Method):
    """A shared network, with Gaussian processes on it as each client's classifier."""

    title = "pFedGP"
    needs_cross_entropy = "its loss is that of the Gaussian process"
    source = "Achituve et al. 2021 (NeurIPS), Algorithm 1; Marfoq et al. 2022"
    unseen = "the shared network and Gaussian processes over the client's own examples"
    learns_from_validation = "all"
    reference_title = None
    serves_one_model = False
    takes_mean = True
    personalizes_by_inference = True
    state_type = SharedNetwork
    payload_type = SharedNetwork

    settings: PFedGPSettings

    def __init__(self, task: Task, settings: PFedGPSettings) -> None:
        super().__init__(task, settings)
        self._kernel = GPKernel(
            settings.kernel, settings.output_scale, settings.length_scale
        )
        self._num_classes, self._of_network = task.spec.num_classes, ~task.head_mask

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> SharedNetwork:
        return SharedNetwork(self.task.initial_weights)

    @override
    def local_update(
        self, payload: SharedNetwork, data: ClientData, rate: float, rng: RandomKey
    ) -> ModelUpdate:
        embeddings = self.task.embed(payload.network, data.train.images)
        tree = class_tree(embeddings, data.train.labels)
        signs, nodes = levels_of(tree, self._num_classes, self.task.model.device)
        num_iterations = self.settings.num_iterations

        def losses(module: EmbeddingModel, inputs: Tensor, labels: Tensor) -> Tensor:
            """Return -log p(y | x, the rest of the mini-batch) of each example."""
            points = module.embed(inputs)
            covariance = self._kernel.matrix(points, points)
            return predictive_losses(signs, nodes, covariance, labels, num_iterations)

        trained = local_sgd(
            self.task,
            payload.network,
            data.train,
            rate,
            rng,
            trainable=self._of_network,
            objective=losses,
        )
        return trained.update(len(data.train))

    @override
    def personalize(
        self,
        payload: SharedNetwork,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> HeadPredictor:
        network, (train, held_out) = payload.network, (data.train, data.validation)
        of_train = self.task.embed(network, train.images)
        of_both = torch.cat([of_train, self.task.embed(network, held_out.images)])
        settings = self.settings

        def fitted(embeddings: Tensor, labels: Tensor) -> HeadPredictor:
            chosen, most = torch.arange(len(labels)), settings.max_examples
            if len(labels) > most:
                generator = rng.child("examples").numpy()
                drawn = generator.choice(len(labels), size=most, replace=False)
                chosen = torch.from_numpy(drawn).sort().values
            head = fit_classifier(
                embeddings[chosen],
                labels[chosen],
                self._num_classes,
                self._kernel,
                settings.num_iterations,
            )
            size = {"num_gp_examples": float(head.num_examples)}
            return HeadPredictor(self.task, network, head, size)

        served = fitted(of_both, torch.cat([train.labels, held_out.labels]))
        alone = (lambda: fitted(of_train, train.labels)) if len(held_out) else None
        return replace(served, trained_alone=alone)

    @override
    def aggregate(
        self, state: SharedNetwork, updates: Updates[ModelUpdate]
    ) -> SharedNetwork:
        return SharedNetwork(average_weights(updates).weights)

    @override
    def update_problem(self, payload: SharedNetwork, update: ModelUpdate) -> str | None:
        return wrong_shape(update, weights=(self.task.model.num_weights,))

    @override
    def started_from(
        self, payload: SharedNetwork, update: ModelUpdate
    ) -> Mapping[str, Tensor]:
        return {"weights": payload.network}

    @staticmethod
    @override
    def check(settings: PFedGPSettings, experiment: Experiment) -> Sequence[Problem]:
        if experiment.training.batch_size > 1:
            return ()
        message = (
            "found 1, expected 2 or more with pfedgp: each example is predicted from "
            "the others of its mini-batch; the larger it is, the better"
        )
        return (Problem("training.batch_size", message),)

"""pFedFDA: a body trained under a Gaussian model of all clients' embeddings.

Mclaughlin, Su, "Personalized Federated Learning via Feature Distribution Adaptation",
NeurIPS 2024, Algorithm 1. Embeddings z = θ(x), (p,), of class y are modelled as
N(μ_y, Σ), with one Σ for all c classes. With class frequencies π this gives the head

    h(z)_y ∝ π_y exp(z·a_y - ½ μ_y·a_y),  a_y = Σ_ε⁻¹ μ_y,
    Σ_ε = (1 - ε) Σ + ε (tr Σ / p) I,  ε = 1e-4

A participant i with the server's θ, μ and Σ trains θ by SGD under the head of μ, Σ and
its own π_i, which is fixed. From its embeddings under the trained θ_i it estimates μ̂_i,
with μ for classes that it does not have, and Σ̂_i = S / (n_i - 1) + ρ I, with S the
scatter around μ̂_i. It sends θ_i and

    μ_i = β μ̂_i + (1 - β) μ,  Σ_i = β' Σ̂_i + (1 - β') Σ

β and β' minimise the cross-entropy of the head of (μ_i, Σ_i, π_i) on one half of its
examples, with μ̂_i and Σ̂_i from the other half, summed over both halves. The server
averages θ_i, μ_i and Σ_i, weighted by examples. After the last round every client, seen
or unseen, estimates once more on the last θ, and serves the head of its μ_i, Σ_i, π_i.

As in the authors' code, μ is initially uniform in [0, 1), Σ is I and ρ is 1; π has 1e-4
added to each class; and classes of one example are left out of both halves.

Departures from the paper and the code:

- The code estimates in a round from embeddings collected during training, and adds 1e-4
  to all of Σ̂_i as well. It minimises by L-BFGS without bounds and clips the result.
- Every round has the same number of clients. In the code each client takes part by its
  own draw, and all clients do in the last round.
- The last estimate uses both splits. The global model has equal π.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.errors import ConfigError, Problem
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, Settings, UnitInterval
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.method import wrong_shape
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import NoState, Record
from knnper.strategies.core.sharing import PartlyShared, SharedUpdate
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fedproto import class_means

SHRINKAGE = 1e-4
PRIOR = 1e-4


@dataclass(frozen=True)
class PFedFDASettings(Settings):
    """The interpolation between a client's estimates and those of all clients.

    Attributes
    ----------
    interpolation_weight
        β and β', [0, 1]; null lets each client choose them, in each round and after the
        last. 1 is the client's own estimates, an ablation of the paper; with 0 only the
        body is learned.
    separate_weights
        Whether β and β' are chosen separately, as in the authors' code, or are equal.
    covariance_ridge
        ρ, which is added to the variances of a client's own estimate; useful from 0.01
        to 1, on the scale of the embeddings' variances. 1 in the authors' code.
    """

    interpolation_weight: UnitInterval | None = None
    separate_weights: bool = True
    covariance_ridge: NonNegativeFloat = 1.0


@dataclass(frozen=True)
class Gaussians(Record):
    """The Gaussian model of the embeddings of each class."""

    means: Tensor  # μ, shape (c, p)
    covariance: Tensor  # Σ, shape (p, p)

    def mixed(self, other: Self, weights: Sequence[float]) -> "Gaussians":
        """Interpolate with ``other``; ``weights`` are (β, β') of this model."""
        of_means, of_covariance = weights
        return Gaussians(
            of_means * self.means + (1 - of_means) * other.means,
            of_covariance * self.covariance + (1 - of_covariance) * other.covariance,
        )

    def shrunk(self) -> Tensor:
        """Return Σ_ε."""
        variance = self.covariance.diagonal().mean()
        identity = torch.eye(len(self.covariance), dtype=self.covariance.dtype)
        # The constant keeps it positive if all embeddings are equal and ρ is 0.
        floor = SHRINKAGE * variance + 1e-12
        return (1 - SHRINKAGE) * self.covariance + floor * identity

    def head(self) -> tuple[Tensor, Tensor]:
        """Return a, (c, p), and -½ μ·a, (c,), the head without log π."""
        factor = torch.linalg.cholesky(self.shrunk())
        slopes = torch.cholesky_solve(self.means.T, factor).T
        return slopes, -0.5 * (self.means * slopes).sum(dim=1)

    def double(self) -> "Gaussians":
        """Convert to float64."""
        return Gaussians(self.means.double(), self.covariance.double())

    def float(self) -> "Gaussians":
        """Convert to float32."""
        return Gaussians(self.means.float(), self.covariance.float())


@dataclass(frozen=True)
class ModelAndGaussians(Record):
    """The state of the server, and the payload of every client."""

    weights: Tensor  # θ with the head of equal π, shape (num_weights,)
    features: Gaussians


@dataclass(frozen=True)
class PFedFDAUpdate(SharedUpdate):
    """The update of a client."""

    features: Gaussians  # μ_i and Σ_i


@dataclass(frozen=True, kw_only=True)
class SharedBodyPredictor(ModelPredictor):
    """A predictor with the body of another model, by which it embeds.

    The pool then computes the embeddings of the shared body only once.
    """

    shared: Tensor  # the other model, shape (num_weights,)

    @override
    def embed(self, images: Tensor) -> Tensor:
        return self.task.embed(self.shared, images)


class PFedFDA(PartlyShared):
    """A shared body under the head of a Gaussian model, which each client adapts."""

    title = "pFedFDA"
    source = "Mclaughlin and Su 2024, Algorithm 1"
    upload = "< 1 (all but the head; c + p vectors of the embedding's size)"
    download = "1 (and c + p vectors of the embedding's size)"
    server_state = "1 (and c + p vectors of the embedding's size)"
    unseen = "the shared body, and a head of the global and its own embeddings"
    learns_from_validation = "all"
    reference_title = "pFedFDA (global)"
    ends_with_global_model = True
    needs_metrics = True
    personalizes_by_inference = True
    state_type = ModelAndGaussians
    payload_type = ModelAndGaussians
    update_type = PFedFDAUpdate
    client_state_type = NoState

    settings: PFedFDASettings

    def __init__(self, task: Task, settings: PFedFDASettings) -> None:
        super().__init__(task, settings, ~task.head_mask, unseen_epochs=0)
        self._shape = task.spec.num_classes, task.model.module.embedding_dim
        inside = {*task.model.module.classifier.modules()}
        entries = [entry for entry in task.model.entries if entry.module in inside]
        shapes = [entry.shape for entry in entries]
        expected = [self._shape, self._shape[:1]]
        if shapes != expected:
            message = (
                f"found a head with weights {shapes}, expected {expected}, one linear "
                "layer with a bias, which pfedfda computes; choose another model, or "
                "the method fedrep"
            )
            raise ConfigError([Problem("method.name", message)])
        self._names = [entry.name for entry in entries]

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> ModelAndGaussians:
        drawn = rng.child("means").numpy().random(self._shape, dtype=np.float32)
        features = Gaussians(torch.from_numpy(drawn), torch.eye(self._shape[1]))
        return self._with_head(self.task.initial_weights, features)

    def _with_head(self, body: Tensor, features: Gaussians) -> ModelAndGaussians:
        tensors = self.task.model.named(body)
        tensors.update(zip(self._names, features.double().head(), strict=True))
        return ModelAndGaussians(self.task.model.flatten(tensors), features)

    def _with_prior(self, weights: Tensor, log_prior: Tensor) -> Tensor:
        tensors = self.task.model.named(weights)
        tensors[self._names[1]] = tensors[self._names[1]] + log_prior
        return self.task.model.flatten(tensors)

    def _log_prior(self, labels: Tensor) -> Tensor:
        """Return log π of a client's classes, float64 of shape (c,)."""
        num_classes = self._shape[0]
        counts = torch.bincount(labels, minlength=num_classes).double()
        return ((counts / len(labels) + PRIOR) / (1 + num_classes * PRIOR)).log()

    @override
    def client_update(
        self,
        payload: ModelAndGaussians,
        client_state: NoState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[NoState, PFedFDAUpdate]:
        examples = data.train
        trained = local_sgd(
            self.task,
            self._with_prior(payload.weights, self._log_prior(examples.labels)),
            examples,
            self.task.training.learning_rate_at(server_round),
            rng,
            trainable=self.shared,
        )
        embeddings = self.task.embed(trained.weights, examples.images)
        adapted, _ = self._adapted(payload.features, embeddings, examples.labels, rng)
        return NoState(), PFedFDAUpdate(
            trained.weights[self.shared],
            len(examples),
            trained.train_loss,
            adapted.float(),
        )

    def _adapted(
        self, features: Gaussians, embeddings: Tensor, labels: Tensor, rng: RandomKey
    ) -> tuple[Gaussians, Sequence[float]]:
        """Return (μ_i, Σ_i) in float64, and (β, β'), from embeddings (n, p)."""
        of_all, exact = features.double(), embeddings.double()
        fixed = self.settings.interpolation_weight
        weights: Sequence[float] = (fixed or 0.0,) * 2
        if fixed is None:
            weights = self._chosen(of_all, exact, labels, rng)
        estimate = self._estimate(of_all, exact, labels)
        return estimate.mixed(of_all, weights), weights

    def _estimate(
        self, of_all: Gaussians, embeddings: Tensor, labels: Tensor
    ) -> Gaussians:
        """Return (μ̂_i, Σ̂_i)."""
        counts, means = class_means(embeddings, labels, self._shape[0])
        means = torch.where(counts[:, None] > 0, means, of_all.means)
        away = embeddings - means[labels]
        ridge = self.settings.covariance_ridge * torch.eye(self._shape[1]).double()
        return Gaussians(means, away.T @ away / max(1, len(embeddings) - 1) + ridge)

    def _chosen(
        self, of_all: Gaussians, embeddings: Tensor, labels: Tensor, rng: RandomKey
    ) -> Sequence[float]:
        """Choose (β, β') by cross-validation; 0 if no class has two examples."""
        log_prior = self._log_prior(labels)
        usable = torch.bincount(labels)[labels] > 1
        embeddings, labels = embeddings[usable], labels[usable]
        if not len(labels):
            return 0.0, 0.0
        first, second = halves(labels, rng)
        folds, whiten = [], torch.linalg.inv(torch.linalg.cholesky(of_all.shrunk()))
        for fit, held_out in ((first, second), (second, first)):
            estimate = self._estimate(of_all, embeddings[fit], labels[fit])
            # In this basis Σ_ε is the identity and the estimate's Σ_ε is diagonal, so
            # one decomposition serves all β'.
            whitened = whiten @ estimate.shrunk() @ whiten.T
            variances, vectors = torch.linalg.eigh(whitened)
            basis = whiten.T @ vectors
            rows = estimate.means, of_all.means, embeddings[held_out]
            folds.append((variances, *(row @ basis for row in rows), labels[held_out]))

        # Imported here: the import takes a quarter of a second.
        from scipy.optimize import minimize

        def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            point = torch.from_numpy(weights).requires_grad_()
            total = torch.zeros((), dtype=torch.float64)
            for variances, its_means, all_means, queries, answers in folds:
                means = torch.lerp(all_means, its_means, point[0])
                slopes = means / (point[-1] * variances + 1 - point[-1])
                bias = log_prior - 0.5 * (means * slopes).sum(dim=1)
                logits = queries @ slopes.T + bias
                total = total + functional.cross_entropy(logits, answers)
            (gradient,) = torch.autograd.grad(total, point)
            return float(total.detach()), gradient.numpy()

        num = 2 if self.settings.separate_weights else 1
        start, bounds = np.full(num, 0.5), [(0.0, 1.0)] * num
        limit = {"maxiter": 10}
        optimum = minimize(
            loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=limit
        )
        return float(optimum.x[0]), float(optimum.x[-1])

    @override
    def aggregate(
        self, state: ModelAndGaussians, updates: Updates[PFedFDAUpdate]
    ) -> ModelAndGaussians:
        bodies, means, covariances = RunningMean(), RunningMean(), RunningMean()
        for _, update in updates:
            bodies.add(update.shared, update.num_examples)
            means.add(update.features.means, update.num_examples)
            covariances.add(update.features.covariance, update.num_examples)
        weights = state.weights.masked_scatter(self.shared, bodies.result())
        return self._with_head(weights, Gaussians(means.result(), covariances.result()))

    @override
    def personalize(
        self,
        payload: ModelAndGaussians,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> ModelPredictor:
        weights = payload.weights

        def served(*splits: Examples) -> ModelPredictor:
            # By split, since the pool may already hold the embeddings of a split.
            embeddings = [self.task.embed(weights, split.images) for split in splits]
            labels = torch.cat([split.labels for split in splits])
            if not len(labels):
                return ModelPredictor(self.task, weights)
            all_embeddings = torch.cat(embeddings)
            features, chosen = self._adapted(
                payload.features, all_embeddings, labels, rng
            )
            with_head = self._with_head(weights, features).weights
            return SharedBodyPredictor(
                self.task,
                self._with_prior(with_head, self._log_prior(labels)),
                dict(zip(("mean_weight", "covariance_weight"), chosen, strict=True)),
                shared=weights,
            )

        if not len(data.validation):
            return served(data.train)
        both = served(data.train, data.validation)
        return replace(both, trained_alone=lambda: served(data.train))

    @override
    def update_problem(
        self, payload: ModelAndGaussians, update: PFedFDAUpdate
    ) -> str | None:
        num_classes, size = self._shape
        problem = super().update_problem(payload, update) or wrong_shape(
            update.features, means=(num_classes, size), covariance=(size, size)
        )
        if problem is None:
            shrunk = update.features.double().shrunk()
            if int(torch.linalg.cholesky_ex(shrunk).info):
                return "covariance: expected no negative variance in any direction"
        return problem


def halves(labels: Tensor, rng: RandomKey) -> tuple[Tensor, Tensor]:
    """Split the examples of each class at random in two; return positions."""
    shuffled = torch.from_numpy(rng.child("halves").numpy().permutation(len(labels)))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    return by_class[::2], by_class[1::2]

"""AFL: a linear head by ridge regression on statistics that clients send once.

He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang, "AFL: A Single-Round Analytic Approach for
Federated Learning with Pre-trained Models", CVPR 2025. The body is frozen. Client m
with the inputs X_m (n_m, q) and the targets Y_m (n_m, c) sends

    C_m = X_mᵀ X_m / n_m,  B_m = X_mᵀ Y_m / n_m

The server takes the means C and B over the clients, weighted by n_m, and solves

    W = (C + γ I)⁻¹ B

This is the ridge regression on the examples of all clients together. The paper's
clients send their own solutions Ŵ_m = (X_mᵀ X_m + r I)⁻¹ X_mᵀ Y_m and the matrices
R_m = X_mᵀ X_m + r I, which the absolute aggregation law joins, one client after the
other, into Ŵ with (Σ R_m) Ŵ = Σ R_m Ŵ_m = Σ X_mᵀ Y_m. Then r is removed again:
Σ R_m - M r I = Σ X_mᵀ X_m for M clients, so that the paper's result is W with γ = 0.
Means give the same W as sums if γ is counted per example.

A row of X_m is an embedding φ(x), minus the mean of its p numbers, with or without a
random projection, and scaled to length 1. A row of Y_m is one-hot, minus 1/c. So W
needs no bias, an input's length changes the confidence of a prediction but not the
class, and an update has a norm of at most √2, whatever the data. Embeddings that are
outputs of a ReLU share a large constant part, which would be most of C and of its norm.

C_m is symmetric. Its upper triangle is sent, with √2 times the numbers above the
diagonal, so that the vector has the norm of the matrix: if noise is added to the
vector, the matrix stays symmetric with noise of equal distribution in every basis. Such
a sum can have negative eigenvalues; the server replaces them by 0, which needs no more
data.

Departures from the paper: embeddings are centred and scaled, and can be projected;
targets are centred; the ridge γ stays; the statistics themselves are sent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from knnper.data.examples import ClientData
from knnper.errors import ConfigError, Problem
from knnper.experiment import Experiment
from knnper.seeding import RandomKey
from knnper.settings import PositiveFloat, PositiveInt, Settings
from knnper.strategies.core.averaging import RunningMean, Updates, denominator
from knnper.strategies.core.method import wrong_shape
from knnper.strategies.core.records import ModelPayload, ModelState, Record
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import FedAvg

_REASON = "clients of afl send the statistics of all their examples once, for the head"


@dataclass(frozen=True)
class AFLSettings(Settings):
    """The ridge regression.

    Attributes
    ----------
    ridge
        γ, added to the eigenvalues of C, whose sum is 1; useful from 1e-6 to 0.1, the
        larger the more noise the statistics have.
    num_features
        q, the numbers to which each embedding is projected by random signs; null: none,
        q is the embedding's size p. Noise on C grows with q, so that with noise 32 to
        512 are useful.
    logit_scale
        Factor on W in the model's head. The larger, the more confident the model; its
        choice of a class does not depend on it.
    """

    ridge: PositiveFloat = 1e-4
    num_features: PositiveInt | None = None
    logit_scale: PositiveFloat = 1.0


@dataclass(frozen=True)
class AFLUpdate(Record):
    """The statistics of a client."""

    gram: Tensor  # C_m as a vector, shape (q (q + 1) / 2,); see `to_vector`
    targets: Tensor  # B_m, shape (q, c)
    num_examples: int
    train_loss: float  # of the model that was sent


class AFL(FedAvg):
    """A linear head by ridge regression on statistics that clients send once."""

    title = "AFL"
    source = "He et al. 2025"
    upload = "statistics: q (q + 1) / 2 + q c numbers"
    ends_with_global_model = True
    needs_metrics = True
    takes_mean = True
    update_type = AFLUpdate

    settings: AFLSettings

    def __init__(self, task: Task, settings: AFLSettings) -> None:
        super().__init__(task, settings)
        size = task.model.module.embedding_dim
        self._num_features = settings.num_features or size
        if not isinstance(task.model.module.classifier, nn.Linear):
            message = (
                "found a head that is no linear layer, expected one, which afl "
                "computes; choose another model, or the method fedavg"
            )
            raise ConfigError([Problem("method.name", message)])
        self._projection: Tensor | None = None
        if settings.num_features is not None:
            # Signs, so that every machine has the same bits.
            shape = size, self._num_features
            signs = task.key.child("projection").numpy().integers(0, 2, shape) * 2 - 1
            self._projection = torch.from_numpy(signs).double()

    @staticmethod
    @override
    def check(settings: AFLSettings, experiment: Experiment) -> Sequence[Problem]:
        trained = getattr(experiment.model.settings, "trained", None)
        training = experiment.training
        settings_and_needs = {
            "model.trained": (trained, "head"),
            "training.num_rounds": (training.num_rounds, 1),
            "training.participation": (training.participation, 1),
        }
        return [
            Problem(place, f"found {value}, expected {needed}: {_REASON}; set {needed}")
            for place, (value, needed) in settings_and_needs.items()
            if value != needed
        ]

    @override
    def local_update(
        self, payload: ModelPayload, data: ClientData, rate: float, rng: RandomKey
    ) -> AFLUpdate:
        examples = data.train
        embeddings = self.task.embed(payload.weights, examples.images)
        probabilities = self.task.head(payload.weights, embeddings)
        log_probabilities = denominator(probabilities).log()
        # X_m and Y_m, in float64.
        rows = embeddings.double()
        rows = rows - rows.mean(dim=1, keepdim=True)
        if self._projection is not None:
            rows = rows @ self._projection
        inputs = functional.normalize(rows, dim=1)
        labels = functional.one_hot(examples.labels, self.task.spec.num_classes)
        targets = labels.double() - 1 / self.task.spec.num_classes
        self.task.on_trained(1, float(len(examples)))
        return AFLUpdate(
            to_vector(inputs.T @ inputs / len(examples)),
            (inputs.T @ targets / len(examples)).float(),
            len(examples),
            float(functional.nll_loss(log_probabilities, examples.labels)),
        )

    @override
    def aggregate(self, state: ModelState, updates: Updates[AFLUpdate]) -> ModelState:
        gram, targets = RunningMean(), RunningMean()
        for _, update in updates:
            gram.add(update.gram, update.num_examples)
            targets.add(update.targets, update.num_examples)
        solution = solve_ridge(
            to_matrix(gram.result_float64(), self._num_features),
            targets.result_float64(),
            self.settings.ridge,
        )
        if self._projection is not None:
            solution = self._projection @ solution
        # Centring an embedding is a linear map, so the head contains it.
        solution = solution - solution.mean(dim=0)
        head = (self.settings.logit_scale * solution.T).float().flatten()
        weights, mask = state.weights.clone(), self.task.head_mask
        # A bias comes after the head's matrix, and is 0.
        weights[mask] = functional.pad(head, (0, int(mask.sum()) - len(head)))
        return ModelState(weights)

    @override
    def update_problem(self, payload: ModelPayload, update: AFLUpdate) -> str | None:
        return wrong_shape(
            update,
            gram=(self._num_features * (self._num_features + 1) // 2,),
            targets=(self._num_features, self.task.spec.num_classes),
        )

    @override
    def bytes_up(self, client_id: str) -> int:
        size = self._num_features
        return 4 * (size * (size + 1) // 2 + size * self.task.spec.num_classes)


def to_vector(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix (q, q) as a float32 vector.

    Shape (q (q + 1) / 2,), row by row. Numbers above the diagonal are multiplied by √2,
    so that the norm of the vector is that of the matrix.
    """
    scaled = math.sqrt(2) * matrix.triu(1) + matrix.diag().diag()
    return scaled[tuple(torch.triu_indices(*matrix.shape))].float()


def to_matrix(vector: Tensor, size: int) -> Tensor:
    """Return the symmetric float64 matrix (q, q) of a vector made by `to_vector`."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix[tuple(torch.triu_indices(size, size))] = vector.double()
    above = matrix.triu(1) / math.sqrt(2)
    return above + above.T + matrix.diag().diag()


def solve_ridge(gram: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """Return (C + γ I)⁻¹ B, float64 (q, c), with C's negative eigenvalues set to 0."""
    eigenvalues, vectors = torch.linalg.eigh(gram)
    inverse = 1 / (eigenvalues.clamp_min(0) + ridge)
    solution: Tensor = vectors @ (inverse[:, None] * (vectors.T @ targets))
    return solution

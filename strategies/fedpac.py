"""FedPAC: features pulled to class centroids, and heads mixed for each client.

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier
Collaboration", ICLR 2023, Algorithm 1. A participant i with the server's body θ and its
own head φ_i trains

    φ_i ← SGD on f_i(·, θ), one epoch, θ fixed
    θ_i ← SGD on f_i(φ_i, ·) + λ mean_x |θ(x) - c_y|² / p from θ, φ_i fixed

where c_y, (p,), is the mean embedding of class y over all clients. It sends both, the
mean embedding of each of its classes under θ_i, and two figures under the θ that it was
sent, of the n_i vectors z = e_y ⊗ θ(x), which are 0 but for a row y of (c, p): their
mean h_i, and V_i, the variance of that mean. The server takes the means of the bodies
and of the class means, both by examples, and for client i the head Σ_j α_ij φ_j with

    α_i = argmin_α Σ_j α_j² V_j + |h_i - Σ_j α_j h_j|²,  α_j ≥ 0, Σ_j α_j = 1

over the participants j: the variance and the bias of an estimate of h_i from all. After
the last round every client trains once more, as in a round, and is served that.

Departures: the pull to a class that no client has had is left out, and a class that no
participant has keeps its c_y (the paper has all clients in all rounds, the authors'
code takes the client's own mean). The quadratic programme is solved exactly, as one of
non-negative least squares; the code zeroes weights below 0.001. Means and V are of the
embeddings in evaluation mode, and clients train in training mode; the code trains in
evaluation mode too, as a test before the training leaves the network in it, which
matters with dropout or normalisation. The last training is on both splits. A client
without a head of its own has the mean of those of the last round, weighted by examples,
and trains it longer in the end, at the first round's rate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from knnper.data.examples import ClientData, Examples
from knnper.errors import ConfigError, Problem
from knnper.seeding import RandomKey
from knnper.settings import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Settings,
)
from knnper.strategies.core.averaging import Updates, average_weights, denominator
from knnper.strategies.core.method import Method, wrong_shape
from knnper.strategies.core.records import ModelUpdate, NoState, Record
from knnper.strategies.core.task import ModelPredictor, Task
from knnper.strategies.core.training import LocalResult, on_both_splits
from knnper.strategies.fedproto import near_centers
from knnper.strategies.fedrep import head_then_body


@dataclass(frozen=True)
class FedPACSettings(Settings):
    """The two parts of FedPAC, and how a client trains its head.

    Attributes
    ----------
    alignment_weight
        λ of the pull to the class centroids; 1 in the authors' code, 0.1 to 10 to
        try, and 0 is none.
    mixes_heads
        Whether clients get a mixture of the heads, or their own back. Without, and with
        λ = 0, the rounds are FedRep's.
    head_epochs
        Passes over its data in which a client trains its head before the body, in each
        round and in the end; 1 in the paper. How long the body is trained is the
        training section's.
    head_learning_rate
        Of the head; 0.1 in the authors' code, where that of the body is 0.01. Null is
        the training section's. Either is multiplied by the schedule's factor.
    unseen_epochs
        The same passes in the end of a client that was never drawn.
    """

    alignment_weight: NonNegativeFloat = 1.0
    mixes_heads: bool = True
    head_epochs: PositiveInt = 1
    head_learning_rate: PositiveFloat | None = None
    unseen_epochs: PositiveInt = 10


@dataclass(frozen=True)
class FedPACState(Record):
    """The server's state."""

    weights: Tensor  # θ, and the mean of the heads: shape (num_weights,)
    centroids: Tensor  # The classes' mean embeddings, shape (c, p); 0 where unknown
    known: Tensor  # Which are known: 1, or 0, shape (c,)
    # φ_i, shape (num_head,), of the clients that took part, by their names.
    heads: dict[str, Tensor]


@dataclass(frozen=True)
class FedPACPayload(Record):
    """The payload of a client."""

    weights: Tensor  # As the server's
    centroids: Tensor
    known: Tensor
    head: Tensor | None  # φ_i, shape (num_head,); None of one that never took part


@dataclass(frozen=True)
class FedPACUpdate(ModelUpdate):
    """The update of a client."""

    shares: Tensor  # Of the classes in its examples, shape (c,), summing to 1
    class_means: Tensor  # Under what it trained, shape (c, p); 0 where it has none
    mean: Tensor  # h_i, shape (c, p)
    variance: float  # V_i


class FedPAC(Method):
    """A shared body, aligned to class centroids; each client has a mixture of heads."""

    title = "FedPAC"
    source = "Xu et al. 2023, Algorithm 1"
    upload = "1 (and 2 c vectors of the embedding's size)"
    download = "1 (another head, and c vectors of the embedding's size)"
    server_state = "1, and the head of each seen client"
    unseen = "trains the mean of the heads, and then the body"
    learns_from_validation = "all"
    trains_unseen_from_start = True
    reference_title = None
    holds_all_updates = True
    needs_metrics = True
    state_type = FedPACState
    payload_type = FedPACPayload
    update_type = FedPACUpdate

    settings: FedPACSettings

    def __init__(self, task: Task, settings: FedPACSettings) -> None:
        super().__init__(task, settings)
        self._head = task.head_mask
        if bool(self._head[: task.model.num_parameters].all()):
            message = (
                "found a model of which only the head is trained, expected a body too, "
                "which fedpac aligns; choose another model, or another model.trained"
            )
            raise ConfigError([Problem("method.name", message)])
        self._shape = task.spec.num_classes, task.model.module.embedding_dim

    def init(self, clients: Sequence[str], rng: RandomKey) -> FedPACState:
        nothing = torch.zeros(self._shape)
        return FedPACState(
            self.task.initial_weights, nothing, nothing[:, 0].clone(), {}
        )

    def broadcast(
        self, state: FedPACState, client_id: str, rng: RandomKey
    ) -> FedPACPayload:
        head = state.heads.get(client_id)
        return FedPACPayload(state.weights, state.centroids, state.known, head)

    def client_update(
        self,
        payload: FedPACPayload,
        client_state: NoState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[NoState, FedPACUpdate]:
        examples, epochs = data.train, self.settings.head_epochs
        received = self.task.embed(payload.weights, examples.images)
        _, mean = self._of_classes(received, examples)
        # E|z - E z|² / n; |z| = |θ(x)|, as one row of z is it.
        spread = received.double().square().sum(dim=1).mean() - mean.square().sum()
        trained = self._trained(payload, examples, epochs, server_round, rng)
        embeddings = self.task.embed(trained.weights, examples.images)
        shares, rows = self._of_classes(embeddings, examples)
        return NoState(), FedPACUpdate(
            trained.weights,
            len(examples),
            trained.train_loss,
            shares.float(),
            (rows / denominator(shares[:, None])).float(),
            mean.float(),
            max(0.0, float(spread)) / len(examples),
        )

    def _of_classes(
        self, embeddings: Tensor, examples: Examples
    ) -> tuple[Tensor, Tensor]:
        """Return the classes' shares (c,), and the mean of e_y ⊗ θ(x), (c, p)."""
        of_each = functional.one_hot(examples.labels, self._shape[0]).double()
        return of_each.mean(dim=0), of_each.T @ embeddings.double() / len(examples)

    def _start(self, payload: FedPACPayload) -> Tensor:
        if payload.head is None:
            return payload.weights
        return payload.weights.masked_scatter(self._head, payload.head)

    def _trained(
        self,
        payload: FedPACPayload,
        examples: Examples,
        head_epochs: int,
        server_round: int,
        rng: RandomKey,
    ) -> LocalResult:
        strengths = self.settings.alignment_weight * payload.known
        return head_then_body(
            self.task,
            self._start(payload),
            examples,
            (self.settings.head_learning_rate, head_epochs),
            server_round,
            rng,
            near_centers(payload.centroids, strengths, self.task.model.device),
        )

    def personalize(
        self,
        payload: FedPACPayload,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> ModelPredictor:
        if not data.num_examples:
            return ModelPredictor(self.task, payload.weights)
        epochs, rate_of = self.settings.head_epochs, self.task.training.num_rounds
        if payload.head is None:
            epochs, rate_of = self.settings.unseen_epochs, 1

        def train(examples: Examples) -> ModelPredictor:
            trained = self._trained(payload, examples, epochs, rate_of, rng)
            return ModelPredictor(self.task, trained.weights)

        return on_both_splits(data, train)

    def aggregate(
        self, state: FedPACState, updates: Updates[FedPACUpdate]
    ) -> FedPACState:
        # By name: what is mixed does not depend on who answered first.
        replies = dict(sorted(updates, key=itemgetter(0)))
        updates_of_seen = replies.values()
        sizes = torch.tensor([update.num_examples for update in updates_of_seen])
        counts = (
            sizes[:, None]
            * torch.stack([update.shares for update in updates_of_seen]).double()
        )
        rows = torch.stack([update.class_means for update in updates_of_seen]).double()
        total = counts.sum(dim=0)
        means = (counts[:, :, None] * rows).sum(dim=0) / denominator(total[:, None])
        is_new = total > 0
        heads = torch.stack([update.weights[self._head] for update in updates_of_seen])
        if self.settings.mixes_heads:
            mixed = combinations(
                np.array([update.variance for update in updates_of_seen]),
                torch.stack([update.mean.flatten() for update in updates_of_seen])
                .double()
                .numpy(),
            )
            heads = (torch.from_numpy(mixed) @ heads.double()).float()
        return FedPACState(
            average_weights(replies.items()).weights,
            torch.where(is_new[:, None], means.float(), state.centroids),
            torch.where(is_new, 1.0, state.known),
            state.heads | dict(zip(replies, heads.unbind(), strict=True)),
        )

    def update_problem(
        self, payload: FedPACPayload, update: FedPACUpdate
    ) -> str | None:
        figures = (update.variance, *update.shares.flatten().tolist())
        if not all(0 <= number < math.inf for number in figures):
            return f"variance, shares: expected finite numbers from 0, found {figures}"
        return wrong_shape(
            update,
            shares=self._shape[:1],
            class_means=self._shape,
            mean=self._shape,
        )

    def started_from(
        self, payload: FedPACPayload, update: FedPACUpdate
    ) -> Mapping[str, Tensor]:
        return {"weights": self._start(payload)}


def combinations(
    variances: NDArray[np.float64], means: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the weights α_ij with which client i mixes the heads of all, shape (m, m).

    ``variances`` are V, shape (m,), and ``means`` h as vectors, (m, d). Row i minimises
    αᵀ P α with P = diag(V) + D Dᵀ, where D has the rows h_j - h_i, over α ≥ 0 that sum
    to 1. By the conditions of Karush, Kuhn and Tucker it is β / Σ β, of the β ≥ 0 that
    minimises βᵀ P β - 2 Σ β, or |R β - R⁻ᵀ 1|² with P = Rᵀ R.
    """
    # It takes a quarter of a second to import, for which others need not wait.
    from scipy.optimize import nnls

    # Of the size of their differences, as are the errors of the differences below.
    centered = means - means.mean(axis=0)
    products = centered @ centered.T
    rows = []
    for i in range(len(variances)):
        cross = products - products[i] - products[:, i : i + 1] + products[i, i]
        programme = np.diag(variances) + cross
        programme /= np.trace(programme) / len(programme) or 1.0
        # Clients that are alike, of one example: P is singular without.
        programme += 1e-9 * np.eye(len(programme))
        upper = np.linalg.cholesky(programme).T
        target = np.linalg.solve(upper.T, np.ones(len(programme)))
        solved, _ = nnls(upper, target, maxiter=30 * len(programme))
        rows.append(solved / solved.sum())
    return np.stack(rows)

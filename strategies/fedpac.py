"""FedPAC: features aligned to class centroids, and a mixture of heads for each client.

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier
Collaboration", ICLR 2023, Algorithm 1. A participant i with the server's body θ and its
own head φ_i trains

    φ_i ← SGD on f_i(·, θ), one epoch, θ fixed
    θ_i ← SGD on f_i(φ_i, ·) + λ mean_x |θ(x) - c_y|² / p from θ, φ_i fixed

where c_y, (p,), is the mean embedding of class y over all clients. It sends both, and
the mean embedding of each of its classes under θ_i. Under the received θ it also
computes the n_i vectors z = e_y ⊗ θ(x), shape (c, p), 0 except for row y. It sends
their mean h_i and V_i, the variance of that mean. The server averages the bodies and
the class means, both weighted by examples. Client i gets the head Σ_j α_ij φ_j with

    α_i = argmin_α Σ_j α_j² V_j + |h_i - Σ_j α_j h_j|²,  α_j ≥ 0, Σ_j α_j = 1

over the participants j: the variance plus the squared bias of an estimate of h_i from
all participants. After the last round every client trains once more, as in a round, and
serves the result.

Departures from the paper:

- A class that no client has had yet exerts no pull, and a class that no participant of
  the round has keeps its c_y. In the paper all clients take part in all rounds; the
  authors' code takes the client's own mean.
- The quadratic programme is solved exactly, as non-negative least squares; the code
  sets weights below 0.001 to 0.
- Means and V use embeddings in evaluation mode, and clients train in training mode. The
  code trains in evaluation mode, because a test before training leaves the network in
  it; this matters with dropout or normalisation.
- The last training uses both splits. A client without a head of its own starts from the
  mean head of the last round, weighted by examples, and trains it longer, at the
  learning rate of the first round.
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
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.errors import ConfigError, Problem
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Settings
from knnper.strategies.core.averaging import Updates, average_weights, denominator
from knnper.strategies.core.final_training import on_both_splits
from knnper.strategies.core.method import Method, wrong_shape
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelUpdate, NoState, Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import LocalResult
from knnper.strategies.fedproto import near_centers
from knnper.strategies.fedrep import head_then_body


@dataclass(frozen=True)
class FedPACSettings(Settings):
    """The two parts of FedPAC, and the training of a client's head.

    Attributes
    ----------
    alignment_weight
        λ of the pull to the class centroids; useful from 0.1 to 10, 1 in the authors'
        code. 0 switches it off.
    mixes_heads
        Whether clients receive a mixture of the heads or their own head. Without
        mixing, and with λ = 0, the rounds are FedRep's.
    head_epochs
        Passes over its data in which a client trains its head before the body, in each
        round and after the last; 1 in the paper. The training section sets how long the
        body is trained.
    head_learning_rate
        Learning rate of the head; null is the training section's. 0.1 in the authors'
        code, which has 0.01 for the body. Either is multiplied by the schedule's
        factor.
    unseen_epochs
        The same passes of an unseen client.
    """

    alignment_weight: NonNegativeFloat = 1.0
    mixes_heads: bool = True
    head_epochs: PositiveInt = 1
    head_learning_rate: PositiveFloat | None = None
    unseen_epochs: PositiveInt = 10


@dataclass(frozen=True)
class FedPACState(Record):
    """The server's state."""

    weights: Tensor  # θ and the mean head, shape (num_weights,)
    centroids: Tensor  # c_y, shape (c, p); 0 if unknown
    known: Tensor  # 1 for each class with a known centroid, else 0; shape (c,)
    heads: dict[str, Tensor]  # φ_i, shape (num_head,), by the names of the participants


@dataclass(frozen=True)
class FedPACPayload(Record):
    """The payload of a client."""

    weights: Tensor  # as in `FedPACState`
    centroids: Tensor
    known: Tensor
    head: Tensor | None  # φ_i, shape (num_head,); None for an unseen client


@dataclass(frozen=True)
class FedPACUpdate(ModelUpdate):
    """The update of a client."""

    shares: Tensor  # class frequencies of its examples, shape (c,), summing to 1
    class_means: Tensor  # mean embeddings under θ_i, shape (c, p); 0 without examples
    mean: Tensor  # h_i, shape (c, p)
    variance: float  # V_i


class FedPAC(Method):
    """A shared body, aligned to class centroids, with a mixture of heads per client."""

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
                "found a model in which only the head is trained, expected a body too, "
                "which fedpac aligns; choose another model, or another model.trained"
            )
            raise ConfigError([Problem("method.name", message)])
        self._shape = task.spec.num_classes, task.model.module.embedding_dim

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> FedPACState:
        return FedPACState(
            self.task.initial_weights,
            centroids=torch.zeros(self._shape),
            known=torch.zeros(self._shape[0]),
            heads={},
        )

    @override
    def broadcast(
        self, state: FedPACState, client_id: str, rng: RandomKey
    ) -> FedPACPayload:
        head = state.heads.get(client_id)
        return FedPACPayload(state.weights, state.centroids, state.known, head)

    @override
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
        # The variance is E|z - E z|² / n, and |z| = |θ(x)|, the only row of z.
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
        """Return the class frequencies (c,), and the mean of e_y ⊗ θ(x), (c, p)."""
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
            server_round,
            rng,
            head_rate=self.settings.head_learning_rate,
            head_epochs=head_epochs,
            objective=near_centers(
                payload.centroids, strengths, self.task.model.device
            ),
        )

    @override
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

    @override
    def aggregate(
        self, state: FedPACState, updates: Updates[FedPACUpdate]
    ) -> FedPACState:
        # Sorted by name, so that the heads do not depend on the order of replies.
        replies = dict(sorted(updates, key=itemgetter(0)))
        sizes = torch.tensor([update.num_examples for update in replies.values()])
        shares = torch.stack([update.shares for update in replies.values()])
        counts = sizes[:, None] * shares.double()
        rows = torch.stack([update.class_means for update in replies.values()]).double()
        total = counts.sum(dim=0)
        means = (counts[:, :, None] * rows).sum(dim=0) / denominator(total[:, None])
        is_new = total > 0
        heads = torch.stack([update.weights[self._head] for update in replies.values()])
        if self.settings.mixes_heads:
            h = torch.stack([update.mean.flatten() for update in replies.values()])
            mixed = combinations(
                np.array([update.variance for update in replies.values()]),
                h.double().numpy(),
            )
            heads = (torch.from_numpy(mixed) @ heads.double()).float()
        return FedPACState(
            average_weights(replies.items()).weights,
            torch.where(is_new[:, None], means.float(), state.centroids),
            torch.where(is_new, 1.0, state.known),
            state.heads | dict(zip(replies, heads.unbind(), strict=True)),
        )

    @override
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

    @override
    def started_from(
        self, payload: FedPACPayload, update: FedPACUpdate
    ) -> Mapping[str, Tensor]:
        return {"weights": self._start(payload)}


def combinations(
    variances: NDArray[np.float64], means: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the weights α_ij of head j in the mixture of client i, shape (m, m).

    ``variances`` are V, shape (m,), and ``means`` h as vectors, (m, d). Row i minimises
    αᵀ P α with P = diag(V) + D Dᵀ, where D has the rows h_j - h_i, over α ≥ 0 that sum
    to 1. By the conditions of Karush, Kuhn and Tucker it is β / Σ β, of the β ≥ 0 that
    minimises βᵀ P β - 2 Σ β, or |R β - R⁻ᵀ 1|² with P = Rᵀ R.
    """
    # Imported here: the import takes a quarter of a second.
    from scipy.optimize import nnls

    # At 1e6 times the median a head has no part in the others' mixtures. A client that
    # reports more would make the 1e-9 below outweigh the variances of all others.
    variances = np.minimum(variances, 1e6 * np.median(variances) or np.inf)
    # Centred, so that the rounding errors of the differences below are small.
    centered = means - means.mean(axis=0)
    products = centered @ centered.T
    rows = []
    for i in range(len(variances)):
        cross = products - products[i] - products[:, i : i + 1] + products[i, i]
        programme = np.diag(variances) + cross
        programme /= np.trace(programme) / len(programme) or 1.0
        # Without this, P is singular for equal clients with one example each.
        programme += 1e-9 * np.eye(len(programme))
        upper = np.linalg.cholesky(programme).T
        target = np.linalg.solve(upper.T, np.ones(len(programme)))
        solved, _ = nnls(upper, target, maxiter=30 * len(programme))
        rows.append(solved / solved.sum())
    return np.stack(rows)

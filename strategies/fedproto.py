"""FedProto: clients share the mean representation of each class, and no model.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across
Heterogeneous Clients", AAAI 2022, Algorithm 1. A client i with the model g_i on top of
φ_i, which never leaves it, minimises over its examples (x, y)

    loss(g_i(φ_i(x)), y)  +  λ mean_d (φ_i(x) - C_y)_d²

and sends its prototypes C_ij, the means of φ_i(x) over its examples of class j. The
server takes C_j = Σ_i w_ij C_ij / Σ_i w_ij over the clients that have the class, with
w_ij its examples of it. In the end the class of the nearest C_j is predicted.

Departures: Eq. 6 divides by the number of those clients, too, which shrinks C_j; with
``equal``, w_ij = 1, it is the mean of the authors' code. The paper pulls the mean of a
class in a mini-batch by a distance; the squares of single examples are the authors'
code. The prototypes are of the trained model, as in Eq. 3, where that code takes the
representations of the last epoch as they come. The authors' code asks for the nearest
prototype among a client's own classes only; here, as in the paper, it may be of any.
A class that no participant of a round has keeps its prototype. All clients have the
same architecture and initial weights, and probabilities are softmax(-||φ(x) - C_j||²).
Unseen clients are not in the paper: they train a model of their own like any other, but
towards the last prototypes from the beginning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from knnper.data.examples import ClientData, Examples
from knnper.embedding_model import EmbeddingModel
from knnper.errors import Problem
from knnper.experiment import (
    BufferedTiming,
    Experiment,
)
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveInt, Settings
from knnper.strategies.core.averaging import Updates
from knnper.strategies.core.method import Method, wrong_shape
from knnper.strategies.core.records import ModelState, Record
from knnper.strategies.core.task import HeadPredictor
from knnper.strategies.core.training import (
    LocalResult,
    Objective,
    head_cross_entropy,
    local_sgd,
    on_both_splits,
)


@dataclass(frozen=True)
class FedProtoSettings(Settings):
    """What prototypes are for, in training and in the end.

    Attributes
    ----------
    prototype_weight
        λ; the authors take 1, and 0.1 for CIFAR-10. 0 is `local` on the training split.
    client_weights
        Whether clients count as their examples of a class do (``size``, the paper's),
        or the same (``equal``, the authors' code).
    prediction
        What predicts: the nearest ``prototype``, as in the paper, or the client's own
        ``head``, which the authors' code evaluates as well.
    unseen_rounds
        Rounds' worth of training of a client that was never drawn; null is
        ``training.num_rounds``, as long as one that takes part in every round.
    """

    prototype_weight: NonNegativeFloat = 1.0
    client_weights: Literal["size", "equal"] = "size"
    prediction: Literal["prototype", "head"] = "prototype"
    unseen_rounds: PositiveInt | None = None


@dataclass(frozen=True)
class Prototypes(Record):
    """The global prototypes, as the server keeps and sends them."""

    means: Tensor  # C, shape (num_classes, p); 0 for a class that nobody had yet
    known: Tensor  # 1 for each other class, else 0: shape (num_classes,)


@dataclass(frozen=True)
class FedProtoUpdate(Record):
    """The update of a client."""

    means: Tensor  # C_i, shape (num_classes, p); 0 for a class that it does not have
    shares: Tensor  # The part of its examples that is of each class: (num_classes,)
    num_examples: int
    train_loss: float  # With the distance


class FedProto(Method):
    """Each client trains a model of its own, pulled towards shared class means."""

    title = "FedProto"
    source = "Tan et al. 2022 (AAAI), Algorithm 1"
    upload = "0 (p numbers for each class)"
    download = "0 (p numbers for each class)"
    client_state = "1"
    server_state = "0 (p numbers for each class)"
    unseen = "trains a model of its own, towards the last prototypes"
    learns_from_validation = "unseen"
    reference_title = None
    serves_one_model = False
    needs_metrics = True
    state_type = Prototypes
    payload_type = Prototypes
    update_type = FedProtoUpdate
    client_state_type = ModelState

    settings: FedProtoSettings

    @staticmethod
    def check(settings: FedProtoSettings, experiment: Experiment) -> Sequence[Problem]:
        timing = experiment.training.timing
        if not isinstance(timing, BufferedTiming) or (
            timing.staleness_exponent == 0 and timing.server_rate == 1
        ):
            return ()
        message = (
            "found buffered with a staleness_exponent of "
            f"{timing.staleness_exponent:g} and a server_rate of "
            f"{timing.server_rate:g}, expected 0 and 1: prototypes are no changes of "
            "what a client was sent, which could weigh less"
        )
        return (Problem("training.timing", message),)

    def init(self, clients: Sequence[str], rng: RandomKey) -> Prototypes:
        num_classes, size = self._shape
        return Prototypes(torch.zeros(num_classes, size), torch.zeros(num_classes))

    @property
    def _shape(self) -> tuple[int, int]:
        return self.task.spec.num_classes, self.task.model.module.embedding_dim

    def client_update(
        self,
        payload: Prototypes,
        client_state: ModelState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[ModelState, FedProtoUpdate]:
        start = self.task.initial_weights
        if client_state is not None:
            start = client_state.weights
        trained = self._trained(start, payload, data.train, server_round, rng)
        labels = data.train.labels
        embeddings = self.task.embed(trained.weights, data.train.images)
        counts, means = class_means(embeddings, labels, self._shape[0])
        update = FedProtoUpdate(
            means=means,
            shares=counts / max(1, len(labels)),
            num_examples=len(data.train),
            train_loss=trained.train_loss,
        )
        return ModelState(trained.weights), update

    def _trained(
        self,
        weights: Tensor,
        prototypes: Prototypes,
        examples: Examples,
        server_round: int,
        rng: RandomKey,
    ) -> LocalResult:
        strengths = self.settings.prototype_weight * prototypes.known
        losses = near_centers(prototypes.means, strengths, self.task.model.device)
        rate = self.task.training.learning_rate_at(server_round)
        return local_sgd(self.task, weights, examples, rate, rng, objective=losses)

    def aggregate(
        self, state: Prototypes, updates: Updates[FedProtoUpdate]
    ) -> Prototypes:
        sums = torch.zeros(self._shape, dtype=torch.float64)
        totals = torch.zeros(len(sums), dtype=torch.float64)
        for _, update in updates:
            counts = update.num_examples * update.shares.double()
            if self.settings.client_weights == "equal":
                counts = (counts > 0).double()
            sums += counts[:, None] * update.means
            totals += counts
        present = totals > 0
        means = (sums / totals.where(present, 1.0)[:, None]).float()
        return Prototypes(
            torch.where(present[:, None], means, state.means),
            torch.maximum(state.known, present.float()),
        )

    def personalize(
        self,
        payload: Prototypes,
        client_state: ModelState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> HeadPredictor:
        def served(weights: Tensor) -> HeadPredictor:
            def own_head(embeddings: Tensor) -> Tensor:
                return self.task.head(weights, embeddings)

            def nearest(embeddings: Tensor) -> Tensor:
                return nearest_prototype(payload, embeddings)

            of_prototypes = self.settings.prediction == "prototype"
            usable = of_prototypes and bool(payload.known.any())
            return HeadPredictor(self.task, weights, nearest if usable else own_head)

        def train(examples: Examples) -> HeadPredictor:
            weights = self.task.initial_weights
            num_rounds = self.settings.unseen_rounds or self.task.training.num_rounds
            for number in range(1, num_rounds + 1):
                key = rng.child("round", number)
                weights = self._trained(weights, payload, examples, number, key).weights
            return served(weights)

        if data.num_examples and client_state is not None:
            return served(client_state.weights)
        return on_both_splits(data, train)

    def update_problem(self, payload: Prototypes, update: FedProtoUpdate) -> str | None:
        problem = wrong_shape(update, means=self._shape, shares=self._shape[:1])
        shares = update.shares
        if problem is None and not (shares.min() >= 0 and shares.sum() <= 1.001):
            return f"shares: expected parts of 1, found {shares.tolist()}"
        return problem

    def started_from(
        self, payload: Prototypes, update: FedProtoUpdate
    ) -> Mapping[str, Tensor]:
        # Nothing: prototypes grow with representations, as fast as clients learn.
        return {}


def near_centers(centers: Tensor, strengths: Tensor, device: torch.device) -> Objective:
    """Return loss(h(x), y) + s_y mean_d (φ(x) - c_y)_d², of c (c, p) and s (c,)."""
    centers, strengths = centers.to(device), strengths.to(device)

    def losses(module: EmbeddingModel, inputs: Tensor, labels: Tensor) -> Tensor:
        embeddings = module.embed(inputs)
        if module.learns_from_embeddings:
            fit = head_cross_entropy(module, embeddings, labels)
        else:
            fit = module.losses(inputs, labels)
        away = (embeddings.float() - centers[labels]).square().mean(dim=1)
        return fit + strengths[labels] * away

    return losses


def class_means(
    embeddings: Tensor, labels: Tensor, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return the classes' counts (c,), and the means of their embeddings (c, p).

    Of ``embeddings`` (n, p) and ``labels`` (n,); the mean of no examples is 0.
    """
    of_each = functional.one_hot(labels, num_classes).to(embeddings)
    counts = of_each.sum(dim=0)
    return counts, of_each.T @ embeddings / counts.clamp_min(1)[:, None]


def nearest_prototype(prototypes: Prototypes, embeddings: Tensor) -> Tensor:
    """Return softmax(-||z - C_j||²) over the known classes, (n, num_classes)."""
    # Each row by itself: the products of a faster way round where rows are far out.
    exact = "donot_use_mm_for_euclid_dist"
    squares = torch.cdist(embeddings, prototypes.means, compute_mode=exact).square()
    return torch.softmax(-squares.where(prototypes.known > 0, torch.inf), dim=1)

"""FedProto: clients share the mean representation of each class, and no model.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across
Heterogeneous Clients", AAAI 2022, Algorithm 1. A client i with its own model, the head
g_i on the representation φ_i, minimises over its examples (x, y)

    loss(g_i(φ_i(x)), y)  +  λ mean_d (φ_i(x) - C_y)_d²

and sends its prototypes C_ij, the means of φ_i(x) over its examples of class j. The
server takes C_j = Σ_i w_ij C_ij / Σ_i w_ij over the clients that have the class, with
w_ij the number of their examples of it. A client finally predicts the class of the
nearest C_j.

Departures from the paper:

- Eq. 6 also divides by the number of clients that have the class, which shrinks C_j.
  With ``client_weights: equal``, w_ij = 1 and C_j is the mean of the authors' code.
- The paper pulls the class mean of a mini-batch by a distance; here, as in the authors'
  code, the pull is the squared distance of single examples.
- Prototypes are computed with the trained model, as in Eq. 3; the code collects the
  representations of the last epoch while the model still changes.
- The nearest prototype may be of any class, as in the paper; the code considers a
  client's own classes only.
- A class that no participant of a round has keeps its prototype.
- All clients have the same architecture and initial weights. Probabilities are
  softmax(-||φ(x) - C_j||²).
- Unseen clients, which the paper does not treat, train their own model in the same way,
  but towards the last prototypes from the start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.embedding_model import EmbeddingModel
from knnper.errors import Problem
from knnper.experiment import BufferedTiming, Experiment
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveInt, Settings
from knnper.strategies.core.averaging import Updates
from knnper.strategies.core.final_training import on_both_splits
from knnper.strategies.core.method import Method, wrong_shape
from knnper.strategies.core.predictors import HeadPredictor
from knnper.strategies.core.records import ModelState, Record
from knnper.strategies.core.training import (
    LocalResult,
    Objective,
    head_cross_entropy,
    local_sgd,
)


@dataclass(frozen=True)
class FedProtoSettings(Settings):
    """The use of the prototypes in training and in prediction.

    Attributes
    ----------
    prototype_weight
        λ; useful from 0.1 to 10. The authors take 1, and 0.1 for CIFAR-10. 0 is `local`
        on the training split.
    client_weights
        The weights of clients in a prototype: their examples of the class (``size``, as
        in the paper), or 1 (``equal``, as in the authors' code).
    prediction
        The classifier: the nearest ``prototype``, as in the paper, or the client's own
        ``head``, which the authors' code evaluates as well.
    unseen_rounds
        Training of an unseen client, in rounds; null is ``training.num_rounds``, as for
        a client that takes part in every round.
    """

    prototype_weight: NonNegativeFloat = 1.0
    client_weights: Literal["size", "equal"] = "size"
    prediction: Literal["prototype", "head"] = "prototype"
    unseen_rounds: PositiveInt | None = None


@dataclass(frozen=True)
class GlobalPrototypes(Record):
    """The prototypes: the state of the server, and the payload of every client."""

    means: Tensor  # C, shape (num_classes, p); 0 for a class without examples so far
    known: Tensor  # 1 for each class with a prototype, else 0; shape (num_classes,)


@dataclass(frozen=True)
class FedProtoUpdate(Record):
    """The update of a client."""

    means: Tensor  # C_i, shape (num_classes, p); 0 for a class without examples
    shares: Tensor  # class frequencies of its examples, shape (num_classes,)
    num_examples: int
    train_loss: float  # with the pull


class FedProto(Method):
    """Each client trains its own model, pulled towards shared class means."""

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
    state_type = GlobalPrototypes
    payload_type = GlobalPrototypes
    update_type = FedProtoUpdate
    client_state_type = ModelState

    settings: FedProtoSettings

    @staticmethod
    @override
    def check(settings: FedProtoSettings, experiment: Experiment) -> Sequence[Problem]:
        timing = experiment.training.timing
        if not isinstance(timing, BufferedTiming) or (
            timing.staleness_exponent == 0 and timing.server_rate == 1
        ):
            return ()
        message = (
            "found buffered with a staleness_exponent of "
            f"{timing.staleness_exponent:g} and a server_rate of "
            f"{timing.server_rate:g}, expected 0 and 1: prototypes are no differences "
            "from a payload, which could be weighted"
        )
        return (Problem("training.timing", message),)

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> GlobalPrototypes:
        num_classes, size = self._shape
        return GlobalPrototypes(
            torch.zeros(num_classes, size), torch.zeros(num_classes)
        )

    @property
    def _shape(self) -> tuple[int, int]:
        return self.task.spec.num_classes, self.task.model.module.embedding_dim

    @override
    def client_update(
        self,
        payload: GlobalPrototypes,
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
        prototypes: GlobalPrototypes,
        examples: Examples,
        server_round: int,
        rng: RandomKey,
    ) -> LocalResult:
        strengths = self.settings.prototype_weight * prototypes.known
        losses = near_centers(prototypes.means, strengths, self.task.model.device)
        rate = self.task.training.learning_rate_at(server_round)
        return local_sgd(self.task, weights, examples, rate, rng, objective=losses)

    @override
    def aggregate(
        self, state: GlobalPrototypes, updates: Updates[FedProtoUpdate]
    ) -> GlobalPrototypes:
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
        return GlobalPrototypes(
            torch.where(present[:, None], means, state.means),
            torch.maximum(state.known, present.float()),
        )

    @override
    def personalize(
        self,
        payload: GlobalPrototypes,
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

    @override
    def update_problem(
        self, payload: GlobalPrototypes, update: FedProtoUpdate
    ) -> str | None:
        problem = wrong_shape(update, means=self._shape, shares=self._shape[:1])
        shares = update.shares
        if problem is None and not (shares.min() >= 0 and shares.sum() <= 1.001):
            return f"shares: expected parts of 1, found {shares.tolist()}"
        return problem

    @override
    def started_from(
        self, payload: GlobalPrototypes, update: FedProtoUpdate
    ) -> Mapping[str, Tensor]:
        # Prototypes do not start from the payload's: representations may change their
        # scale in a round, so distances from the payload mean nothing.
        return {}


def near_centers(centers: Tensor, strengths: Tensor, device: torch.device) -> Objective:
    """Return the objective loss(h(x), y) + s_y mean_d (φ(x) - c_y)_d².

    ``centers`` are c, shape (c, p), and ``strengths`` s, shape (c,).
    """
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
    """Return the examples of each class (c,), and their mean embeddings (c, p).

    ``embeddings`` are of shape (n, p) and ``labels`` (n,); the mean of no examples is
    0.
    """
    of_each = functional.one_hot(labels, num_classes).to(embeddings)
    counts = of_each.sum(dim=0)
    return counts, of_each.T @ embeddings / counts.clamp_min(1)[:, None]


def nearest_prototype(prototypes: GlobalPrototypes, embeddings: Tensor) -> Tensor:
    """Return softmax(-||z - C_j||²) over the known classes, (n, num_classes)."""
    # Without matrix products, which are faster but inaccurate for large embeddings.
    exact = "donot_use_mm_for_euclid_dist"
    squares = torch.cdist(embeddings, prototypes.means, compute_mode=exact).square()
    return torch.softmax(-squares.where(prototypes.known > 0, torch.inf), dim=1)

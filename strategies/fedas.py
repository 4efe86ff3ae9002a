"""FedAS: clients align the shared body to their own, and are averaged by Fisher traces.

Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning",
CVPR 2024. A client i keeps its model after its last training, (θ_i, φ_i), body and
head. When it receives the body θ, it first moves the embeddings of θ towards those of
its own body. With c_y, (p,), the mean of θ_i(x) over its examples of class y, and B_y
the examples of class y in a mini-batch,

    θ ← SGD on Σ_y mean_{x in B_y} |θ(x) - c_y|² / p, one epoch   (parameter alignment)
    (θ_i, φ_i) ← SGD on f_i from (θ, φ_i)

It sends θ_i and the trace of the Fisher information after training,

    F_i = Σ_B |∇ mean_{(x, y) in B} -log h_i(x)[y]|²

over the mini-batches B of one pass. The server takes Σ_i F_i θ_i / Σ_i F_i (client
synchronisation), so that under-trained clients count less. A client serves (θ_i, φ_i)
of its last round.

Departures from the paper:

- The trace is that of the authors' code: over mini-batches, where the information
  matrix is over single examples. It is computed in training mode, without the
  incomplete last mini-batch, and for the loss of the training section; the code uses
  evaluation mode.
- The alignment uses the training section's optimizer and batch size.
- In its first round a client aligns nothing, since it has no body of its own yet; in
  the code it aligns to the common initial body.
- Each client aligns its copy of the received body. In the code the steps change the
  server's model, and the next client of the round starts from the changed one.
- Unseen clients, which the paper does not treat, train a head on the last body.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.embedding_model import EmbeddingModel
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveInt, Settings
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.predictors import ModelPredictor, Predictor
from knnper.strategies.core.records import ModelPayload, ModelState
from knnper.strategies.core.sharing import PartlyShared, SharedUpdate
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import LocalModel, local_sgd
from knnper.strategies.fedproto import class_means


@dataclass(frozen=True)
class FedASSettings(Settings):
    """The two parts of FedAS; each can be switched off.

    Attributes
    ----------
    alignment_learning_rate
        Learning rate of the alignment, the same in every round; useful from 0.001 to
        0.1, 0.01 in the authors' code. 0 switches the alignment off.
    client_weights
        The weights of clients in the mean: the traces of their Fisher information
        (``fisher``) or their numbers of examples (``size``). With ``size`` and without
        alignment the rounds are FedPer's.
    unseen_epochs
        Passes over its data in which an unseen client trains its head.
    """

    alignment_learning_rate: NonNegativeFloat = 0.01
    client_weights: Literal["fisher", "size"] = "fisher"
    unseen_epochs: PositiveInt = 10


@dataclass(frozen=True)
class FedASUpdate(SharedUpdate):
    """The update of a client."""

    fisher: float  # F_i; 0 if clients are weighted by their examples


class FedAS(PartlyShared):
    """A shared body, aligned to each client's last, averaged by Fisher traces."""

    title = "FedAS"
    source = "Yang et al. 2024, parameter alignment and client synchronisation"
    upload = "< 1 (all but the head)"
    client_state = "1"
    unseen = "trains its own head on the shared body"
    learns_from_validation = "unseen"
    trains_unseen_from_start = True
    reference_title = None
    needs_metrics = True
    update_type = FedASUpdate
    client_state_type = ModelState

    settings: FedASSettings

    def __init__(self, task: Task, settings: FedASSettings) -> None:
        super().__init__(task, settings, ~task.head_mask, settings.unseen_epochs)

    @override
    def client_update(
        self,
        payload: ModelPayload,
        client_state: ModelState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[ModelState, FedASUpdate]:
        start, examples = payload.weights, data.train
        if client_state is not None:
            start = self._aligned(start, client_state.weights, examples, rng)
            start = torch.where(self.personal, client_state.weights, start)
        rate = self.task.training.learning_rate_at(server_round)
        trained = self.train(start, examples, rate, rng)
        return ModelState(trained.weights), FedASUpdate(
            trained.weights[self.shared],
            len(examples),
            trained.train_loss,
            self._fisher(trained.weights, examples, rng),
        )

    def _aligned(
        self, weights: Tensor, personal: Tensor, examples: Examples, rng: RandomKey
    ) -> Tensor:
        """Align θ to the body of the ``personal`` model; return it, (num_weights,)."""
        if not self.settings.alignment_learning_rate:
            return weights  # passes would still change BatchNorm's statistics
        embeddings = self.task.embed(personal, examples.images)
        num_classes, device = self.task.spec.num_classes, self.task.model.device
        _, means = class_means(embeddings, examples.labels, num_classes)
        centers = means.to(device)

        def losses(module: EmbeddingModel, inputs: Tensor, labels: Tensor) -> Tensor:
            away = module.embed(inputs).float() - centers[labels]
            # Divided so that the mean over the mini-batch is the sum over its classes.
            shares = torch.bincount(labels)[labels] / len(labels)
            return away.square().mean(dim=1) / shares

        return local_sgd(
            self.task,
            weights,
            examples,
            self.settings.alignment_learning_rate,
            rng.child("alignment"),
            num_epochs=1,
            trainable=self.shared,
            objective=losses,
        ).weights

    def _fisher(self, weights: Tensor, examples: Examples, rng: RandomKey) -> float:
        if self.settings.client_weights == "size":
            return 0.0
        traces: list[float] = []

        def measure(model: LocalModel) -> Tensor:
            loss = model.backward(model.next_batch())
            traces.append(float(model.gradient.double().square().sum()))
            return loss

        unclipped = replace(self.task.training, clip_norm=None)
        local_sgd(
            replace(self.task, training=unclipped),
            weights,
            examples,
            unclipped.learning_rate,  # unused: `measure` makes no step
            rng.child("fisher"),
            num_epochs=1,
            local_step=measure,
        )
        return sum(traces)

    @override
    def aggregate(self, state: ModelState, updates: Updates[FedASUpdate]) -> ModelState:
        mean, by_size = RunningMean(), self.settings.client_weights == "size"
        for _, update in updates:
            # If all clients fit their examples perfectly, they count the same.
            weight = update.num_examples if by_size else max(update.fisher, 1e-30)
            mean.add(update.shared, weight)
        return ModelState(state.weights.masked_scatter(self.shared, mean.result()))

    @override
    def personalize(
        self,
        payload: ModelPayload,
        client_state: ModelState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> Predictor:
        if client_state is not None and data.num_examples:
            return ModelPredictor(self.task, client_state.weights)
        return super().personalize(payload, None, data, rng)

    @override
    def update_problem(self, payload: ModelPayload, update: FedASUpdate) -> str | None:
        # Traces have no upper limit; the mean stays between the clients' bodies.
        if not 0 <= update.fisher < math.inf:
            return f"fisher: expected a finite number from 0, found {update.fisher}"
        return super().update_problem(payload, update)

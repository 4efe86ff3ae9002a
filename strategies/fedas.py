"""FedAS: a body that each client first aligns to its own, averaged by Fisher traces.

Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning",
CVPR 2024. A client i keeps the model (θ_i, φ_i), body and head, that its last training
ended with. Sent the body θ, it first brings its embeddings near those of its own body:
with c_y, (p,), the mean of θ_i(x) over its examples of class y, and B_y those of class
y in a mini-batch,

    θ ← SGD on Σ_y mean_{x in B_y} |θ(x) - c_y|² / p, one epoch   (parameter alignment)
    (θ_i, φ_i) ← SGD on f_i from (θ, φ_i)

It sends θ_i, and the trace of the Fisher information of what it trained

    F_i = Σ_B |∇ mean_{(x, y) in B} -log h_i(x)[y]|²

over the mini-batches B of a pass. The server takes Σ_i F_i θ_i / Σ_i F_i (client
synchronisation): clients that are under-trained are to count less. A client is served
(θ_i, φ_i) as its last round left them.

Departures: the trace is that of the authors' code, of mini-batches, where the
information matrix is of single examples; it is taken in training mode, without the
incomplete last mini-batch, and of the loss that the training section chooses (the code
takes it in evaluation mode). The alignment makes steps of the training section's
optimizer and batch size. At its first visit a client aligns nothing, since it has no
body of its own yet; in the code it aligns to the body that all clients begin with. Each
client aligns the body that the server sent; in the code the steps change the server's
own model, and the next client of the round begins with the changed one. Unseen clients
are not in the paper: they train a head on the last body.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.embedding_model import EmbeddingModel
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveInt, Settings
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.records import ModelPayload, ModelState
from knnper.strategies.core.sharing import PartlyShared, SharedUpdate
from knnper.strategies.core.task import ModelPredictor, Predictor, Task
from knnper.strategies.core.training import LocalModel, local_sgd
from knnper.strategies.fedproto import class_means


@dataclass(frozen=True)
class FedASSettings(Settings):
    """The two parts of FedAS, each of which can be left out.

    Attributes
    ----------
    alignment_learning_rate
        Of the alignment, the same in every round; 0.01 in the authors' code, 0.001 to
        0.1 to try. 0 leaves the alignment out.
    client_weights
        Whether clients count as the traces of their Fisher information (``fisher``), or
        as their examples (``size``). With ``size`` and without alignment the rounds are
        FedPer's.
    unseen_epochs
        Passes over its data in which a client that was never drawn trains its head.
    """

    alignment_learning_rate: NonNegativeFloat = 0.01
    client_weights: Literal["fisher", "size"] = "fisher"
    unseen_epochs: PositiveInt = 10


@dataclass(frozen=True)
class FedASUpdate(SharedUpdate):
    """The update of a client."""

    fisher: float  # F_i; 0 where clients count as their examples


class FedAS(PartlyShared):
    """A shared body, aligned to each client's last one; the best trained count most."""

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
        """Return θ after the alignment to the body of ``own``, (num_weights,)."""
        if not self.settings.alignment_learning_rate:
            return weights  # BatchNorm's statistics would move all the same
        embeddings = self.task.embed(personal, examples.images)
        num_classes, device = self.task.spec.num_classes, self.task.model.device
        _, means = class_means(embeddings, examples.labels, num_classes)
        centers = means.to(device)

        def losses(module: EmbeddingModel, inputs: Tensor, labels: Tensor) -> Tensor:
            away = module.embed(inputs).float() - centers[labels]
            # Of which the mean over the mini-batch is the sum over its classes.
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
            unclipped.learning_rate,  # of which no step is made
            rng.child("fisher"),
            num_epochs=1,
            local_step=measure,
        )
        return sum(traces)

    def aggregate(self, state: ModelState, updates: Updates[FedASUpdate]) -> ModelState:
        mean, by_size = RunningMean(), self.settings.client_weights == "size"
        for _, update in updates:
            # Where all have learnt their examples by heart they count the same.
            weight = update.num_examples if by_size else max(update.fisher, 1e-30)
            mean.add(update.shared, weight)
        return ModelState(state.weights.masked_scatter(self.shared, mean.result()))

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

    def update_problem(self, payload: ModelPayload, update: FedASUpdate) -> str | None:
        if not 0 <= update.fisher < math.inf:
            return f"fisher: expected a finite number from 0, found {update.fisher}"
        return super().update_problem(payload, update)

"""FedDBE: FedAvg, with a personal bias that each client adds to its representations.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating Domain Bias for Federated
Learning in Representation Space", NeurIPS 2023: the Domain Bias Eliminator on FedAvg.
With the representation φ and the head g of the shared model, a client i keeps a vector
b_i of p numbers, the personalised representation bias memory, and minimises

    mean over (x, y) of loss(g(φ(x) + b_i), y)  +  κ/2 · mean_d (z̄_i - z̄)_d²

by φ, g and b_i. z̄_i is a moving average of φ(x) over the round's mini-batches B,

    z̄_i ← (1 - μ) z̄_i + μ mean_{x in B} φ(x)

with a gradient through the last term only. The consensus z̄ is the mean of all clients'
z̄_i, weighted by examples, and is computed once. The server averages φ and g as FedAvg
does. A client serves g(φ(x) + b_i); b_i starts at 0 and makes plain gradient steps.

Departures from the paper:

- In the paper all clients first train once without b and without regularisation. This
  phase yields z̄, and its models are discarded. Here the first round is that phase. So z̄
  comes from the round's participants only, their models are averaged as in any round, b
  is trained in it, and one round less is regularised.
- For z̄ a client sends the mean over its training examples after that round, not the
  last moving average, which with μ = 1 would be that of a single mini-batch.
- In later rounds the moving average starts with the first mini-batch. The authors' code
  starts at 0, which is far off for clients with few mini-batches.
- Unseen clients, which the paper does not treat, train b alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.embedding_model import EmbeddingModel
from knnper.errors import ConfigError, Problem
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveFraction, PositiveInt, Settings
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.final_training import on_both_splits
from knnper.strategies.core.method import Method, wrong_shape
from knnper.strategies.core.predictors import HeadPredictor
from knnper.strategies.core.records import ModelUpdate, Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import LocalModel, head_cross_entropy, local_sgd


@dataclass(frozen=True)
class FedDBESettings(Settings):
    """The bias b of a client, and the regularisation of its mean representation.

    Attributes
    ----------
    mean_weight
        κ, the strength of the mean regularisation; useful from 0.1 to 50. It acts as
        κ / p: 50 with p = 512, as for the authors' CNN, is as strong as 5 with p = 50.
        0 switches it off.
    mean_momentum
        μ, the weight of a mini-batch in the moving average; 1 is the mini-batch alone.
    bias_learning_rate
        Learning rate of b; null is the training section's, as in the paper. Either is
        multiplied by the schedule's factor. 0 keeps b at 0; with both parts switched
        off it is FedAvg.
    unseen_epochs
        Passes over its data in which an unseen client trains its b.
    """

    mean_weight: NonNegativeFloat = 1.0
    mean_momentum: PositiveFraction = 1.0
    bias_learning_rate: NonNegativeFloat | None = None
    unseen_epochs: PositiveInt = 10


@dataclass(frozen=True)
class ModelAndMean(Record):
    """The state of the server, and the payload of every client."""

    weights: Tensor  # of φ and g, shape (num_weights,)
    consensus: Tensor | None = None  # z̄, shape (p,); None before the first round


@dataclass(frozen=True)
class Bias(Record):
    """The state that a client keeps between rounds."""

    bias: Tensor  # b_i, shape (p,)


@dataclass(frozen=True)
class FedDBEUpdate(ModelUpdate):
    """The update of a client."""

    mean: Tensor | None = None  # z̄_i, shape (p,), in the first round; None later


class FedDBE(Method):
    """One global model; each client adds its own vector to the representations."""

    title = "FedDBE"
    source = "Zhang et al. 2023 (NeurIPS), Domain Bias Eliminator on FedAvg"
    client_state = "0 (p numbers)"
    unseen = "the global model, and a vector for its representations that it trains"
    learns_from_validation = "unseen"
    trains_unseen_from_start = True
    reference_title = "FedDBE (global)"
    serves_one_model = False
    takes_mean = True
    ends_with_global_model = True
    state_type = ModelAndMean
    payload_type = ModelAndMean
    update_type = FedDBEUpdate
    client_state_type = Bias

    settings: FedDBESettings

    def __init__(self, task: Task, settings: FedDBESettings) -> None:
        super().__init__(task, settings)
        self._dim = task.model.module.embedding_dim
        if not task.model.module.learns_from_embeddings:
            message = (
                "found feddbe with a model that learns from more than its embeddings, "
                "expected a loss of the head on the embeddings alone, which get a "
                "bias; set model.all_positions: false, or choose another model"
            )
            raise ConfigError([Problem("method.name", message)])

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> ModelAndMean:
        return ModelAndMean(self.task.initial_weights)

    @override
    def client_update(
        self,
        payload: ModelAndMean,
        client_state: Bias | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[Bias, FedDBEUpdate]:
        trainer = self._trainer(payload, client_state, server_round)
        trained = local_sgd(
            self.task,
            payload.weights,
            data.train,
            self.task.training.learning_rate_at(server_round),
            rng,
            objective=trainer.losses,
            local_step=trainer.step,
        )
        mean = None
        if payload.consensus is None:
            mean = self.task.embed(trained.weights, data.train.images).mean(dim=0)
        weights, loss = trained.weights, trained.train_loss
        update = FedDBEUpdate(weights, len(data.train), loss, mean)
        return Bias(trainer.bias.detach().cpu()), update

    def _trainer(
        self, payload: ModelAndMean, start: Bias | None, server_round: int
    ) -> "BiasTrainer":
        settings, training = self.settings, self.task.training
        return BiasTrainer(
            torch.zeros(self._dim) if start is None else start.bias,
            training.learning_rate_at(server_round, settings.bias_learning_rate),
            payload.consensus,
            settings,
            self.task.model.device,
        )

    @override
    def aggregate(
        self, state: ModelAndMean, updates: Updates[FedDBEUpdate]
    ) -> ModelAndMean:
        models, means, consensus = RunningMean(), RunningMean(), state.consensus
        for _, update in updates:
            models.add(update.weights, update.num_examples)
            if update.mean is not None:
                means.add(update.mean, update.num_examples)
        if consensus is None:
            consensus = means.result()
        return ModelAndMean(models.result(), consensus)

    @override
    def personalize(
        self,
        payload: ModelAndMean,
        client_state: Bias | None,
        data: ClientData,
        rng: RandomKey,
    ) -> HeadPredictor:
        weights = payload.weights

        def served(bias: Tensor) -> HeadPredictor:
            def head(embeddings: Tensor) -> Tensor:
                return self.task.head(weights, embeddings + bias)

            return HeadPredictor(self.task, weights, head)

        def train(examples: Examples) -> HeadPredictor:
            trainer = self._trainer(ModelAndMean(weights), None, 1)
            local_sgd(
                self.task,
                weights,
                examples,
                self.task.first_rate,
                rng,
                num_epochs=self.settings.unseen_epochs,
                trainable=self.task.head_mask,
                objective=trainer.losses,
                local_step=trainer.step_of_bias,
            )
            return served(trainer.bias.detach().cpu())

        if data.num_examples and client_state is not None:
            return served(client_state.bias)
        return on_both_splits(data, train)

    @override
    def update_problem(self, payload: ModelAndMean, update: FedDBEUpdate) -> str | None:
        if (update.mean is None) != (payload.consensus is not None):
            return "mean: expected one in the first round, and none later"
        return wrong_shape(update, mean=(self._dim,))


class BiasTrainer:
    """Trains b, with or without the model, in one call of `local_sgd`."""

    def __init__(
        self,
        bias: Tensor,
        rate: float,
        consensus: Tensor | None,
        settings: FedDBESettings,
        device: torch.device,
    ) -> None:
        self.bias = bias.to(device, copy=True).requires_grad_()
        self._rate = rate
        self._consensus = None if consensus is None else consensus.to(device)
        self._settings = settings
        self._mean: Tensor | None = None  # z̄_i over the mini-batches so far

    def losses(self, module: EmbeddingModel, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the objective of each example, shape (n,)."""
        embeddings = module.embed(inputs)
        losses = head_cross_entropy(module, embeddings + self.bias, labels)
        if self._consensus is None:
            return losses
        mean = embeddings.float().mean(dim=0)
        if self._mean is not None:
            mean = torch.lerp(self._mean, mean, self._settings.mean_momentum)
        self._mean = mean.detach()
        away = (mean - self._consensus).square().mean()
        return losses + self._settings.mean_weight / 2 * away

    def step(self, model: LocalModel) -> Tensor:
        """Make a step on b and on the model."""
        loss = self.step_of_bias(model)
        model.step()
        return loss

    def step_of_bias(self, model: LocalModel) -> Tensor:
        """Make a step on b alone."""
        self.bias.grad = None
        loss = model.backward(model.next_batch())
        gradient = self.bias.grad
        assert gradient is not None, "the losses of every mini-batch depend on it"
        with torch.no_grad():
            self.bias.sub_(gradient, alpha=self._rate)
        return loss

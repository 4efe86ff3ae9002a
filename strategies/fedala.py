"""FedALA: clients start rounds from an elementwise mixture of global and last model.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for
Personalized Federated Learning", AAAI 2023, Algorithm 1. In the last p layers a client
starts local training from

    Θ̂_i = Θ_i + (Θ - Θ_i) ⊙ W_i,  W_i ∈ [0, 1]^d, initially all 1

where Θ is the received model and Θ_i the client's model after its last training. The
layers before start from Θ. The client keeps W_i between rounds, and trains it by

    W_i ← clip(W_i - η ∂f_s(Θ̂_i) / ∂Θ̂_i ⊙ (Θ - Θ_i)),  to [0, 1]

with f_s the loss on mini-batches of a random fraction s of its examples. The first time
it makes passes until W_i converges, later one pass. All of Θ_i is sent, and the server
takes the mean. A client serves Θ̂_i of the last Θ and Θ_i.

Departures from the paper:

- The paper does not define convergence of W_i. As in the authors' code, W_i has
  converged when the standard deviation of the losses of the last 10 of at least 11
  passes is below 0.1. The code takes the loss of the last mini-batch of a pass; here it
  is the mean of all, and the number of passes is limited.
- The fraction s is drawn example by example, not as a contiguous range, and s n is
  rounded to the nearest number, at least 1; the code rounds down.
- A client trains W_i in its own rounds, as in Algorithm 1, and once more, on both
  splits, to be served. In the code every client does so in every round, so that Θ_i and
  W_i change in rounds without it too.
- W_i covers parameters only. Buffers are Θ's; in the code each client keeps its own.
- Layers are counted as for FedPer, by `knnper.strategies.core.sharing`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveFraction, PositiveInt, Settings
from knnper.strategies.core.final_training import on_both_splits
from knnper.strategies.core.method import Method
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload, ModelUpdate, Record
from knnper.strategies.core.sharing import last_layers
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import LocalModel, local_sgd

WINDOW, TOLERANCE = 10, 0.1


@dataclass(frozen=True)
class FedALASettings(Settings):
    """The layers that are mixed, and the training of their weights W.

    Attributes
    ----------
    num_adaptive_layers
        p, the layers that are mixed, counted from the end: linear layers or
        convolutions, each with the normalisation behind it. 1, the head, in the paper;
        a larger number than the model's stands for all layers.
    sample_fraction
        s, the fraction of its training examples on which a client trains W; 0.8 in the
        paper. At least one example is drawn.
    aggregation_learning_rate
        η of W, the same in every round; useful from 0.1 to 10, 1 in the paper. 0 is
        FedAvg.
    max_epochs
        The most passes over these examples in the first training of W.
    """

    num_adaptive_layers: PositiveInt = 1
    sample_fraction: PositiveFraction = 0.8
    aggregation_learning_rate: NonNegativeFloat = 1.0
    max_epochs: PositiveInt = 100


@dataclass(frozen=True)
class FedALAClientState(Record):
    """The state of a client, for the parameters that are mixed."""

    own: Tensor  # Θ_i after its last round, shape (num_adaptive,)
    # W, of the same shape; None until it is trained, in the client's second round.
    aggregation: Tensor | None = None


class FedALA(Method):
    """Each client learns, weight by weight, to mix the global and its own model."""

    title = "FedALA"
    source = "Zhang et al. 2023 (AAAI), Algorithm 1"
    client_state = "< 1 (the last layers, and as many weights of the aggregation)"
    learns_from_validation = "seen"
    reference_title = "FedALA (global)"
    ends_with_global_model = True
    client_state_type = FedALAClientState

    settings: FedALASettings

    def __init__(self, task: Task, settings: FedALASettings) -> None:
        super().__init__(task, settings)
        self._adaptive = last_layers(task.model, settings.num_adaptive_layers)
        self._adaptive[task.model.num_parameters :] = False

    @override
    def client_update(
        self,
        payload: ModelPayload,
        client_state: FedALAClientState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[FedALAClientState, ModelUpdate]:
        start, aggregation = payload.weights, None
        if client_state is not None:
            aggregation = self._learnt(start, client_state, data.train, rng)
            start = self._mixed(start, client_state.own, aggregation)
        rate = self.task.training.learning_rate_at(server_round)
        trained = self.train(start, data.train, rate, rng)
        new_state = FedALAClientState(trained.weights[self._adaptive], aggregation)
        return new_state, trained.update(len(data.train))

    @override
    def personalize(
        self,
        payload: ModelPayload,
        client_state: FedALAClientState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> ModelPredictor:
        if client_state is None or not data.num_examples:
            return ModelPredictor(self.task, payload.weights)
        state = client_state

        def train(examples: Examples) -> ModelPredictor:
            aggregation = self._learnt(payload.weights, state, examples, rng)
            mixed = self._mixed(payload.weights, state.own, aggregation)
            return ModelPredictor(self.task, mixed)

        return on_both_splits(data, train)

    def _mixed(self, weights: Tensor, local: Tensor, aggregation: Tensor) -> Tensor:
        """Return Θ̂, shape (num_weights,)."""
        # `lerp` is exact for two equal numbers, and at 0 and 1.
        mixed = torch.lerp(local, weights[self._adaptive], aggregation)
        return weights.masked_scatter(self._adaptive, mixed)

    def _learnt(
        self,
        weights: Tensor,
        state: FedALAClientState,
        examples: Examples,
        rng: RandomKey,
    ) -> Tensor:
        """Train W for this round; return it, of the shape of ``state.own``."""
        is_first = state.aggregation is None
        learned = torch.ones_like(state.own) if is_first else state.aggregation
        assert learned is not None, "it is None only if is_first"
        if not len(examples):
            return learned
        number = max(1, round(self.settings.sample_fraction * len(examples)))
        drawn = rng.child("sample").numpy().choice(len(examples), number, replace=False)
        sample = examples.take(torch.from_numpy(drawn))
        device = self.task.model.device
        local, shared = state.own.to(device), weights[self._adaptive].to(device)
        where = self._adaptive[: self.task.model.num_parameters].to(device)
        aggregation = learned.to(device)

        def step(model: LocalModel) -> Tensor:
            nonlocal aggregation
            loss = model.backward(model.next_batch())
            slope = model.gradient[where] * (shared - local)
            aggregation = (aggregation - model.learning_rate * slope).clamp(0, 1)
            model.parameters[where] = torch.lerp(local, shared, aggregation)
            return loss

        losses: list[float] = []
        for epoch in range(self.settings.max_epochs if is_first else 1):
            result = local_sgd(
                self.task,
                self._mixed(weights, state.own, aggregation.cpu()),
                sample,
                self.settings.aggregation_learning_rate,
                rng.child("aggregation", epoch),
                num_epochs=1,
                trainable=self._adaptive,
                local_step=step,
            )
            losses.append(result.train_loss)
            if len(losses) > WINDOW and np.std(losses[-WINDOW:]) < TOLERANCE:
                break
        return aggregation.cpu()

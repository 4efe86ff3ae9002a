"""pFedMe: clients train the Moreau envelope of their loss, and serve its minimiser.

T. Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS
2020, Algorithm 1; a baseline of Marfoq 2023 (talk). The global model w minimises the
mean of F_m(w) = min_θ f_m(θ) + λ/2 ||θ - w||², and client m serves θ. A local step
draws one mini-batch, starts from θ = w_m, makes K inner steps

    θ ← θ - α (g(θ) + λ (θ - w_m))

on it, and steps along the envelope's gradient: w_m ← w_m - η λ (w_m - θ). The server
takes w ← (1 - β) w + β mean_m w_m.

With K = 1 and α = 1/λ, λ (w_m - θ) is g(w_m), and w is exactly FedAvg's. This holds for
every K in the limit α = 1/λ → 0, except for buffers, which see each mini-batch K times.
With λ = 0 w gets no gradient and changes by weight decay only.

Departures from the paper:

- The θ that a client serves is found after the last round, from the last w in passes
  over both splits, as the paper defines it. The paper's algorithm ends with the θ of a
  client's last mini-batch, which fits that mini-batch. In these passes the pull acts at
  the end of a step; see `pull` in `knnper.strategies.core.proximal`.
- Weight decay acts on w in the rounds and on θ after them; momentum, if set, on w only.
- Clients are weighted by their examples; the paper weights them equally.
- K is fixed; the paper iterates to a given accuracy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.errors import Problem
from knnper.experiment import Experiment
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Settings
from knnper.strategies.core.averaging import Updates, mean_in_parts
from knnper.strategies.core.final_training import trained_on_both_splits
from knnper.strategies.core.method import Method
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.proximal import pull
from knnper.strategies.core.records import ModelPayload, ModelState, ModelUpdate
from knnper.strategies.core.training import (
    LocalModel,
    LocalResult,
    LocalStep,
    local_sgd,
)


@dataclass(frozen=True)
class PFedMeSettings(Settings):
    """The steps on personal and global model; η is the training section's rate.

    Attributes
    ----------
    prox_weight
        λ; useful from 1 to 50, 15 in most of the paper's experiments.
    inner_steps
        K, the steps on θ for each mini-batch; 5 in the paper.
    inner_learning_rate
        α, the learning rate of θ; α λ must be below 2.
    server_learning_rate
        β, the step from the old model towards the clients' mean; 1 takes the mean
        itself, and a larger value goes beyond it.
    personal_epochs
        Passes over its data in which a client finds the θ that it serves.
    """

    prox_weight: NonNegativeFloat = 15.0
    inner_steps: PositiveInt = 5
    inner_learning_rate: PositiveFloat = 0.05
    server_learning_rate: PositiveFloat = 1.0
    personal_epochs: PositiveInt = 5


class PFedMe(Method):
    """Each client serves a model close to the global one, which is their mean."""

    title = "pFedMe"
    needs_sgd = "its inner steps are those of SGD"
    source = "T. Dinh et al. 2020, Algorithm 1"
    unseen = "finds a model near the global one, like any other client"
    learns_from_validation = "all"
    reference_title = "pFedMe (global model)"
    takes_mean = True
    ends_with_global_model = True

    settings: PFedMeSettings

    @override
    def train(
        self, weights: Tensor, examples: Examples, rate: float, rng: RandomKey
    ) -> LocalResult:
        step = envelope_step(self.settings)
        return local_sgd(self.task, weights, examples, rate, rng, local_step=step)

    @override
    def personalize(
        self, payload: ModelPayload, client_state: Any, data: ClientData, rng: RandomKey
    ) -> ModelPredictor:
        rate, decay = self.settings.inner_learning_rate, self.task.training.weight_decay
        # Without momentum, like the inner steps of the rounds.
        training = replace(self.task.training, momentum=0.0)
        return trained_on_both_splits(
            replace(self.task, training=training),
            payload.weights,
            data,
            rng,
            num_epochs=self.settings.personal_epochs,
            learning_rate=rate,
            gradient_hook=pull(payload.weights, self.settings.prox_weight, rate, decay),
        )

    @override
    def aggregate(self, state: ModelState, updates: Updates[ModelUpdate]) -> ModelState:
        rate = self.settings.server_learning_rate
        num_parameters = self.task.model.num_parameters
        mean, buffers = mean_in_parts(updates, num_parameters)
        decayed = (1 - rate) * state.weights[:num_parameters].double()
        return ModelState(torch.cat([(decayed + rate * mean).float(), buffers]))

    @staticmethod
    @override
    def check(settings: PFedMeSettings, experiment: Experiment) -> Sequence[Problem]:
        product = settings.inner_learning_rate * settings.prox_weight
        if product < 2:
            return ()
        message = (
            f"found {settings.inner_learning_rate} with prox_weight "
            f"{settings.prox_weight}, expected less than 2 / prox_weight = "
            f"{2 / settings.prox_weight:g}, or the inner steps diverge; lower either"
        )
        return (Problem("method.inner_learning_rate", message),)


def envelope_step(settings: PFedMeSettings) -> LocalStep:
    """Return the local step of w_m along the gradient of the Moreau envelope."""
    rate = settings.inner_learning_rate
    contraction = rate * settings.prox_weight

    def step(model: LocalModel) -> Tensor:
        batch, start = model.next_batch(), model.parameters.clone()
        # Substitute θ = w - α G. The inner step is then G ← (1 - α λ) G + g(w - α G),
        # and the envelope's gradient λ (w - θ) is α λ G, without rounding of w - θ.
        loss = model.backward(batch)
        total = model.gradient.clone()
        for _ in range(settings.inner_steps - 1):
            model.backward(batch, at=start - rate * total)
            total = (1 - contraction) * total + model.gradient
        model.gradient.copy_(contraction * total)
        model.step()
        return loss

    return step

"""Per-FedAvg: one global model that is good after a step on a client's own data.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical
Guarantees: A Model-Agnostic Meta-Learning Approach", NeurIPS 2020, Algorithm 1; a
baseline of Chen et al. 2023, section 6. The server minimises the mean of

    F_i(w) = f_i(w - α ∇f_i(w))

and a client's step, on the mini-batches D, D' and D'', is

    w̃ = w - α ∇f_i(w; D)
    w ← w - β (I - α ∇²f_i(w; D'')) ∇f_i(w̃; D')

with β the training section's learning rate. ``first_order`` (FO) omits the Hessian.
``hessian_free`` (HF) estimates its product with v = ∇f_i(w̃; D') as

    ∇²f_i(w; D'') v ≈ (∇f_i(w + δ v; D'') - ∇f_i(w - δ v; D'')) / (2 δ)

Departures from the paper:

- Mini-batches come from passes over the data, not from independent draws. Those of D'
  are FedAvg's, so that α = 0 is FedAvg.
- The mean of the models weights clients by their examples.
- Momentum and weight decay, if set, act on the step of rate β only.
- Buffers such as BatchNorm's running statistics are averaged; they have also seen the
  mini-batches D and D''.
- After the last round ``adaptation_epochs: 1`` makes one step for each full mini-batch
  of the client's data; F_i has one step on all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.errors import Problem
from knnper.experiment import Experiment
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, Settings
from knnper.strategies.core.final_training import trained_on_both_splits
from knnper.strategies.core.method import Method
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.training import (
    Batch,
    LocalModel,
    LocalResult,
    LocalStep,
    local_sgd,
)


@dataclass(frozen=True)
class PerFedAvgSettings(Settings):
    """The inner step, and the treatment of the Hessian.

    Attributes
    ----------
    inner_learning_rate
        α, the learning rate of a client's step on its own data; useful from 0.001 to
        0.1. 0 is FedAvg.
    variant
        ``first_order`` (FO) omits the Hessian, at twice FedAvg's cost of a step;
        ``hessian_free`` (HF) estimates its product, at four times the cost.
    finite_difference
        δ of ``hessian_free``, in units of the gradient; useful from 0.001 to 0.1. Small
        enough for few kinks of ReLU between the two points, and large enough for
        float32 to resolve them.
    adaptation_epochs
        Passes over a client's own data at rate α after the last round. 0 serves the
        global model, as a base for a personalisation.
    """

    inner_learning_rate: NonNegativeFloat = 0.01
    variant: Literal["first_order", "hessian_free"] = "first_order"
    finite_difference: PositiveFloat = 0.01
    adaptation_epochs: NonNegativeInt = 1


class PerFedAvg(Method):
    """One global model, trained to be good after a step on a client's data."""

    title = "Per-FedAvg"
    needs_sgd = "its steps are those of SGD on a batch after a step"
    source = "Fallah et al. 2020, Algorithm 1"
    unseen = "the global model, after steps on the client's data"
    learns_from_validation = "all"
    reference_title = "Per-FedAvg (before its step)"
    ends_with_global_model = True

    settings: PerFedAvgSettings

    @override
    def train(
        self, weights: Tensor, examples: Examples, rate: float, rng: RandomKey
    ) -> LocalResult:
        step = meta_step(self.settings)
        return local_sgd(self.task, weights, examples, rate, rng, local_step=step)

    @override
    def personalize(
        self, payload: ModelPayload, client_state: Any, data: ClientData, rng: RandomKey
    ) -> ModelPredictor:
        # Without momentum and weight decay, like the inner steps of training.
        training = replace(self.task.training, momentum=0.0, weight_decay=0.0)
        return trained_on_both_splits(
            replace(self.task, training=training),
            payload.weights,
            data,
            rng,
            num_epochs=self.settings.adaptation_epochs,
            learning_rate=self.settings.inner_learning_rate,
        )

    @staticmethod
    @override
    def check(settings: PerFedAvgSettings, experiment: Experiment) -> Sequence[Problem]:
        precision = experiment.training.precision
        if settings.variant == "first_order" or precision == "float32":
            return ()
        message = (
            f"found {precision}, expected float32 with variant = hessian_free, as "
            "rounding would hide its small differences of gradients; remove the "
            "setting or choose first_order"
        )
        return (Problem("training.precision", message),)


def meta_step(settings: PerFedAvgSettings) -> LocalStep:
    """Return a step on F_i; its loss is f_i(w̃; D'), after the inner step."""
    inner_rate = settings.inner_learning_rate

    def step(model: LocalModel) -> Tensor:
        model.backward(model.independent_batch())
        adapted = model.parameters - inner_rate * model.gradient
        loss = model.backward(model.next_batch(), at=adapted)
        if settings.variant == "hessian_free":
            outer = model.gradient.clone()
            product = hessian_product(
                model, model.independent_batch(), outer, settings.finite_difference
            )
            model.gradient.copy_(outer - inner_rate * product)
        model.step()
        return loss

    return step


def hessian_product(
    model: LocalModel, batch: Batch, vector: Tensor, finite_difference: float
) -> Tensor:
    """Return ∇²f(w; D'') v by central differences, shape (num_parameters,)."""
    moved = finite_difference * vector
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    # Both passes must drop the same units, or dropout would dominate the difference.
    with torch.random.fork_rng(range(torch.cuda.device_count() if in_use else 0)):
        model.backward(batch, at=model.parameters + moved)
    ahead = model.gradient.clone()
    model.backward(batch, at=model.parameters - moved)
    return (ahead - model.gradient) / (2 * finite_difference)

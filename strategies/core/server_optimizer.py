"""What the server optimizers of Reddi et al. 2021 have in common."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnper.experiment import PositiveFloat, ProperFraction, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import RunningMean
from knnper.strategies.core.method import Method
from knnper.strategies.core.records import ModelUpdate, Record
from knnper.strategies.core.task import Task


@dataclass(frozen=True)
class MomentSettings(Settings):
    """How a server with two moments steps.

    Attributes
    ----------
    server_learning_rate
        η; the paper tunes it over 10^-3, 10^-2.5, ..., 10. The default is Flower's.
    first_moment_decay
        β_1, [0, 1). 0.9 in the paper.
    second_moment_decay
        β_2, [0, 1). 0.99 in the paper.
    adaptivity
        τ: the smaller, the more adaptive; the paper has 10^-5 to 10^-1, mostly 10^-3.
    """

    server_learning_rate: PositiveFloat = 0.1
    first_moment_decay: ProperFraction = 0.9
    second_moment_decay: ProperFraction = 0.99
    adaptivity: PositiveFloat = 0.001


@dataclass(frozen=True)
class MomentState(Record):
    """The server's state of FedAdam and FedYogi.

    Attributes
    ----------
    weights
        x, shape (num_weights,).
    momentum
        m, shape (num_parameters,).
    second_moment
        v, shape (num_parameters,).
    """

    weights: Tensor
    momentum: Tensor
    second_moment: Tensor


SecondMoment = Callable[[Tensor, Tensor, float], Tensor]
"""``(v, Δ², β_2) -> v`` of the next round, float64 of shape (d,) each."""


def with_moments(
    method: Method, task: Task, settings: MomentSettings, next_second: SecondMoment
) -> Method:
    """Return ``method`` with a server that steps towards the mean of its updates.

    Reddi et al. 2021, Algorithm 2, whose optimizers differ in ``next_second`` alone.

    Parameters
    ----------
    method
        Its updates are models: FedAvg.
    task
        What is learned.
    settings
        Of the step.
    next_second
        What becomes of v.
    """
    num_parameters, beta_1 = task.model.num_parameters, settings.first_moment_decay

    def init(clients: Sequence[str], rng: RandomKey) -> MomentState:
        momentum = torch.zeros(num_parameters)
        # The least that Algorithm 2 starts with.
        second_moment = torch.full_like(momentum, settings.adaptivity**2)
        return MomentState(task.initial_weights, momentum, second_moment)

    def aggregate(
        state: MomentState, updates: Iterable[tuple[str, ModelUpdate]]
    ) -> MomentState:
        mean, buffers = mean_in_parts(updates, num_parameters)
        x = state.weights[:num_parameters].double()
        delta = mean - x
        m = beta_1 * state.momentum.double() + (1 - beta_1) * delta
        v = state.second_moment.double()
        v = next_second(v, delta**2, settings.second_moment_decay)
        x = adaptive_step(x, m, v, settings.server_learning_rate, settings.adaptivity)
        return MomentState(torch.cat([x.float(), buffers]), m.float(), v.float())

    return replace(method, init=init, aggregate=aggregate, state_type=MomentState)


def adaptive_step(x: Tensor, m: Tensor, v: Tensor, eta: float, tau: float) -> Tensor:
    """Return x + η m / (√v + τ), of the shape and dtype of its tensors."""
    return x + eta * m / (v.sqrt() + tau)


def mean_in_parts(
    updates: Iterable[tuple[str, ModelUpdate]], num_parameters: int
) -> tuple[Tensor, Tensor]:
    """Return the mean of the parameters, which is stepped towards, and of the buffers.

    An optimizer goes beyond the mean, or to where no client was. A buffer such as a
    running variance must not: it takes the mean itself.

    Parameters
    ----------
    updates
        Weighted by their examples, as in FedAvg.
    num_parameters
        The weights that are parameters; buffers follow them.

    Returns
    -------
    tuple of Tensor
        float64 of shape (num_parameters,); float32 of the other weights.
    """
    mean = RunningMean()
    for _, update in updates:
        mean.add(update.weights, update.num_examples)
    weights = mean.result_float64()
    return weights[:num_parameters], weights[num_parameters:].float()

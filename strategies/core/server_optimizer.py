"""What the adaptive server optimizers of Reddi et al. 2021 have in common."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnper.config.ranges import PositiveFloat, ProperFraction
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from strategies.core.averaging import RunningMean
from strategies.core.method import Method
from strategies.core.moments import AdaptiveStep, Moments
from strategies.core.records import ModelUpdate, Record
from strategies.core.task import Task


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


def with_moments(
    method: Method,
    task: Task,
    settings: MomentSettings,
    make_step: Callable[..., AdaptiveStep],
) -> Method:
    """Return ``method`` with a server that steps towards the mean of its updates.

    Parameters
    ----------
    method
        Its updates are models: FedAvg.
    task
        What is learned.
    settings
        Of the step.
    make_step
        Takes ``eta``, ``beta_1``, ``beta_2`` and ``tau``.
    """

    def init(clients: Sequence[str], rng: RandomKey) -> MomentState:
        momentum = torch.zeros(task.model.num_parameters)
        # The least that Algorithm 2 starts with.
        second_moment = torch.full_like(momentum, settings.adaptivity**2)
        return MomentState(task.initial_weights, momentum, second_moment)

    def aggregate(
        state: MomentState, updates: Iterable[tuple[str, ModelUpdate]]
    ) -> MomentState:
        step = make_step(
            eta=settings.server_learning_rate,
            beta_1=settings.first_moment_decay,
            beta_2=settings.second_moment_decay,
            tau=settings.adaptivity,
        )
        return _next_moments(step, state, updates)

    return replace(method, init=init, aggregate=aggregate, state_type=MomentState)


def _next_moments(
    step: AdaptiveStep,
    state: MomentState,
    updates: Iterable[tuple[str, ModelUpdate]],
) -> MomentState:
    """Return the state after ``step`` towards the mean of the updates."""
    num_parameters = len(state.momentum)
    mean, buffers = mean_in_parts(updates, num_parameters)
    parameters = state.weights[:num_parameters]
    after = step(Moments(parameters, state.momentum, state.second_moment), mean)
    weights = torch.cat([after.parameters, buffers])
    return MomentState(weights, after.momentum, after.second_moment)


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

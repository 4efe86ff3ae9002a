"""What the adaptive server optimizers of Reddi et al. 2021 have in common."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.core.averaging import RunningMean
from strategies.core.moments import AdaptiveStep, Moments
from strategies.core.records import ModelUpdate, Record
from strategies.core.task import Task


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


def no_moments(task: Task, adaptivity: float) -> MomentState:
    """Return x_0, m = 0 and v = τ², the least that Algorithm 2 starts with."""
    momentum = torch.zeros(task.model.num_parameters)
    second_moment = torch.full_like(momentum, adaptivity**2)
    return MomentState(task.initial_weights, momentum, second_moment)


def next_moments(
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

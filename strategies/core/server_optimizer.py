"""What the adaptive server optimizers of Reddi et al. 2021 have in common."""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.errors import RunError
from knnper.experiment import PositiveFloat, ProperFraction, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import RunningMean
from knnper.strategies.core.method import Method
from knnper.strategies.core.records import ModelUpdate, Record
from knnper.strategies.core.task import Task


@dataclass(frozen=True)
class Moments:
    """What the adaptive optimizers keep, each of shape (d,).

    Attributes
    ----------
    parameters, momentum, second_moment
        x, m and v.
    """

    parameters: Tensor
    momentum: Tensor
    second_moment: Tensor


AdaptiveStep = Callable[[Moments, Tensor], Moments]
"""``(moments, mean of the clients' parameters (d,)) -> moments``, float32."""


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


if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message, RecordDict
    from flwr.serverapp.strategy import FedAvg
    from flwr.serverapp.strategy.fedopt import FedOpt

Select = Callable[[NDArray[np.float64]], Sequence[int]]
"""``squared distances (n, n) -> positions`` of those that are selected, each once."""

_KEY = "weights"

# FedAdam multiplies its rate by Adam's correction for the round after the one it is
# told, which the paper's algorithm does not have. So late, the correction is exactly 1.
_LATE_ROUND = 2**62

# What is held beside the updates, where the weights can be taken slice by slice.
_SLICE = 2**18


def momentum_step(
    parameters: Tensor,
    mean: Tensor,
    momentum: Tensor,
    *,
    learning_rate: float,
    decay: float,
) -> tuple[Tensor, Tensor]:
    """Return parameters and momentum after a step of Flower's FedAvgM, float32.

    Parameters
    ----------
    parameters, mean
        w, and the mean of what the clients made of it, each of shape (d,).
    momentum
        v before the step, shape (d,).
    learning_rate, decay
        η and β.
    """
    from flwr.serverapp.strategy import FedAvgM

    strategy = FedAvgM(server_learning_rate=learning_rate, server_momentum=decay)
    strategy.current_arrays = _record(parameters)
    strategy.momentum_vector = [_array(momentum)]
    stepped = _aggregated(strategy, [_reply(mean)])
    return stepped, _tensor(strategy.momentum_vector[0])


def adagrad(*, eta: float, tau: float) -> AdaptiveStep:
    """Return a step of Flower's FedAdagrad."""
    from flwr.serverapp.strategy import FedAdagrad

    return lambda moments, mean: _adapted(FedAdagrad(eta=eta, tau=tau), moments, mean)


def adam(*, eta: float, beta_1: float, beta_2: float, tau: float) -> AdaptiveStep:
    """Return a step of Flower's FedAdam, without its correction of η."""
    from flwr.serverapp.strategy import FedAdam

    def step(moments: Moments, mean: Tensor) -> Moments:
        optimizer = FedAdam(eta=eta, beta_1=beta_1, beta_2=beta_2, tau=tau)
        return _adapted(optimizer, moments, mean)

    return step


def yogi(*, eta: float, beta_1: float, beta_2: float, tau: float) -> AdaptiveStep:
    """Return a step of Flower's FedYogi."""
    from flwr.serverapp.strategy import FedYogi

    def step(moments: Moments, mean: Tensor) -> Moments:
        optimizer = FedYogi(eta=eta, beta_1=beta_1, beta_2=beta_2, tau=tau)
        return _adapted(optimizer, moments, mean)

    return step


def fair_terms(
    parameters: Tensor, trained: Tensor, *, q: float, lipschitz: float, loss: float
) -> tuple[Tensor, float]:
    """Return Δ_k, float64 of shape (d,), and h_k of one client, as QFedAvg has them.

    Parameters
    ----------
    parameters, trained
        w and w_k, each of shape (d,).
    q, lipschitz, loss
        q, L and F_k(w). Powers that overflow are infinite.
    """
    from flwr.serverapp.strategy.qfedavg import compute_delta_and_h

    # Flower computes in the memory of the second.
    own = [trained.to(torch.float64, copy=True).numpy()]
    with np.errstate(over="ignore", invalid="ignore"):
        (delta,), h = compute_delta_and_h([_array(parameters)], own, q, lipschitz, loss)
    return torch.from_numpy(delta), float(h)


def median(updates: Sequence[ModelUpdate]) -> Tensor:
    """Return the coordinate-wise median by FedMedian, float32 of shape (num_weights,).

    Parameters
    ----------
    updates
        One a client.
    """
    from flwr.serverapp.strategy import FedMedian

    return _slice_by_slice(FedMedian, updates)


def trimmed_mean(updates: Sequence[ModelUpdate], cut_fraction: float) -> Tensor:
    """Return the coordinate-wise mean by FedTrimmedAvg, float32 (num_weights,).

    Parameters
    ----------
    updates
        One a client, n of them.
    cut_fraction
        ⌊n · fraction⌋ values are left out at each end, as floats multiply.
    """
    from flwr.serverapp.strategy import FedTrimmedAvg

    return _slice_by_slice(lambda: FedTrimmedAvg(beta=cut_fraction), updates)


def multikrum(updates: Iterable[ModelUpdate], select: Select) -> Tensor:
    """Return the mean of the selected, float32 of shape (num_weights,).

    Distances and mean are those of Flower's MultiKrum. Which of equal scores it takes
    depends on the processor, so that the selection is not left to it.

    Parameters
    ----------
    updates
        One a client; the mean weights them by their examples.
    select
        Chooses by their distances.
    """
    from flwr.serverapp.strategy import FedAvg
    from flwr.serverapp.strategy.multikrum import compute_distances

    replies = _replies(updates)
    records = [reply.content.array_records["arrays"] for reply in replies]
    chosen = [replies[position] for position in select(compute_distances(records))]
    return _aggregated(FedAvg(), chosen)


def bulyan(
    updates: Iterable[ModelUpdate], num_malicious: int, select: Select
) -> Tensor:
    """Return what Flower's Bulyan makes of the updates, float32 (num_weights,).

    Parameters
    ----------
    updates
        One a client, at least 4 f + 3.
    num_malicious
        f.
    select
        The first phase: chooses n - 2 f by their distances.
    """
    from flwr.serverapp.strategy import Bulyan
    from flwr.serverapp.strategy.multikrum import compute_distances

    def rule(contents: "list[RecordDict]", *_: int) -> "list[RecordDict]":
        records = [content.array_records["arrays"] for content in contents]
        return [contents[position] for position in select(compute_distances(records))]

    strategy = Bulyan(num_malicious_nodes=num_malicious, selection_rule=rule)
    return _aggregated(strategy, _replies(updates))


def _adapted(optimizer: "FedOpt", moments: Moments, mean: Tensor) -> Moments:
    optimizer.current_arrays = {_KEY: _array(moments.parameters)}
    optimizer.m_t = {_KEY: _array(moments.momentum)}
    optimizer.v_t = {_KEY: _array(moments.second_moment)}
    stepped = _aggregated(optimizer, [_reply(mean)])
    return Moments(stepped, _only(optimizer.m_t), _only(optimizer.v_t))


def _slice_by_slice(
    make: "Callable[[], FedAvg]", updates: Sequence[ModelUpdate]
) -> Tensor:
    """Return a rule that treats each coordinate by itself, applied to all of them."""
    split = (torch.split(update.weights, _SLICE) for update in updates)
    return torch.cat(
        [_aggregated(make(), [*map(_reply, part)]) for part in zip(*split, strict=True)]
    )


def _aggregated(strategy: "FedAvg", replies: "list[Message]") -> Tensor:
    with _without_its_log():
        arrays, _ = strategy.aggregate_train(_LATE_ROUND, replies)
    if arrays is None:
        name = type(strategy).__name__
        raise RunError(f"Flower's {name} made no model of {len(replies)} updates")
    return _tensor(arrays[_KEY].numpy())


@contextlib.contextmanager
def _without_its_log() -> Iterator[None]:
    """Drop what this thread logs below a warning, inside a ``with`` block.

    Flower counts replies each round: of slices, or of the one that holds the mean.
    """
    logger, thread = logging.getLogger("flwr"), threading.get_ident()

    def is_of_interest(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.WARNING

    logger.addFilter(is_of_interest)
    try:
        yield
    finally:
        logger.removeFilter(is_of_interest)


def _replies(updates: Iterable[ModelUpdate]) -> "list[Message]":
    return [_reply(update.weights, update.num_examples) for update in updates]


def _reply(vector: Tensor, num_examples: int = 1) -> "Message":
    from flwr.app import MessageType, Metadata, MetricRecord, RecordDict
    from flwr.app.message import make_message

    metrics = MetricRecord({"num-examples": num_examples})
    content = RecordDict({"arrays": _record(vector), "metrics": metrics})
    # Not from or to any node: no strategy asks.
    metadata = Metadata(0, "", 0, 0, "", "", 0.0, 0.0, MessageType.TRAIN)
    return make_message(metadata, content)


def _record(vector: Tensor) -> "ArrayRecord":
    from flwr.app import Array

    return _record_type()({_KEY: Array(_array(vector))})


@functools.cache
def _record_type() -> "type[ArrayRecord]":
    """Return a record that Flower can empty without collecting all garbage.

    That takes a tenth of a second for each, in a process with torch.
    """
    from flwr.app import ArrayRecord

    class QuietlyEmptied(ArrayRecord):
        def to_numpy_ndarrays(self, *, keep_input: bool = True) -> list[NDArray[Any]]:
            arrays = [array.numpy() for array in self.values()]
            if not keep_input:
                self.clear()
            return arrays

    return QuietlyEmptied


def _array(vector: Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = vector.double().numpy()
    return array


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).float()


def _only(arrays: "dict[str, NDArray[Any]] | None") -> Tensor:
    assert arrays is not None, "a step sets what was not set"
    return _tensor(arrays[_KEY])

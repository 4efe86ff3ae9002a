"""The server halves that Flower ships, behind vectors and updates of our own.

The one file of `strategies` that knows of Flower. A new strategy object is made each
round; what it must remember goes in and comes out as arguments, so that a run that is
resumed goes on exactly. Flower is imported when it is needed only.

Flower computes in float64 here: the coordinates' means are then rounded once, and the
distances of Krum, which Flower takes as ``|x|² + |y|² - 2 x·y``, keep their digits.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.config.errors import RunError
from strategies.core.moments import AdaptiveStep, Moments
from strategies.core.records import ModelUpdate

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

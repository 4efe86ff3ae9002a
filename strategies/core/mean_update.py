"""A round's mean as one update, for methods whose server half takes a mean.

Private training and secure aggregation yield one thing: the mean difference of a
round's updates from what their clients were sent. For a method with ``takes_mean`` this
mean stands for the round: a single update that differs from the payload by it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from knnper.records import Parts, put_together, take_apart, tensors_of
from knnper.strategies.core.method import Method, origins


def differences(method: Method, payload: Any, update: Any) -> Tensor:
    """Return an update's differences from what its client was sent, float32 (d,).

    The tensors of the update follow each other in the order of their paths. A tensor
    without a counterpart in ``payload`` counts from zero.
    """
    started = origins(method, payload, update)
    parts = [
        (tensor - _origin(started, path, tensor)).reshape(-1)
        for path, tensor in sorted(tensors_of(update).items())
    ]
    return torch.cat(parts) if parts else torch.zeros(0)


def moved_update(method: Method, payload: Any, update: Any, difference: Tensor) -> Any:
    """Return an update with another difference from the payload, of shape (d,)."""
    parts = take_apart(update)
    ordered = sorted(parts.tensors.items())
    started = origins(method, payload, update)
    values = torch.split(difference, [tensor.numel() for _, tensor in ordered])
    tensors = {
        path: (_origin(started, path, tensor) + value.view(tensor.shape)).float()
        for (path, tensor), value in zip(ordered, values, strict=True)
    }
    return put_together(type(update), Parts(tensors, parts.structure))


def synthetic_update(
    method: Method, payload: Any, template_update: Any, mean_difference: Tensor
) -> Any:
    """Return the update that differs from the payload by ``mean_difference``, (d,).

    ``template_update``: a valid update of the round, for the names and shapes. The
    result counts one example and has no train loss (NaN). To be aggregated alone:
    ``method.aggregate(state, iter([("", update)]))``.
    """
    counted = replace(template_update, num_examples=1, train_loss=math.nan)
    return moved_update(method, payload, counted, mean_difference)


def _origin(started: Mapping[str, Tensor], path: str, tensor: Tensor) -> Tensor:
    origin = started.get(path)
    if origin is None or origin.shape != tensor.shape:
        return torch.zeros_like(tensor)
    return origin

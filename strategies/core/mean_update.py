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


def as_vector(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return tensors one after the other, in the order of their paths, (d,).

    A single tensor is not copied.
    """
    ordered = [tensor.reshape(-1) for _, tensor in sorted(tensors.items())]
    return ordered[0] if len(ordered) == 1 else torch.cat([torch.zeros(0), *ordered])


def with_vector(update: Any, vector: Tensor) -> Any:
    """Return an update with the numbers of ``vector``, ordered as by `as_vector`."""
    parts = take_apart(update)
    ordered = sorted(parts.tensors.items())
    pieces = torch.split(vector, [tensor.numel() for _, tensor in ordered])
    tensors = {
        path: piece.view(tensor.shape)
        for (path, tensor), piece in zip(ordered, pieces, strict=True)
    }
    return put_together(type(update), Parts(tensors, parts.structure))


def differences(method: Method, payload: Any, update: Any) -> Tensor:
    """Return an update's differences from what its client was sent, float32 (d,).

    They are ordered as by `as_vector`. A tensor without a counterpart in ``payload``
    counts from zero.
    """
    return as_vector(tensors_of(update)) - _origin(method, payload, update)


def moved_update(method: Method, payload: Any, update: Any, difference: Tensor) -> Any:
    """Return an update with another difference from the payload, of shape (d,)."""
    origin = _origin(method, payload, update)
    return with_vector(update, (origin + difference.view_as(origin)).float())


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


def _origin(method: Method, payload: Any, update: Any) -> Tensor:
    """Return the numbers from which those of an update started, float32 (d,)."""
    started = origins(method, payload, update)
    tensors = tensors_of(update).items()
    return as_vector(
        {path: started.get(path, torch.zeros_like(tensor)) for path, tensor in tensors}
    )

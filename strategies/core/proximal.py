"""Proximal steps of SGD: the pull of parameters towards a centre."""

import functools

import torch
from torch import Tensor

from knnper.strategies.core.training import GradientHook


def pull(
    center: Tensor,
    weight: float,
    learning_rate: float,
    weight_decay: float,
    where: Tensor | None = None,
) -> GradientHook:
    """Return a hook that makes the steps of SGD proximal, towards ``center``.

    The hook replaces the gradient g at the parameters p by

        (g + λ ((1 - η d) p - c)) / (1 + η λ)

    A step of SGD with learning rate η and weight decay d along it is the proximal step
    of λ/2 ||p - c||². Momentum applies to it as to any gradient.

    Parameters
    ----------
    center
        c, shape (num_parameters,) or (num_weights,); buffers are ignored.
    weight
        λ; 0 leaves the gradient unchanged in every bit.
    learning_rate, weight_decay
        η and d of the steps.
    where
        Mask of the parameters to pull, of the shape of ``center``; None is all.
    """
    shrunk = 1 / (1 + learning_rate * weight)
    strength = weight * shrunk
    decayed = 1 - learning_rate * weight_decay

    @functools.cache
    def on_device(device: torch.device, length: int) -> tuple[Tensor, Tensor | None]:
        mask = None if where is None else where[:length].to(device)
        return center[:length].to(device), mask

    def hook(gradient: Tensor, parameters: Tensor) -> None:
        target, mask = on_device(gradient.device, len(gradient))
        away = decayed * parameters - target
        pulled = (shrunk * gradient).add_(away, alpha=strength)
        gradient.copy_(pulled if mask is None else torch.where(mask, pulled, gradient))

    return hook

"""The pull towards a centre, as a proximal step of SGD.

Many methods add λ/2 ||p - c||² to the loss, which changes a step of SGD into

    p ← p - η (g + λ (p - c))

That diverges where η λ > 2, and the papers' grids of λ reach that. The step here takes
the pull at its end point instead of its start (Parikh, Boyd, "Proximal Algorithms",
2014, section 4.2, the proximal gradient method):

    p ← argmin_q ⟨g, q⟩ + ||q - p||² / (2 η) + λ/2 ||q - c||²
      = (p - η g + η λ c) / (1 + η λ)

The two agree to first order in η λ, λ = 0 is plain SGD, and λ → ∞ is the centre, as
long as there is no momentum, which goes on to where the steps before were going.

With weight decay of strength d, f(p) + d/2 ||p||² is what is trained, and its gradient
g(p) + d p is what g stands for above. SGD adds d p itself, so it is handed the rest:

    (g + d p + λ (p - c)) / (1 + η λ) - d p = (g + λ ((1 - η d) p - c)) / (1 + η λ)
"""

import functools

import torch
from torch import Tensor

from strategies.core.local_model import GradientHook


def pull(
    center: Tensor,
    weight: float,
    learning_rate: float,
    weight_decay: float,
    where: Tensor | None = None,
) -> GradientHook:
    """Return the hook that pulls a client's parameters towards ``center``.

    It replaces the gradient g at the parameters p by (g + λ ((1 - η d) p - c)) /
    (1 + η λ), with which a step of SGD of rate η and weight decay d is the proximal
    one. Momentum comes on top of it, as on top of any gradient.

    Parameters
    ----------
    center
        c, shape (num_parameters,), or (num_weights,), whose buffers are left out.
    weight
        λ, 0 or more. With 0 the gradient stays exactly as it is.
    learning_rate, weight_decay
        η and d of the steps that are made.
    where
        Which parameters are pulled, bool of the shape of ``center``; None is all. The
        others' gradient stays as it is.
    """
    shrunk = 1 / (1 + learning_rate * weight)
    strength = weight * shrunk
    kept = 1 - learning_rate * weight_decay

    @functools.cache
    def on_device(device: torch.device, length: int) -> tuple[Tensor, Tensor | None]:
        mask = None if where is None else where[:length].to(device)
        return center[:length].to(device), mask

    def hook(gradient: Tensor, parameters: Tensor) -> None:
        there, mask = on_device(gradient.device, len(gradient))
        away = kept * parameters - there
        pulled = (shrunk * gradient).add_(away, alpha=strength)
        gradient.copy_(pulled if mask is None else torch.where(mask, pulled, gradient))

    return hook

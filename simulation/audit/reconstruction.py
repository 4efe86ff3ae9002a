"""Reconstruction of inputs from an update, and its quality as PSNR.

Two attacks of a server that follows the protocol. The analytic one divides the gradient
of a linear layer's weights by that of its bias: with one example it is the layer's
input exactly (Phong et al. 2018). The other searches for inputs that have a gradient
in the direction of the update (Geiping et al. 2020, "Inverting Gradients").
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from knnper.data.examples import Examples
from knnper.seeding import RandomKey
from knnper.simulation.audit.figures import AttackResult, median, proportion
from knnper.strategies.core.task import Task

ANALYTIC, GRADIENT_MATCHING = "analytic", "gradient_matching"
RECOGNISABLE_DB = 25.0
HIGHEST_DB = 200.0  # in place of infinity, for an exact copy
_MOST_ROWS = 128  # of a layer; pairs of rows of larger layers are left out
_SEARCH_STEPS, _SEARCH_RATE = 400, 0.05
_SMOOTHNESS = 1e-3  # weight of the total variation


@dataclass(frozen=True)
class ObservedUpdate:
    """An update as the server sees it, and the training examples behind it.

    ``weights`` were sent to the client; ``decrease`` is the difference of these and
    the returned weights. Both have the shape (num_weights,).
    """

    weights: Tensor
    decrease: Tensor
    examples: Examples


def analytic_inputs(task: Task, update: ObservedUpdate) -> Tensor:
    """Return candidates for the model's inputs, float64 (m, d); none if no layer fits.

    The quotients of the rows of each linear layer with a bias and d inputs, and those
    of differences of two rows, which are exact for an example alone with its label.
    """
    size = int(np.prod(task.spec.image_shape))
    changes = task.model.named(update.decrease.double())
    candidates = [torch.empty(0, size, dtype=torch.float64)]
    for name, module in task.model.module.named_modules():
        if not isinstance(module, nn.Linear) or module.in_features != size:
            continue
        rows, biases = (changes.get(f"{name}.{part}") for part in ("weight", "bias"))
        if rows is None or biases is None:
            continue
        candidates.append(rows / biases[:, None])
        if len(rows) <= _MOST_ROWS:
            first, second = torch.combinations(torch.arange(len(rows))).T
            slopes = (biases[first] - biases[second])[:, None]
            candidates.append((rows[first] - rows[second]) / slopes)
    joined = torch.cat(candidates)
    finite = joined[torch.isfinite(joined).all(dim=1)]
    # A row without a gradient gives no candidate; if none has any, zeros stand in.
    return finite if len(finite) else torch.zeros_like(joined[:1])


def matched_inputs(task: Task, update: ObservedUpdate, rng: RandomKey) -> Tensor:
    """Search for inputs with a gradient in the direction of the update, (n, d).

    The attacker knows the labels. Geiping et al. 2020, Eq. 4: the cosine distance of
    the gradients plus the total variation, minimised by Adam on signs.
    """
    module, labels = task.model.module, update.examples.labels
    task.model.load(update.weights)
    module.eval()
    trained = {
        name: part for name, part in module.named_parameters() if part.requires_grad
    }
    changes = task.model.named(update.decrease)
    target = torch.cat([changes[name].flatten() for name in trained])
    shape = task.normalize(update.examples.images).shape
    start = rng.numpy().standard_normal(shape, np.float32)
    inputs = torch.from_numpy(start).requires_grad_()
    optimizer = torch.optim.Adam([inputs], lr=_SEARCH_RATE)
    milestones = [_SEARCH_STEPS * part // 8 for part in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    for _ in range(_SEARCH_STEPS):
        loss = module.losses(inputs, labels).mean()
        gradients = torch.autograd.grad(loss, list(trained.values()), create_graph=True)
        gradient = torch.cat([part.flatten() for part in gradients])
        distance = 1 - functional.cosine_similarity(gradient, target, dim=0)
        cost = distance + _SMOOTHNESS * sum(
            inputs.diff(dim=dim).abs().mean() for dim in (2, 3) if shape[dim] > 1
        )
        (slope,) = torch.autograd.grad(cost, inputs)
        inputs.grad = slope.sign()
        optimizer.step()
        schedule.step()
    return inputs.detach().flatten(1).double()


def psnr_of_nearest(task: Task, candidates: Tensor, examples: Examples) -> Tensor:
    """Return for each example the PSNR in dB of the nearest candidate, float64 (n,).

    Candidates are inputs of the model, (m, d) with m at least 1. Images are compared as
    pixels in [0, 1]; features are not scaled, and their range is the peak.
    """
    spec = task.spec
    inputs = task.normalize(examples.images).double()
    mean, std = (
        torch.tensor(values, dtype=torch.float64).reshape(1, -1, 1, 1)
        for values in (spec.mean, spec.std)
    )
    truth = (inputs * std + mean).flatten(1)
    guesses = (candidates.reshape(-1, *inputs.shape[1:]) * std + mean).flatten(1)
    peak = float(truth.max() - truth.min())
    if spec.dtype == "uint8":
        guesses, peak = guesses.clamp(0, 1), 1.0
    errors = torch.stack([((guesses - row) ** 2).mean(dim=1).min() for row in truth])
    return -10 * torch.log10((errors / peak**2).clamp_min(10 ** (-HIGHEST_DB / 10)))


def reconstruction_result(
    attack: str,
    surface: str,
    task: Task,
    updates: Sequence[ObservedUpdate],
    noun: str,
    rng: RandomKey,
) -> AttackResult:
    """Reconstruct the ``noun`` behind updates; return the figures."""
    psnr = []
    for place, update in enumerate(updates):
        if attack == ANALYTIC:
            candidates = analytic_inputs(task, update)
        else:
            candidates = matched_inputs(task, update, rng.child(place))
        psnr.append(psnr_of_nearest(task, candidates, update.examples))
    values = torch.cat(psnr).numpy()
    near = int((values >= RECOGNISABLE_DB).sum())
    figures = {
        "recognisable": proportion(near, len(values)),
        "median_psnr_db": median(values),
    }
    return AttackResult(attack, surface, {noun: len(values)}, figures)

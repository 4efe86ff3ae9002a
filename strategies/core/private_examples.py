"""Differential privacy of each training example: DP-SGD at the clients.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1. A
mini-batch has each of a client's n examples with probability q = B / n, independently
(Poisson sampling). With g_i the gradient of the loss of example i, a step goes along

    (Σ_i g_i min(1, C / ‖g_i‖) + N(0, σ² C² I)) / B

B is the batch size of the settings, at most n, also where a mini-batch has more or
fewer examples. One step is one release with noise multiplier σ and sampling q; what is
computed from gradients, such as momentum and the client's update, costs nothing more.
Two data sets of a client are neighbours if one has one example more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from typing_extensions import override

from knnper.embedding_model import EmbeddingModel
from knnper.errors import ConfigError, Problem
from knnper.experiment import TrainingSettings
from knnper.privacy import Release, default_delta, epsilon_of
from knnper.process import import_extra
from knnper.strategies.core.task import Task

_Objective = Callable[[EmbeddingModel, Tensor, Tensor], Tensor]
_PLACE = "training.example_privacy"
# Numbers in the gradients of single examples that are kept at once: 256 MB.
_GRADIENTS_AT_ONCE = 2**26


def poisson_batches(
    num_examples: int, batch_size: int, generator: np.random.Generator
) -> Iterator[Tensor]:
    """Yield the positions of each mini-batch, int64 of shape (b,); b may be 0."""
    probability = sampling_probability(num_examples, batch_size)
    while num_examples:
        chosen = generator.random(num_examples) < probability
        yield torch.from_numpy(np.flatnonzero(chosen))


def sampling_probability(num_examples: int, batch_size: int) -> float:
    """Return q, the probability that an example is part of a mini-batch."""
    return min(batch_size, num_examples) / num_examples


class _MeanLoss(nn.Module):
    """An objective as a module, for `functional_call` with other parameters."""

    def __init__(self, module: EmbeddingModel, objective: _Objective) -> None:
        super().__init__()
        self.module = module
        self.objective = objective

    @override
    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.objective(self.module, inputs, labels).mean()


@dataclass(frozen=True)
class PrivateGradients:
    """Noisy sums of clipped gradients for the steps of one client.

    Attributes
    ----------
    task
        The learning task; its model's buffers are empty.
    objective
        ``(module, inputs, labels) -> losses``; each loss is that of one example alone.
    trainable
        Mask of the parameters to train, bool of shape (num_parameters,); None for all.
    num_examples
        n, of the client.
    generator
        Of the noise.
    """

    task: Task
    objective: _Objective
    trainable: Tensor | None
    num_examples: int
    generator: np.random.Generator

    def fill(self, inputs: Tensor, labels: Tensor, weights: Tensor | None) -> None:
        """Set the model's gradient to the noisy mean.

        ``inputs``: normalised, of a mini-batch; ``labels`` and ``weights``, factors on
        the losses, of shape (b,).
        """
        model, training = self.task.model, self.task.training
        settings = training.example_privacy
        assert settings is not None
        module = _MeanLoss(model.module, self.objective)

        def loss(parameters: Tensor, image: Tensor, label: Tensor) -> Tensor:
            named = model.named(parameters).items()
            tensors = {f"module.{name}": tensor for name, tensor in named}
            mean: Tensor = functional_call(module, tensors, (image[None], label[None]))
            return mean

        gradients_of = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
        total = torch.zeros_like(model.gradient)
        factors = total.new_ones(len(labels)) if weights is None else weights
        at_once = max(1, _GRADIENTS_AT_ONCE // model.num_parameters)
        for begin in range(0, len(labels), at_once):
            part = slice(begin, begin + at_once)
            with self.task.autocast():
                gradients = gradients_of(
                    model.parameters.detach(), inputs[part], labels[part]
                )
            if self.trainable is not None:
                gradients *= self.trainable
            norms = gradients.norm(dim=1) * factors[part]
            shares = (settings.clip_norm / norms.clamp_min(1e-30)).clamp_max(1)
            total += (factors[part] * shares) @ gradients
        deviation = settings.noise_multiplier * settings.clip_norm
        if deviation:
            noise = self.generator.normal(0.0, deviation, len(total))
            total += torch.from_numpy(noise).to(total)
        model.gradient.copy_(total / min(training.batch_size, self.num_examples))


def require_private_model(task: Task) -> None:
    """Raise ConfigError if single examples have no gradients of their own."""
    if task.training.example_privacy is None:
        return
    opacus = import_extra("opacus.validators", "privacy", _PLACE)
    validators = opacus.ModuleValidator.VALIDATORS
    reasons = [
        str(error).partition(". ")[0]
        for module in {entry.module: None for entry in task.model.entries}
        # Opacus looks up the exact type, and misses classes derived from it.
        for kind in type(module).__mro__
        for error in validators.get(kind, lambda _: ())(module)
    ]
    if not reasons and len(task.model.buffers):
        reasons = ["its buffers, such as running statistics, are averages of the data"]
    if reasons:
        message = (
            "found a model that cannot be trained with privacy for each example: "
            f"{'; '.join(dict.fromkeys(reasons))}. Expected one without such layers; "
            "choose GroupNorm or LayerNorm, another model, or model.trained head"
        )
        raise ConfigError([Problem(_PLACE, message)])


def epsilon_of_examples(
    training: TrainingSettings, num_examples: int, num_steps: int
) -> tuple[float, float]:
    """Return ε and δ of a client's examples after ``num_steps`` steps in all rounds."""
    settings = training.example_privacy
    assert settings is not None
    delta = settings.delta or default_delta(num_examples)
    sampling = sampling_probability(num_examples, training.batch_size)
    release = Release(settings.noise_multiplier, sampling, num_steps)
    # Rényi accounting: a hundredth of the time of the other, for a thousand clients.
    return epsilon_of([release], delta, "rdp"), delta

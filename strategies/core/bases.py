"""Models that are convex combinations of others, block by block.

Chen et al. 2023, Eqs. 4 and 8 and section 4.4, "Layer-wise combinations".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from knnper.data.examples import Examples
from knnper.experiment import TrainingSettings
from knnper.models.flat import EmbeddingModel, FlatModel
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import RunningMean
from knnper.strategies.core.clusters import clusters
from knnper.strategies.core.records import Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import LocalModel, LocalResult, local_sgd


@dataclass(frozen=True, eq=False)
class Blocks:
    """Which weights share a coefficient."""

    # The block of each weight, int64 of shape (num_weights,), on the model's device;
    # numbers from 0 on without a gap.
    of_weight: Tensor

    @cached_property
    def num_blocks(self) -> int:
        """B."""
        return int(self.of_weight.max()) + 1

    @cached_property
    def _runs(self) -> tuple[list[int], list[int]]:
        blocks, sizes = torch.unique_consecutive(self.of_weight, return_counts=True)
        return blocks.tolist(), sizes.tolist()

    def spread(self, values: Tensor) -> Tensor:
        """Return each weight's value, (..., num_weights), of its block's (..., B)."""
        return values[..., self.of_weight]

    def sums(self, products: Tensor) -> Tensor:
        """Return the sums over each block, (..., B), of products (..., num_weights)."""
        blocks, sizes = self._runs
        sums = products.new_zeros((*products.shape[:-1], self.num_blocks))
        parts = torch.split(products, sizes, dim=-1)
        for block, part in zip(blocks, parts, strict=True):
            sums[..., block] += part.sum(dim=-1)
        return sums

    def combine(self, models: Tensor, shares: Tensor) -> Tensor:
        """Return θ = Σ_k a_k v_k, shape (num_weights,).

        Parameters
        ----------
        models
            v_k, shape (k, num_weights).
        shares
            a_k of each block, shape (k, B).
        """
        return (self.spread(shares) * models).sum(dim=0)

    def of_parameters(self, model: FlatModel) -> "Blocks":
        """Return the blocks of the parameters alone."""
        return Blocks(self.of_weight[: model.num_parameters])

    def among(self, weights: Tensor) -> list[int]:
        """Return the blocks that some of ``weights`` belong to, a bool mask."""
        chosen: list[int] = torch.unique(self.of_weight[weights]).tolist()
        return chosen


def whole_model(model: FlatModel) -> Blocks:
    """Return all weights as one block."""
    numbers = torch.zeros(model.num_weights, dtype=torch.int64)
    return Blocks(numbers.to(model.device))


def layers(model: FlatModel) -> Blocks:
    """Return a block for each layer and one for the head.

    A layer is a child of the model other than its head; a child that is a
    `torch.nn.Sequential` or a `torch.nn.ModuleList` stands for its own children. One
    that owns only vectors, as a normalisation does, belongs to the layer before it.
    """
    # What the model owns itself, outside of any layer, is a block of its own: 0.
    number_of, number = dict[nn.Module, int](), 1
    for layer in _layers(model.module):
        has_matrix = any(tensor.dim() > 1 for tensor in layer.parameters())
        number += has_matrix or layer is model.module.classifier
        number_of |= dict.fromkeys(layer.modules(), number)
    return _numbered(model, number_of)


def stages(model: FlatModel) -> Blocks:
    """Return a block for each stage and one for the head.

    A stage is a child of the model that is a `torch.nn.Sequential` or a
    `torch.nn.ModuleList`, with what the model defines between it and the one before:
    ResNet-18's first has the convolution and normalisation of the stem. What comes
    behind the last is a block of its own, as is what the model owns itself.
    """
    number_of, number = dict[nn.Module, int](), 1
    for child in model.module.children():
        if child is not model.module.classifier:
            number_of |= dict.fromkeys(child.modules(), number)
            number += _is_list(child)
    head = model.module.classifier.modules()
    return _numbered(model, number_of | dict.fromkeys(head, number + 1))


def _numbered(model: FlatModel, number_of: Mapping[nn.Module, int]) -> Blocks:
    """Return the blocks in the order of their numbers; 0 is what is in no module."""
    found = [
        torch.full((entry.stop - entry.start,), number_of.get(entry.module, 0))
        for entry in model.entries
    ]
    _, numbers = torch.unique(torch.cat(found), return_inverse=True)
    return Blocks(numbers.to(model.device))


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)


def _layers(module: EmbeddingModel) -> Iterable[nn.Module]:
    for child in module.children():
        if child is module.classifier:
            continue
        yield from child.children() if _is_list(child) else (child,)
    yield module.classifier


def bases_after(
    bases: Tensor, shares: Tensor, combined: Tensor, trained: Tensor, kept: float
) -> Tensor:
    """Return where SGD on all bases ends, from where it took their combination.

    With θ = Σ_k a_k v_k and fixed a_k, the gradient of v_k is a_k g with g = ∇L(θ)
    (Eq. 8). A step of SGD is linear in weights and gradients, with momentum and weight
    decay too: after several, v_k = ρ v_k(0) + a_k s, where ρ is what decay alone leaves
    and s, the same for all, sums up the g. So θ = ρ θ(0) + c s with c = Σ_k a_k²:
    training θ alone, its gradient times c, gives s and with it all bases.

    Parameters
    ----------
    bases
        v_k(0), shape (k, num_parameters).
    shares
        a_k of each parameter, shape (k, num_parameters).
    combined, trained
        θ before and after, shape (num_parameters,).
    kept
        ρ, see `kept_by_decay`.
    """
    total = (trained - kept * combined) / shares.square().sum(dim=0)
    return kept * bases + shares * total


def kept_by_decay(
    training: TrainingSettings, learning_rate: float, num_steps: int
) -> float:
    """Return ρ, what SGD's weight decay leaves of a weight without a gradient."""
    kept, velocity = 1.0, 0.0
    for _ in range(num_steps):
        velocity = training.momentum * velocity + training.weight_decay * kept
        kept -= learning_rate * velocity
    return kept


@dataclass(frozen=True)
class BasesState(Record):
    """The server's state."""

    # One in the warm start; then v' if there is one, v_1 ... v_K. Tensors of shape
    # (num_weights,).
    models: tuple[Tensor, ...]
    num_rounds: int  # Rounds that are done
    seed: int  # Of the clusters at the end of the warm start


@dataclass(frozen=True)
class Bases(Record):
    """What every client gets."""

    models: tuple[Tensor, ...]


@dataclass(frozen=True)
class BasesUpdate(Record):
    """What a client sends back."""

    models: tuple[Tensor, ...]  # The trained models, in the order of `BasesState`
    num_examples: int
    train_loss: float


def mean_models(updates: Iterable[BasesUpdate]) -> tuple[Tensor, ...]:
    """Return the mean of each model, each update weighted by its examples."""
    means: list[RunningMean] = []
    for update in updates:
        means = means or [RunningMean() for _ in update.models]
        for mean, weights in zip(means, update.models, strict=True):
            mean.add(weights, update.num_examples)
    return tuple(mean.result() for mean in means)


def clustered(
    updates: Sequence[BasesUpdate], center: Tensor, count: int, rng: RandomKey
) -> tuple[Tensor, ...]:
    """Return the means of the updates' models in ``count`` clusters.

    Parameters
    ----------
    center
        Any point amid the models' parameters, shape (num_parameters,): differences
        from it are small, and so more exact. Buffers are not compared.
    """
    first = slice(0, len(center))
    moved = torch.stack([update.models[0][first] - center for update in updates])
    found = clusters(moved, count, rng).tolist()
    groups = [
        [update for update, its in zip(updates, found, strict=True) if its == cluster]
        for cluster in range(count)
    ]
    return tuple(mean_models(group)[0] for group in groups)


class Combination:
    """A client's ψ, and what it makes of bases; uniform at first.

    Parameters
    ----------
    models
        The major basis v' if there is one, then v_1 ... v_K, shape (k, num_weights),
        on the model's device.
    learning_rate
        Of ψ.
    """

    def __init__(
        self, models: Tensor, blocks: Blocks, has_major: bool, learning_rate: float
    ) -> None:
        self.models = models
        self.blocks = blocks
        self._has_major = has_major
        self._learning_rate = learning_rate
        num_bases = len(models) - has_major
        self._psi = models.new_zeros((num_bases, blocks.num_blocks))

    def alpha(self, temperature: float = 1.0) -> Tensor:
        """Return softmax(ψ / τ), shape (K, B); columns sum to 1."""
        return torch.softmax(self._psi / temperature, dim=0)

    def shares(self, temperature: float = 1.0) -> Tensor:
        """Return the share of each model in each block, (k, B); columns sum to 1."""
        return self._with_major(self.alpha(temperature))

    def combined(self, temperature: float = 1.0) -> Tensor:
        """Return θ, shape (num_weights,), with α or with the sharpened α†."""
        return self.blocks.combine(self.models, self.shares(temperature))

    def describe(self, free: Tensor | None) -> dict[str, float]:
        """Return each basis's α, the mean over the blocks that are combined.

        Parameters
        ----------
        free
            Which weights are not, bool of shape (num_weights,); None is none.
        """
        alpha = self.alpha().cpu()
        if free is not None:
            combined = self.blocks.among(~free.to(self.models.device))
            alpha = alpha[:, combined] if combined else alpha
        means = alpha.mean(dim=1).tolist()
        return {f"combination_{number}": mean for number, mean in enumerate(means)}

    def step(self, products: Tensor) -> None:
        """Let ψ make a step of SGD.

        Parameters
        ----------
        products
            v_k · ∇L(θ) over each block, shape (k, B): the gradient of the shares
            (Eq. 8).
        """
        psi = self._psi.clone().requires_grad_()
        shares = self._with_major(torch.softmax(psi, dim=0))
        (gradient,) = torch.autograd.grad(shares, psi, products)
        self._psi -= self._learning_rate * gradient

    def _with_major(self, alpha: Tensor) -> Tensor:
        if not self._has_major:
            return alpha
        return torch.cat([alpha.new_full((1, alpha.shape[1]), 0.5), alpha / 2])


def learn_combination(
    task: Task,
    combination: Combination,
    examples: Examples,
    learning_rate: float,
    rng: RandomKey,
    num_epochs: int,
    free: Tensor | None = None,
) -> LocalResult:
    """Train ψ with the bases frozen; return the combined model after it.

    Parameters
    ----------
    free
        Which weights are trained themselves instead of being combined, bool of shape
        (num_weights,); they start from their combination. None is none.
    """
    num_parameters = task.model.num_parameters
    blocks = combination.blocks.of_parameters(task.model)
    bases = combination.models[:, :num_parameters]
    mask = torch.zeros(num_parameters, dtype=torch.bool, device=bases.device)
    if free is not None:
        mask |= free[:num_parameters].to(bases.device)

    def step(model: LocalModel) -> Tensor:
        loss = model.backward(model.next_batch())
        combination.step(blocks.sums(bases * model.gradient.masked_fill(mask, 0.0)))
        model.gradient.mul_(mask)
        model.step()
        combined = blocks.combine(bases, combination.shares())
        model.parameters.copy_(torch.where(mask, model.parameters, combined))
        return loss

    start = combination.combined().cpu()
    return local_sgd(
        task,
        start,
        examples,
        learning_rate,
        rng,
        num_epochs=num_epochs,
        local_step=step,
    )


def train_bases(
    task: Task,
    combination: Combination,
    temperature: float,
    examples: Examples,
    learning_rate: float,
    rng: RandomKey,
) -> tuple[Tensor, LocalResult]:
    """Train all bases with α† frozen; return them, shape (k, num_weights).

    Only θ is trained, from which the bases follow: see `bases_after`.

    Parameters
    ----------
    combination
        The bases before, and α.
    temperature
        τ of α†.
    """
    num_parameters = task.model.num_parameters
    shares = combination.blocks.spread(combination.shares(temperature))
    shares = shares[:, :num_parameters]
    factor = shares.square().sum(dim=0)

    def scale(gradient: Tensor, parameters: Tensor) -> None:
        gradient.mul_(factor)

    start = combination.combined(temperature).cpu()
    result = local_sgd(task, start, examples, learning_rate, rng, gradient_hook=scale)
    trained = bases_after(
        combination.models[:, :num_parameters],
        shares,
        start[:num_parameters].to(shares.device),
        result.weights[:num_parameters].to(shares.device),
        kept_by_decay(task.training, learning_rate, result.num_steps),
    )
    return _with_buffers(trained.cpu(), result), result


def train_jointly(
    task: Task,
    combination: Combination,
    temperature: float,
    examples: Examples,
    learning_rate: float,
    rng: RandomKey,
) -> tuple[Tensor, LocalResult]:
    """Train ψ and all bases together (Eq. 7); return the bases, (k, num_weights).

    The parameters are those of `train_bases`; α† only stands in the bases' gradient.
    """
    num_parameters = task.model.num_parameters
    blocks = combination.blocks.of_parameters(task.model)
    bases = nn.Parameter(combination.models[:, :num_parameters].clone())
    optimizer = torch.optim.SGD(
        [bases],
        lr=learning_rate,
        momentum=task.training.momentum,
        weight_decay=task.training.weight_decay,
    )

    def step(model: LocalModel) -> Tensor:
        loss = model.backward(model.next_batch())
        products = blocks.sums(bases.detach() * model.gradient)
        sharpened = blocks.spread(combination.shares(temperature))
        bases.grad = sharpened * model.gradient
        optimizer.step()
        combination.step(products)
        combined = blocks.combine(bases.detach(), combination.shares())
        model.parameters.copy_(combined)
        return loss

    start = combination.combined().cpu()
    result = local_sgd(task, start, examples, learning_rate, rng, local_step=step)
    return _with_buffers(bases.detach().cpu(), result), result


def _with_buffers(parameters: Tensor, result: LocalResult) -> Tensor:
    """Return models of these parameters (k, num_parameters), all with θ's buffers."""
    buffers = result.weights[parameters.shape[1] :].expand(len(parameters), -1)
    return torch.cat([parameters, buffers], dim=1)

"""How a client trains the combination of bases, the bases, or both.

fedbasis-pflbed.txt, section 4.2.
"""

import torch
from torch import Tensor, nn

from knnper.config.seeding import RandomKey
from knnper.data.examples import Examples
from strategies.core.bases import Blocks, bases_after, kept_by_decay
from strategies.core.local_model import LocalModel
from strategies.core.local_sgd import LocalResult, local_sgd
from strategies.core.task import Task


class Combination:
    """A client's ψ, and what it makes of bases; uniform at first.

    Parameters
    ----------
    models
        The major basis v' if there is one, then v_1 ... v_K, shape (k, num_weights),
        on the model's device.
    blocks
        Which weights share a coefficient.
    has_major
        Whether v' is there, as half of each combination.
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
    task
        Gives model and batch size.
    combination
        Is trained in place.
    examples
        What to train on.
    learning_rate
        Of the weights in ``free``.
    rng
        Fixes the mini-batches.
    num_epochs
        Passes over the examples.
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
    task
        Gives model and training section.
    combination
        The bases before, and α.
    temperature
        τ of α†.
    examples
        What to train on.
    learning_rate
        Of the bases.
    rng
        Fixes the mini-batches.
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

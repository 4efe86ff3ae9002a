"""Optimizer and loss of local training, as the section ``training`` names them.

Both are a name of ours or a user's own ``module:attribute``. Every problem with a
user's optimizer is found before the first round.
"""

import functools
import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn, optim
from torch.optim import sgd as torch_sgd
from torch.optim.lr_scheduler import LRScheduler

from knnper.embedding_model import Criterion, OwnLoss
from knnper.errors import ConfigError, OwnCodeError, Problem
from knnper.experiment import SgdSettings
from knnper.own import Kind, arguments, explained, given_to, settings_of
from knnper.settings import Choice, Settings, SettingsTypes
from knnper.strategies.core.task import Task

# Arguments of a torch optimizer that are not settings: local training passes the first
# two, and the others choose an implementation.
_PASSED = ("params", "lr", "foreach", "fused", "capturable", "differentiable")

# Errors of an optimizer: torch's, an assertion, or an error in a user's file.
_FAILURES = (TypeError, ValueError, RuntimeError, AssertionError, OwnCodeError)


def _is_optimizer(entry: object) -> bool:
    return isinstance(entry, type) and issubclass(entry, optim.Optimizer)


def _advice_on_optimizer(entry: object) -> str:
    """Advise on an entry that is no class of optimizers; empty without advice."""
    is_schedule = isinstance(entry, type) and issubclass(entry, LRScheduler)
    return "a schedule of the rate is set in training.schedule" if is_schedule else ""


OWN_OPTIMIZER = Kind(
    "a class of torch optimizers",
    supplied=_PASSED,
    is_right=_is_optimizer,
    advice=_advice_on_optimizer,
)
"""A user's optimizer; its parameters are the model's tensors, one by one."""

OPTIMIZERS: SettingsTypes = {
    "SGD": SgdSettings,
    **{
        kind.__name__: settings_of(kind, Settings, frozenset(_PASSED))
        for kind in (
            optim.Adam,
            optim.AdamW,
            optim.Adamax,
            optim.NAdam,
            optim.RAdam,
            optim.RMSprop,
            optim.Adagrad,
            optim.Adadelta,
            optim.Rprop,
        )
    },
}
"""torch's elementwise optimizers, which can step on one vector of all parameters."""

OWN_LOSS = Kind(
    "a function (logits, labels) -> loss, or a class of such modules",
    supplied=("input", "target", "reduction", "logits", "labels"),
)

LOSSES: SettingsTypes = {"cross_entropy": Settings}


def criterion(choice: Choice[Settings]) -> Criterion:
    """Build the loss that the training section chooses."""
    if choice.entry is None:
        return Criterion()
    chosen = arguments(choice.settings, Settings)
    chosen |= given_to(choice.entry, reduction="none")
    if isinstance(choice.entry, type):
        return OwnLoss(choice.name, choice.entry(**chosen))
    return OwnLoss(choice.name, functools.partial(choice.entry, **chosen))


class Sgd:
    """The steps of ``torch.optim.SGD``, by the function that the class calls.

    The class itself imports torch's compiler, which takes a second in each process that
    trains: each worker of a simulation, and each message to a real client.

    Every method steps tensor by tensor, since a step on one vector of all tensors may
    differ in the last bits.
    """

    def __init__(
        self, task: Task, parameters: Sequence[Tensor], learning_rate: float
    ) -> None:
        training, chosen = task.training, task.training.optimizer.settings
        settings = chosen if isinstance(chosen, SgdSettings) else SgdSettings()
        self._parameters = parameters
        self._momentum: dict[Tensor, Tensor | None] = {}
        self._move = functools.partial(
            torch_sgd.sgd,
            lr=learning_rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            dampening=settings.dampening,
            nesterov=settings.nesterov,
            maximize=False,
            fused=True,
        )

    @torch.no_grad()
    def step(self) -> None:
        """Step on each parameter that has a gradient."""
        moved = [
            parameter for parameter in self._parameters if parameter.grad is not None
        ]
        gradients = [
            parameter.grad for parameter in moved if parameter.grad is not None
        ]
        momentum = [self._momentum.get(parameter) for parameter in moved]
        self._move(moved, gradients, momentum)
        self._momentum.update(zip(moved, momentum, strict=True))


def optimizer(task: Task, learning_rate: float) -> optim.Optimizer | Sgd:
    """Build the optimizer that the training section chooses."""
    chosen, model = task.training.optimizer, task.model
    if chosen.name == "SGD":
        return Sgd(task, model.tensors, learning_rate)
    settings = arguments(chosen.settings, Settings)
    if chosen.entry is not None:
        tensors = [
            parameter
            for parameter in model.module.parameters()
            if parameter.requires_grad
        ]
        built: optim.Optimizer = chosen.entry(tensors, lr=learning_rate, **settings)
        return built
    kind: Callable[..., optim.Optimizer] = getattr(optim, chosen.name)
    return kind([model.parameters], lr=learning_rate, **settings)


def optimizer_problem(chosen: Choice[Settings]) -> str:
    """Explain why an optimizer cannot make the steps of local training, or return "".

    A user's optimizer is tried on four numbers with a dense gradient.
    """
    if chosen.entry is None:
        return ""
    closure = inspect.signature(chosen.entry.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return (
            f"{chosen.name} needs a closure that computes the loss several times in a "
            "step, and local training computes it once; expected an optimizer with a "
            "step() without arguments, such as AdamW"
        )
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    settings = arguments(chosen.settings, Settings)
    try:
        with explained():
            tried: optim.Optimizer = chosen.entry([weight], lr=1e-3, **settings)
    except _FAILURES:
        return ""  # `require_optimizer` reports it with the model's own tensors
    try:
        with explained():
            tried.step()
    except _FAILURES as error:
        return (
            f"{chosen.name} fails at its first step: {type(error).__name__}: {error}; "
            "expected an optimizer that steps with dense gradients and no closure"
        )
    return ""


def require_optimizer(task: Task) -> None:
    """Reject settings that the optimizer does not accept, before the first round."""
    try:
        with explained():
            optimizer(task, task.training.learning_rate)
    except (TypeError, ValueError) as error:
        name = task.training.optimizer.name
        message = f"{name} cannot be made with a learning rate and these: {error}"
        raise ConfigError([Problem("training.optimizer", message)]) from error

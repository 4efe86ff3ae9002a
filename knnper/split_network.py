"""Split any network into a representation and its last linear layer, the head."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knnper.embedding_model import EmbeddingModel, MemoryFormat, laid_out
from knnper.errors import ConfigError, OwnCodeError, Problem
from knnper.own import explained
from knnper.settings import alternatives

# Advice of errors about networks without a clear head.
NAME_IT = "; or name the module of the representation: model.representation: features"


class SplitNetwork(EmbeddingModel):
    """A network that `split` has divided at its last linear layer."""

    def __init__(self, features: nn.Module, classifier: nn.Linear) -> None:
        super().__init__()
        self.features = features
        self.classifier: nn.Linear = classifier
        self.embedding_dim = classifier.in_features
        self.num_classes = classifier.out_features

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of the head, (n, p); rows and text are passed as (n, d)."""
        return super().embed(natural(x))


def natural(x: Tensor) -> Tensor:
    """Return rows of features, and text, as (n, d); images unchanged."""
    return x.flatten(start_dim=1) if x.shape[2:] == (1, 1) else x


class UpTo(nn.Module):
    """A network up to one of its modules, with this module's output as rows."""

    def __init__(self, network: nn.Module, path: str) -> None:
        super().__init__()
        self.network = network
        self._path = path

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output, averaged over positions, as (n, p)."""
        module = self.network.get_submodule(self._path)
        representation = seen_at(module, lambda: self.network(x))
        if not representation:
            message = f"found {self._path!r}, which forward does not run; name another"
            raise ConfigError([Problem("model.representation", message)])
        output: Tensor = representation[0]
        if output.dim() == 2:
            return output
        # Maps have their channels second, sequences last.
        axes = (1,) if output.dim() == 3 else tuple(range(2, output.dim()))
        return output.mean(dim=axes)


class _ReachedError(Exception):
    """Ends a forward pass once the observed module has been reached."""


def seen_at(
    module: nn.Module, run: Callable[[], object], *, entering: bool = False
) -> list[Any]:
    """Return the output (or input) of a module in ``run``, which ends there.

    The list is empty if ``run`` does not call the module.
    """
    captured: list[Any] = []

    def stop(_: nn.Module, inputs: tuple[Any, ...], *output: Any) -> None:
        captured.append((output or inputs)[0])
        raise _ReachedError

    hook = (
        module.register_forward_pre_hook(stop)
        if entering
        else module.register_forward_hook(stop)
    )
    try:
        with contextlib.suppress(_ReachedError):
            run()
    finally:
        hook.remove()
    return captured


@dataclass(frozen=True)
class _Run:
    """Observations of one forward pass."""

    output: object
    calls: Sequence[tuple[str, nn.Linear, Tensor, Tensor]]  # of linear layers
    reached: frozenset[nn.Module]


def split(
    network: nn.Module,
    sample: Tensor,
    num_classes: int | None = None,
    representation: str | None = None,
    name: str = "the model",
    fix: str = "",
    load: Callable[[nn.Module, str], None] | None = None,
) -> SplitNetwork:
    """Split a network into representation and head, which share its weights.

    ``sample``: Two inputs for finding the last linear layer; if the network fails on
    them, a contiguous copy is tried, and the result has that memory format.
    ``num_classes``: c; None: the network's own number. ``representation``: As in
    `OwnModelSettings`; the head is then a new layer. ``name``: The network's name in
    errors. ``fix``: Advice in the error about a network without a linear layer as head.
    ``load``: ``(network, head)`` loads weights into the whole network, with the name of
    its last linear layer, before layers are removed.
    """
    memory_format: MemoryFormat = "channels_last"
    try:
        run = _observed(network, sample, name)
    except OwnCodeError:
        plain = laid_out(sample, "contiguous")
        if plain.stride() == sample.stride():
            raise
        sample, memory_format = plain, "contiguous"
        run = _observed(network, sample, name)
    if load is not None:
        load(network, run.calls[-1][0] if run.calls else "")
    if representation is None:
        parts = _split_at_head(network, run, len(sample), num_classes, name, fix)
    else:
        parts = _split_at(network, sample, num_classes, representation, name)
    parts.memory_format = memory_format
    return parts


def _split_at_head(
    network: nn.Module,
    run: _Run,
    num_inputs: int,
    num_classes: int | None,
    name: str,
    fix: str,
) -> SplitNetwork:
    if reason := _no_logits(run.output, num_inputs, num_classes):
        raise OwnCodeError(f"{name} {reason}")
    if reason := _no_head(run):
        raise OwnCodeError(f"{name} {reason}{fix}")
    path, head, *_ = run.calls[-1]
    if path:
        _replace(network, path, nn.Identity())
    return SplitNetwork(network if path else nn.Identity(), head)


def _no_logits(output: object, num_inputs: int, num_classes: int | None) -> str:
    """Return why an output cannot be logits; empty if it can."""
    if not isinstance(output, Tensor):
        type_name = type(output).__name__
        return f"returned {type_name}, expected logits (n, c)"
    shape = tuple(output.shape)
    if len(shape) != 2 or shape[0] != num_inputs:
        return (
            f"returned shape {shape} of {num_inputs} inputs, expected ({num_inputs}, "
            "number of classes)"
        )
    if shape[1] != (num_classes or shape[1]):
        return (
            f"returned {shape[1]} logits, expected {num_classes}, one for each class; "
            "let it take the parameter num_classes"
        )
    return ""


def _no_head(run: _Run) -> str:
    """Return why the last linear layer is not the head; empty if it is."""
    if not run.calls:
        return "has no linear layer to be the head; give it one"
    path, _, inputs, logits = run.calls[-1]
    # Logits of a diverged network may all be NaN, which never equals itself.
    passed_on, output = logits.nan_to_num(), run.output
    if not isinstance(output, Tensor) or not passed_on.equal(output.nan_to_num()):
        return (
            f"changes the output of its last linear layer, {path}; expected that "
            "layer to return the logits, with no softmax or other layer behind it"
        )
    if inputs.dim() != 2 or [name for name, *_ in run.calls].count(path) > 1:
        return (
            f"calls its last linear layer, {path}, more than once or on inputs of "
            f"shape {tuple(inputs.shape)}, expected once on (n, p)"
        )
    return ""


def _split_at(
    network: nn.Module,
    sample: Tensor,
    num_classes: int | None,
    representation: str,
    name: str,
) -> SplitNetwork:
    modules = dict(network.named_modules())
    if representation not in modules:
        known = alternatives(representation, [name for name in modules if name])
        message = f"found {representation!r}, which {name} does not have; {known}"
        raise ConfigError([Problem("model.representation", message)])
    features = UpTo(network, representation)
    run = _observed(features, sample, name)
    output = run.output
    if not isinstance(output, Tensor) or output.dim() != 2:
        message = f"found an output that is no tensor (n, p, ...) of {representation}"
        raise ConfigError([Problem("model.representation", message)])
    for path, module in modules.items():
        # Layers that the representation does not need would be sent for nothing.
        is_left = module not in run.reached and path in dict(network.named_modules())
        if (
            path
            and is_left
            and next(module.parameters(recurse=False), None) is not None
        ):
            _replace(network, path, nn.Identity())
    return SplitNetwork(features, nn.Linear(output.shape[1], num_classes or 2))


def _observed(network: nn.Module, sample: Tensor, name: str) -> _Run:
    """Run a network on two inputs, in evaluation mode, and record its linear layers."""
    calls: list[tuple[str, nn.Linear, Tensor, Tensor]] = []
    reached = set[nn.Module]()
    hooks = []

    def watch(path: str, module: nn.Module) -> None:
        def note(submodule: nn.Module, inputs: Any, output: Any) -> None:
            reached.add(submodule)
            if isinstance(submodule, nn.Linear):
                calls.append((path, submodule, inputs[0], output))

        hooks.append(module.register_forward_hook(note))

    for path, module in network.named_modules():
        watch(path, module)
    was_training = network.training
    try:
        network.eval()
        with torch.no_grad(), explained():
            output = network(sample)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shape = tuple(sample.shape)
        raise OwnCodeError(
            f"{name} failed on inputs {sample.dtype} of shape {shape}: {error}"
        ) from error
    finally:
        network.train(was_training)
        for hook in hooks:
            hook.remove()
    return _Run(output, calls, frozenset(reached))


def _replace(network: nn.Module, path: str, other: nn.Module) -> None:
    above, _, name = path.rpartition(".")
    setattr(network.get_submodule(above), name, other)

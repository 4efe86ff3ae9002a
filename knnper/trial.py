"""A trial of a network that this project did not write, when it is built.

Clients of one process share the network, and are served in another order on another
engine. So a pass may leave traces in parameters and buffers alone, which are set before
each client. A network with any other state is refused by the name of that state. The
trial also chooses the format of images and convolutions in memory that its code takes.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from knnper.data.examples import TEXTS, InputSpec
from knnper.embedding_model import (
    EmbeddingModel,
    MemoryFormat,
    SplitNetwork,
    laid_out,
    part_as_tensor,
)
from knnper.errors import OwnCodeError
from knnper.own import explained
from knnper.seeding import RandomKey

log = logging.getLogger(__name__)

# Errors of a network on inputs that it cannot take.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
# Logits in two memory formats count as equal up to this part of the largest, and those
# of the same pass done twice up to the other.
_ROUNDING, _NOISE = 1e-3, 1e-6
# Layers that count batches, on which no output depends.
_NORMS = (nn.modules.batchnorm._NormBase,)
# Attributes of every module.
_OF_MODULES = frozenset(vars(nn.Module()))


def try_out(
    module: EmbeddingModel, spec: InputSpec, name: str, *, is_users: bool
) -> None:
    """Set the module's memory format; refuse state outside parameters and buffers.

    A few random inputs are run, and the module is then as it was before.

    Parameters
    ----------
    module
        The network, on the CPU.
    spec
        Its inputs.
    name
        Its name in messages.
    is_users
        Whether a user wrote it: it is then run in training mode, too. A network of a
        library is run in evaluation mode alone, for its memory format.

    Raises
    ------
    OwnCodeError
        If it runs in no memory format, or has state that no client sends.
    """
    samples = [_random_inputs(module, spec, seed) for seed in (0, 1)]
    buffers = _float_buffers(module).keys()
    parameters = dict(module.named_parameters()).keys()
    with _undone(module):
        try:
            chosen = choose_memory_format(module, samples[0], name, trains=is_users)
        except _NoFormatError:
            # A network may refuse numbers that its data does not have.
            samples = [_zeros(module, spec)] * 2
            chosen = choose_memory_format(module, samples[0], name, trains=is_users)
        arrange(module, chosen)
        if is_users:
            _require_complete(module, parameters, name)
            inputs, others = (laid_out(sample, chosen) for sample in samples)
            _require_stateless(module, inputs, others, buffers, name)
    module.memory_format = chosen


def _zeros(module: EmbeddingModel, spec: InputSpec) -> Tensor:
    """Return two normalised inputs of zeros."""
    stored = torch.zeros((2, *spec.image_shape), dtype=spec.torch_dtype)
    return module.normalizer(spec, torch.device("cpu"))(stored)


def _random_inputs(module: EmbeddingModel, spec: InputSpec, seed: int) -> Tensor:
    """Return two normalised random inputs."""
    shape, generator = (2, *spec.image_shape), torch.Generator().manual_seed(seed)
    if spec.dtype in ("uint8", *TEXTS):
        stored = torch.randint(spec.largest_whole + 1, shape, generator=generator)
    else:
        stored = torch.randn(shape, generator=generator) * torch.tensor(spec.std)
        stored += torch.tensor(spec.mean)
    normalize = module.normalizer(spec, torch.device("cpu"))
    return normalize(stored.to(spec.torch_dtype))


# --- memory format


def arrange(module: nn.Module, memory_format: MemoryFormat) -> None:
    """Bring all tensors of four dimensions to a memory format."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4 and tensor.is_floating_point():
            data, shape = tensor.data, tuple(tensor.shape)
            if memory_format == "channels_last":
                data = data.permute(0, 2, 3, 1)
            part = data.contiguous().flatten()
            tensor.data = part_as_tensor(part, shape, memory_format)


@dataclass(frozen=True)
class _Outcome:
    """The result of a trial in one memory format."""

    logits: Tensor | None  # in evaluation mode; None if that failed
    failure: Exception | None  # the first, of evaluation or training


def choose_memory_format(
    module: EmbeddingModel, sample: Tensor, name: str, *, trains: bool
) -> MemoryFormat:
    """Return channels-last, or contiguous for a network that needs it.

    Code needs it that fails in the other format, as ``x.view(...)`` behind a
    convolution, or that returns other logits, as it does if it reads memory regardless
    of strides. ``trains``: Whether training is tried, too.
    """
    faster = _outcome(module, sample, "channels_last", trains=trains)
    if not (_has_images(module, sample) or faster.logits is None):
        return "channels_last"
    plain = _outcome(module, sample, "contiguous", trains=trains)
    if faster.logits is None and plain.logits is None:
        _raise(plain.failure, sample, name)
    if plain.logits is None or (plain.failure and not faster.failure):
        return "channels_last"
    if faster.logits is None or (faster.failure and not plain.failure):
        assert faster.failure is not None, "that is why"
        reason = f"fails ({_last_line(faster.failure)})"
    elif not _is_close(faster.logits, plain.logits, _ROUNDING):
        reason = "returns other logits"
    else:
        return "channels_last"
    log.warning(
        "%s %s in the memory format channels_last; images and convolutions lie in "
        "torch's default one instead, which is slower. Code takes either if it has "
        "reshape() or flatten() in place of view()",
        *(name, reason),
    )
    return "contiguous"


class _NoFormatError(OwnCodeError):
    """A network runs in no memory format."""


def _raise(failure: Exception | None, sample: Tensor, name: str) -> NoReturn:
    """Raise an error with the inputs on which a network failed."""
    if isinstance(failure, OwnCodeError):  # it has the lines of the user's file
        error = _NoFormatError(str(failure))
        error.reasons = failure.reasons
        raise error from failure
    raise _NoFormatError(
        f"{name} failed on inputs {sample.dtype} of shape {tuple(sample.shape)}: "
        f"{failure}"
    ) from failure


def _last_line(failure: Exception) -> str:
    return str(failure).strip().rpartition("\n")[2]


def _has_images(module: nn.Module, sample: Tensor) -> bool:
    """Return whether the memory formats differ for a network on such inputs."""
    tensors = (*module.parameters(), *module.buffers())
    plain = laid_out(sample, "contiguous")
    has_maps = any(tensor.dim() == 4 for tensor in tensors)
    return has_maps or plain.stride() != sample.stride()


def _outcome(
    module: EmbeddingModel,
    sample: Tensor,
    memory_format: MemoryFormat,
    *,
    trains: bool,
) -> _Outcome:
    arrange(module, memory_format)
    inputs = laid_out(sample, memory_format)
    logits: Tensor | None = None
    names = [name for name, *_ in _buffers(module)]
    try:
        with _kept(module, names):
            logits = _evaluated(module, inputs)
            if trains:
                _trained(module, inputs)
    except (*FAILURES, OwnCodeError) as error:
        return _Outcome(logits, error)
    return _Outcome(logits, None)


def _is_close(logits: Tensor, others: Tensor, tolerance: float) -> bool:
    """Return whether logits are equal up to a part of the largest."""
    if logits.shape != others.shape:
        return False
    # A network that has diverged may return NaN.
    logits, others = logits.nan_to_num(), others.nan_to_num()
    return bool((logits - others).abs().max() <= tolerance * others.abs().max())


# --- one pass


def _evaluated(module: EmbeddingModel, inputs: Tensor) -> Tensor:
    """Return the logits in evaluation mode."""
    module.eval()
    with torch.no_grad(), RandomKey(1).torch(), explained():
        logits: Tensor = module(inputs)
    return logits.clone()


def _trained(module: EmbeddingModel, inputs: Tensor) -> Tensor:
    """Return the logits in training mode, after a pass forwards and backwards."""
    module.train()
    with torch.enable_grad(), RandomKey(1).torch(), explained():
        logits: Tensor = module(inputs)
        if logits.requires_grad:
            logits.float().square().mean().backward()  # type: ignore[no-untyped-call]
    module.zero_grad()
    return logits.detach().clone()


@contextlib.contextmanager
def _kept(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Give these buffers their values back at the end."""
    before = [
        (owner._buffers, key, buffer, buffer.clone())
        for name, owner, key, buffer in _buffers(module)
        if name in names
    ]
    try:
        yield
    finally:
        for table, key, buffer, value in before:
            buffer.data.copy_(value)
            table[key] = buffer


@contextlib.contextmanager
def _undone(module: nn.Module) -> Iterator[None]:
    """Put buffers, parameters, layers, modes and other attributes back at the end."""
    before = [
        (table, dict(table))
        for layer in module.modules()
        for table in (layer._parameters, layer._buffers, layer._modules, vars(layer))
    ]
    names = [name for name, *_ in _buffers(module)]
    try:
        with _kept(module, names):
            yield
    finally:
        for table, entries in before:
            table.clear()
            table.update(entries)


def _buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield name, owner, key and tensor of each buffer."""
    for path, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                yield f"{path}.{key}".lstrip("."), owner, key, buffer


# --- state


def _require_complete(
    module: EmbeddingModel, parameters: Collection[str], name: str
) -> None:
    """Refuse a network that makes parameters while it runs: a worker lacks them."""
    if late := dict(module.named_parameters()).keys() - set(parameters):
        raise OwnCodeError(
            f"{name} makes the parameters {_listed(module, late)} in forward, expected "
            "all of them in __init__"
        )


def _require_stateless(
    module: EmbeddingModel,
    inputs: Tensor,
    others: Tensor,
    averaged: Collection[str],
    name: str,
) -> None:
    """Refuse a network that keeps state from pass to pass which no client sends.

    ``others``: Inputs of a pass between those that are compared. ``averaged``: The
    buffers that clients send.
    """
    # Their memory is held, so that no new tensor gets the same address.
    memory = {
        name: (parameter, parameter.data)
        for name, parameter in module.named_parameters()
    }
    first = require_constant_buffers(module, inputs, others, name)
    try:
        with _kept(module, averaged):
            _trained(module, inputs)
    except (*FAILURES, OwnCodeError):
        return  # it may need more than two examples to train
    before, attributes = _float_buffers(module), _others(module)
    outputs = []
    for run, batch in (
        *((_trained, inputs), (_trained, others), (_trained, inputs)),
        (_evaluated, inputs),
    ):
        with _kept(module, averaged):
            outputs.append(run(module, batch))
    names = {
        name
        for name, parameter in module.named_parameters()
        if name not in memory
        or parameter is not memory[name][0]
        or parameter.data_ptr() != memory[name][1].data_ptr()
    }
    if names:
        raise OwnCodeError(
            f"{name} assigns {_listed(module, names)} in forward, expected the "
            "parameters that __init__ made, which the optimizer trains: change values "
            "in place, as in self.weight.data.clamp_(-1, 1)"
        )
    once, _, again, last = outputs
    names = _changed(before, _float_buffers(module))  # those that are registered late
    if not (_is_close(once, again, _NOISE) and _is_close(first, last, _NOISE)):
        names |= _changed(attributes, _others(module))
    if names:
        raise OwnCodeError(
            f"{name} keeps {_listed(module, names)} from one pass to the next, and its "
            "output depends on that: clients of one process would share it, and the "
            "mean over clients lacks it. Expected state in parameters and float32 "
            "buffers, made in __init__ by self.register_buffer(...), and random "
            "numbers of torch"
        )


def require_constant_buffers(
    module: EmbeddingModel, inputs: Tensor, others: Tensor, name: str
) -> Tensor:
    """Return logits in evaluation mode; refuse buffers that change there.

    ``others``: Inputs of a further pass.
    """
    # Some networks make tensors at their first pass, such as positions.
    logits = _evaluated(module, inputs)
    before = _float_buffers(module)
    _evaluated(module, others)
    if names := _changed(before, _float_buffers(module)):
        raise OwnCodeError(
            f"{name} changes {_listed(module, names)} in evaluation mode, so that a "
            "prediction depends on earlier predictions; expected buffers that change "
            "in training alone: put the change behind `if self.training`"
        )
    return logits


def _listed(module: nn.Module, names: Collection[str]) -> str:
    # `SplitNetwork` adds it to the names of a user's network.
    prefix = "features." if isinstance(module, SplitNetwork) else ""
    return ", ".join(sorted(name.removeprefix(prefix) for name in names))


def _float_buffers(module: nn.Module) -> dict[str, Any]:
    """Return copies of the floating-point buffers."""
    return {
        name: buffer.clone()
        for name, *_, buffer in _buffers(module)
        if buffer.is_floating_point()
    }


def _others(module: nn.Module) -> dict[str, Any]:
    """Return copies of attributes that hold numbers, and of all other buffers."""
    copies = {
        name: buffer.clone()
        for name, owner, _, buffer in _buffers(module)
        if not (buffer.is_floating_point() or isinstance(owner, _NORMS))
    }
    for path, owner in module.named_modules():
        for key in vars(owner).keys() - _OF_MODULES:
            copies[f"{path}.{key}".lstrip(".")] = _copied(vars(owner)[key])
    return copies


def _copied(value: Any) -> Any:
    """Return a copy of a value as far as it consists of numbers and text."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "biuf" else None
    if isinstance(value, bool | int | float | complex | str):
        return value
    if isinstance(value, list | tuple | deque):
        return [_copied(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _copied(item) for key, item in value.items()}
    return None


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the names of new and of changed values."""
    return {
        name
        for name, value in after.items()
        if name not in before or not _is_same(before[name], value)
    }


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        if value.shape != other.shape:
            return False
        is_nan = (value != value) & (other != other)
        return bool(((value == other) | is_nan).all())
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and not _changed(value, other)
    return type(value) is type(other) and bool(value == other)

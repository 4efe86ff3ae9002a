"""A trial run of a user's or a library's network when it is built.

Clients of one process share the network, and run in another order on another engine. So
a pass may change only parameters and buffers, which are loaded before each client. The
trial rejects a network if its outputs depend on any other state. It also chooses the
memory format of images and convolutions with which the network's code works.
"""

import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from knnper.data.examples import TEXTS, InputSpec
from knnper.embedding_model import EmbeddingModel, MemoryFormat, laid_out
from knnper.errors import OwnCodeError
from knnper.flat_model import part_as_tensor
from knnper.own import explained
from knnper.seeding import RandomKey
from knnper.split_network import SplitNetwork

log = logging.getLogger(__name__)

# Errors of a network on inputs that it cannot take.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
# Tolerances as fractions of the largest logit: between memory formats, and between two
# runs of the same pass.
_ROUNDING = 1e-3
_NOISE = 1e-6


def try_out(
    module: EmbeddingModel, spec: InputSpec, name: str, *, is_users: bool
) -> None:
    """Set the module's memory format; reject state outside parameters and buffers.

    Runs a few random inputs and restores the module afterwards.

    Parameters
    ----------
    module
        The network, on the CPU.
    spec
        Its inputs.
    name
        Its name in messages.
    is_users
        Whether a user wrote it; it is then run in training mode too. A library's
        network is run only in evaluation mode, for its memory format.

    Raises
    ------
    OwnCodeError
        If it runs in no memory format, or has state that clients do not exchange.
    """
    samples = [_random_inputs(module, spec, seed) for seed in (0, 1)]
    buffers = _float_buffers(module).keys()
    parameters = dict(module.named_parameters()).keys()
    with _undone(module):
        try:
            chosen = choose_memory_format(module, samples[0], name, trains=is_users)
        except _NoFormatError:
            # A network may reject numbers that never occur in its data.
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


def arrange(module: nn.Module, memory_format: MemoryFormat) -> None:
    """Convert all four-dimensional tensors to a memory format."""
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

    A network needs contiguous memory if it fails in the other format, as with
    ``x.view(...)`` behind a convolution, or returns other logits because it reads
    memory regardless of strides. ``trains``: Whether training is tried, too.
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
        assert faster.failure is not None, "one of the two conditions"
        reason = f"fails ({_last_line(faster.failure)})"
    elif not _is_close(faster.logits, plain.logits, _ROUNDING):
        reason = "returns other logits"
    else:
        return "channels_last"
    log.warning(
        "%s %s in the memory format channels_last; using torch's default format, which "
        "is slower. To support both, replace view() by reshape() or flatten()",
        name,
        reason,
    )
    return "contiguous"


class _NoFormatError(OwnCodeError):
    """A network runs in no memory format."""


def _raise(failure: Exception | None, sample: Tensor, name: str) -> NoReturn:
    """Raise an error with the inputs on which a network failed."""
    if isinstance(failure, OwnCodeError):  # names the lines of the user's file
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
    """Return whether the memory formats differ for a network and its inputs."""
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
    """Return whether logits are equal up to a fraction of the largest."""
    if logits.shape != others.shape:
        return False
    # A diverged network may return NaN.
    logits, others = logits.nan_to_num(), others.nan_to_num()
    return bool((logits - others).abs().max() <= tolerance * others.abs().max())


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
    """Restore the values of the named buffers at the end of the block."""
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
    """Restore buffers, parameters, layers, modes and other attributes at the end."""
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


def _require_complete(
    module: EmbeddingModel, parameters: Collection[str], name: str
) -> None:
    """Reject a network that creates parameters in forward: a worker would lack them."""
    if late := dict(module.named_parameters()).keys() - set(parameters):
        raise OwnCodeError(
            f"{name} creates the parameters {_listed(module, late)} in forward; create "
            "all parameters in __init__"
        )


def _require_stateless(
    module: EmbeddingModel,
    inputs: Tensor,
    others: Tensor,
    averaged: Collection[str],
    name: str,
) -> None:
    """Reject a network that keeps state between passes that clients do not exchange.

    ``others``: Inputs of a pass between the compared passes. ``averaged``: The buffers
    that clients exchange.
    """
    # References keep the memory alive, so that no new tensor gets the same address.
    memory = {
        name: (parameter, parameter.data)
        for name, parameter in module.named_parameters()
    }
    first = require_constant_buffers(module, inputs, others, name)
    try:
        with _kept(module, averaged):
            _trained(module, inputs)
    except (*FAILURES, OwnCodeError):
        return  # the network may need more than two examples to train
    outputs = []
    for run, batch in (
        *((_trained, inputs), (_trained, others), (_trained, inputs)),
        (_evaluated, inputs),
    ):
        with _kept(module, averaged):
            outputs.append(run(module, batch))
    assigned = {
        name
        for name, parameter in module.named_parameters()
        if name not in memory
        or parameter is not memory[name][0]
        or parameter.data_ptr() != memory[name][1].data_ptr()
    }
    if assigned:
        raise OwnCodeError(
            f"{name} assigns {_listed(module, assigned)} in forward, but the optimizer "
            "trains the parameters that __init__ made: change values in place, as in "
            "self.weight.data.clamp_(-1, 1)"
        )
    once, _, again, last = outputs
    if not (_is_close(once, again, _NOISE) and _is_close(first, last, _NOISE)):
        raise OwnCodeError(
            f"{name} returns other outputs in a later pass on the same inputs: clients "
            "of one process would share the state behind it, and aggregation would "
            "not average it. Keep state in parameters and float32 buffers, made in "
            "__init__ by self.register_buffer(...), and take random numbers from torch"
        )


def require_constant_buffers(
    module: EmbeddingModel, inputs: Tensor, others: Tensor, name: str
) -> Tensor:
    """Return logits in evaluation mode; reject buffers that change in it.

    ``others``: Inputs of a further pass.
    """
    # Some networks create tensors in their first pass, such as positions.
    logits = _evaluated(module, inputs)
    before = _float_buffers(module)
    _evaluated(module, others)
    changed = [
        key
        for key, buffer in _float_buffers(module).items()
        if key not in before or not torch.equal(buffer, before[key])
    ]
    if changed:
        raise OwnCodeError(
            f"{name} changes {_listed(module, changed)} in evaluation mode, so that a "
            "prediction depends on earlier predictions; change buffers only in "
            "training mode, after `if self.training`"
        )
    return logits


def _listed(module: nn.Module, names: Collection[str]) -> str:
    # `SplitNetwork` adds this prefix to the names of a user's network.
    prefix = "features." if isinstance(module, SplitNetwork) else ""
    return ", ".join(sorted(name.removeprefix(prefix) for name in names))


def _float_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the floating-point buffers."""
    return {
        name: buffer.clone()
        for name, *_, buffer in _buffers(module)
        if buffer.is_floating_point()
    }

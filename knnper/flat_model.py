"""A model with all its weights in one flat vector, the form that clients exchange."""

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knnper.data.examples import InputSpec
from knnper.embedding_model import EmbeddingModel, MemoryFormat, laid_out
from knnper.errors import OwnCodeError
from knnper.layers import FoldingSequential
from knnper.trained_layers import frozen_fingerprint, trained_tensors

# cuDNN's BatchNorm reads tensors from addresses that are multiples of this, in bytes.
_BOUNDARY = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorSlice:
    """Position of one tensor of the model in the flat vector."""

    name: str  # as in ``state_dict``
    shape: tuple[int, ...]  # of the tensor
    # Its slice of the flat vector.
    start: int
    stop: int
    is_parameter: bool  # false for a buffer such as BatchNorm's running mean
    # The module that owns it; methods choose by its type, never by its name.
    module: nn.Module

    @property
    def key(self) -> str:
        """Name of the tensor in the module that owns it."""
        return self.name.rpartition(".")[2]

    @property
    def tensor(self) -> Tensor:
        """The tensor of the module."""
        tensor: Tensor = getattr(self.module, self.key)
        return tensor


@dataclass(frozen=True)
class _Tied:
    """A tensor of the module that is a view of the vector."""

    entry: TensorSlice
    # The module's own table of parameters or of buffers.
    table: dict[str, Any]
    tensor: Tensor
    address: int

    @property
    def is_in_place(self) -> bool:
        """Whether the module still holds this tensor at this address."""
        present = self.table.get(self.entry.key)
        return present is self.tensor and self.tensor.data_ptr() == self.address


@dataclass(frozen=True)
class _Constant:
    """A buffer that is not averaged, such as a counter, and its first value."""

    table: dict[str, Any]  # of the buffers of the module that owns it
    key: str
    buffer: Tensor
    value: Tensor

    def restore(self) -> None:
        """Put the buffer with its first value back into the module."""
        self.buffer.copy_(self.value)
        self.table[self.key] = self.buffer


class FlatModel:
    """A model that keeps its parameters in one vector, and its gradients in another.

    In the vector of all weights parameters come first, in their order in the model,
    then the floating-point buffers. Other buffers, such as counters, are not averaged
    between clients: `load` resets them to their values when the model was built.
    Four-dimensional tensors lie in the vector in the module's ``memory_format``, by
    default channels-last, the layout in which convolutions train fastest.
    """

    def __init__(
        self, module: EmbeddingModel, device: torch.device = torch.device("cpu")
    ) -> None:
        self.module = module.to(device)
        self.device = device
        self.entries = _layout(module)
        if not any(entry.is_parameter for entry in self.entries):
            raise OwnCodeError(
                "the model has no parameter to train, expected at least one that "
                "requires a gradient; choose another model or another model.trained"
            )
        self.num_parameters = sum(
            entry.stop - entry.start for entry in self.entries if entry.is_parameter
        )
        # d, the length of the flat vector.
        self.num_weights = self.entries[-1].stop
        # Parameters and buffers lie in separate memory, since cuDNN's BatchNorm reads
        # statistics four at a time, from addresses that are multiples of 16 bytes.
        num_buffers = self.num_weights - self.num_parameters
        # The module's tensors are views of this one, so that an optimizer of this one
        # tensor trains the whole model; ``backward`` fills its ``.grad``.
        self.parameters = nn.Parameter(torch.empty(self.num_parameters, device=device))
        self.parameters.grad = torch.zeros(self.num_parameters, device=device)
        # The module's buffers are views of this one.
        self._buffers = torch.empty(num_buffers, device=device)
        self._tied: list[_Tied] = []
        self._constants = list(_unaveraged_buffers(module))
        # Each trained tensor with its part of the gradient.
        self._slopes: list[tuple[Tensor, Tensor]] = []
        self._shown: tuple[Tensor, int] | None = None
        self._folding = [
            part for part in module.modules() if isinstance(part, FoldingSequential)
        ]
        # CUDA graphs of recorded passes; `LocalModel` fills and uses them.
        self.recorded: dict[Hashable, Any] = {}
        # SHA-256 of the weights outside the vector; empty if there are none.
        self.frozen = frozen_fingerprint(module)
        self._tie()
        if device.type == "cuda" and _has_norms_off_boundaries(module):
            # cuDNN would fail with "misaligned address", and so would every later
            # computation of this process on the GPU.
            torch.backends.cudnn.enabled = False
            log.warning(
                "found a BatchNorm that cuDNN cannot read, since the number of "
                "parameters before it is no multiple of four: training runs without "
                "cuDNN and is slower. Make all widths multiples of four"
            )

    def normalizer(self, spec: InputSpec) -> Callable[[Tensor], Tensor]:
        """Return the module's normalizer, with results in its memory format."""
        normalize = self.module.normalizer(spec, self.device)
        if self.module.memory_format == "channels_last":
            return normalize
        return lambda stored: laid_out(normalize(stored), "contiguous")

    @property
    def gradient(self) -> Tensor:
        """The gradient of `parameters`, shape (num_parameters,), filled in place.

        It lies on `device`, as `parameters` do.
        """
        gradient = self.parameters.grad
        assert gradient is not None, "set in the constructor and never removed"
        return gradient

    def load(self, weights: Tensor) -> None:
        """Copy ``weights``, shape (num_weights,), into the model, to its device."""
        if weights.shape != (self.num_weights,):
            raise ValueError(
                f"expected {self.num_weights} weights for this model, found a tensor "
                f"of shape {tuple(weights.shape)}; it belongs to another architecture"
            )
        self._shown = None
        self._fold(False)
        buffers = self.buffers
        self.parameters.detach().copy_(weights[: self.num_parameters])
        buffers.copy_(weights[self.num_parameters :])
        for constant in self._constants:
            constant.restore()

    def show(self, weights: Tensor) -> None:
        """Load ``weights`` for inference, unless the model holds them already.

        Layers that can be folded, such as BatchNorm into a convolution, are folded.
        """
        # The version is torch's count of changes in place.
        version = weights._version
        last = self._shown
        if last is None or last[0] is not weights or last[1] != version:
            self.load(weights)
            self._fold(True)
            self._shown = (weights, version)

    def _fold(self, folds: bool) -> None:
        for layer in self._folding:
            layer.fold(folds)

    @property
    def buffers(self) -> Tensor:
        """The weights that are no parameters, shape (num_weights - num_parameters,).

        They are the module's own memory. A buffer that ``forward`` assigns
        (``self.mean = ...``) is copied into it.
        """
        for tied in self._tied:
            if not (tied.entry.is_parameter or tied.is_in_place):
                self._take_back(tied)
        return self._buffers

    def _take_back(self, tied: _Tied) -> None:
        """Copy an assigned buffer into its part of the vector, and tie it again."""
        present, entry = tied.table.get(entry_key := tied.entry.key), tied.entry
        if (
            not isinstance(present, Tensor)
            or tuple(present.shape) != entry.shape
            or not present.is_floating_point()
        ):
            kind = type(present).__name__
            if isinstance(present, Tensor):
                kind = f"{tuple(present.shape)} of {present.dtype}"
            raise OwnCodeError(
                f"forward assigned {kind} to the buffer {entry.name}, expected numbers "
                f"of float32 in the shape {entry.shape} that it was built with"
            )
        view = self._view(self._buffers, entry, before=self.num_parameters)
        view.copy_(present.detach())
        tied.tensor.data = view
        tied.table[entry_key] = tied.tensor

    def read(self) -> Tensor:
        """Return a copy of the weights on the CPU, shape (num_weights,)."""
        for tied in self._tied:
            if tied.entry.is_parameter and not tied.is_in_place:
                raise OwnCodeError(
                    f"forward assigned another tensor to the parameter "
                    f"{tied.entry.name}, expected the tensor that the optimizer trains:"
                    " change its values in place, as in self.weight.data.clamp_(-1, 1)"
                )
        return torch.cat([self.parameters.detach(), self.buffers]).cpu()

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """Return ``weights`` as contiguous tensors by their ``state_dict`` names."""
        return {
            entry.name: self._view(weights, entry).contiguous()
            for entry in self.entries
        }

    def flatten(
        self, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the flat vector of named tensors; the inverse of `named`."""
        weights = torch.empty(self.num_weights, dtype=dtype)
        for entry in self.entries:
            tensor = tensors.get(entry.name)
            if tensor is None or tuple(tensor.shape) != entry.shape:
                description = (
                    "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
                )
                raise ValueError(
                    f"expected {entry.name!r} with shape {entry.shape}, "
                    f"found {description}"
                )
            self._view(weights, entry).copy_(tensor)
        return weights

    def mask(self, chosen: Callable[[nn.Module], bool]) -> Tensor:
        """Mark the weights of modules that ``chosen`` accepts, bool (num_weights,)."""
        mask = torch.zeros(self.num_weights, dtype=torch.bool)
        for entry in self.entries:
            mask[entry.start : entry.stop] = chosen(entry.module)
        return mask

    @contextlib.contextmanager
    def freezing(self, trainable: Tensor) -> Iterator[None]:
        """Skip gradients of frozen tensors, inside a ``with`` block.

        A tensor without any ``trainable`` weight, bool of shape (num_weights,), gets no
        gradient. A module and all below it, dropout included, are set to evaluation
        mode if this subtree has frozen tensors and no others. Recurrent layers stay in
        training mode.
        """
        trained_entries, frozen = list[TensorSlice](), list[TensorSlice]()
        for entry in self.entries:
            is_chosen = bool(trainable[entry.start : entry.stop].any())
            (trained_entries if is_chosen else frozen).append(entry)
        tensors = (entry.tensor for entry in frozen)
        parameters = [tensor for tensor in tensors if tensor.requires_grad]
        fixed, trained = (
            {entry.module for entry in part} for part in (frozen, trained_entries)
        )
        # cuDNN has no backward pass through a recurrent layer in evaluation mode.
        modules = [
            module
            for module in _fixed_subtrees(self.module, fixed, trained)
            if module.training and not isinstance(module, nn.RNNBase)
        ]
        try:
            for tensor in parameters:
                tensor.requires_grad_(False)
            for module in modules:
                module.training = False
            yield
        finally:
            for tensor in parameters:
                tensor.requires_grad_(True)
            for module in modules:
                module.training = True

    @property
    def tensors(self) -> list[Tensor]:
        """The module's tensors that get a gradient now: parts of `parameters`."""
        return [tensor for tensor, _ in self._slopes if tensor.requires_grad]

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Split a vector of the shape of `parameters` into the parts of each tensor."""
        return [vector[e.start : e.stop] for e in self.entries if e.is_parameter]

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Give each tensor a gradient of its own, inside a ``with`` block.

        `gradient` is not filled: adding to it takes a tenth of a small model's step.
        """
        try:
            for tensor, _ in self._slopes:
                tensor.grad = None
            yield
        finally:
            for tensor, part in self._slopes:
                tensor.grad = part

    def _tie(self) -> None:
        """Make every tensor of the module a view into the flat vectors."""
        for entry in self.entries:
            tensor, owner = entry.tensor, entry.module
            if entry.is_parameter:
                view = self._view(self.parameters.detach(), entry)
            else:
                view = self._view(self._buffers, entry, before=self.num_parameters)
            with torch.no_grad():
                view.copy_(tensor)
            tensor.data = view
            table = owner._parameters if entry.is_parameter else owner._buffers
            self._tied.append(_Tied(entry, table, tensor, tensor.data_ptr()))
            if entry.is_parameter:
                tensor.grad = self._view(self.gradient, entry)
                self._slopes.append((tensor, tensor.grad))

    def _view(self, vector: Tensor, entry: TensorSlice, before: int = 0) -> Tensor:
        """View a tensor's part of a vector that lacks ``before`` weights at its start.

        It has the tensor's shape and the module's memory format.
        """
        part = vector[entry.start - before : entry.stop - before]
        return part_as_tensor(part, entry.shape, self.module.memory_format)


def _layout(module: nn.Module) -> tuple[TensorSlice, ...]:
    owners = dict(module.named_modules())
    entries, start = [], 0
    for name, tensor, is_parameter in trained_tensors(module):
        _require_float32(name, tensor, is_parameter)
        stop = start + tensor.numel()
        owner = owners[name.rpartition(".")[0]]
        shape = tuple(tensor.shape)
        entries.append(TensorSlice(name, shape, start, stop, is_parameter, owner))
        start = stop
    return tuple(entries)


def _require_float32(name: str, tensor: Tensor, is_parameter: bool) -> None:
    """Reject a tensor that the vector of weights would convert to float32."""
    if tensor.dtype != torch.float32:
        kind = "parameter" if is_parameter else "buffer"
        raise OwnCodeError(
            f"the {kind} {name} of the model is {tensor.dtype}, expected "
            "torch.float32, in which weights are trained, sent and kept: call .float() "
            "on the network and do not convert inputs; training.precision: bfloat16 "
            "runs passes in fewer bits"
        )


def _unaveraged_buffers(module: nn.Module) -> Iterator[_Constant]:
    """Yield the buffers that are not floating-point and affect results.

    BatchNorm's count of batches does not, unless its statistics are cumulative.
    """
    for layer in module.modules():
        is_norm = isinstance(layer, nn.modules.batchnorm._NormBase)
        counts = is_norm and layer.momentum is not None
        for key, buffer in layer._buffers.items():
            if buffer is None or buffer.is_floating_point():
                continue
            if not (counts and key == "num_batches_tracked"):
                yield _Constant(layer._buffers, key, buffer, buffer.clone())


def _fixed_subtrees(
    module: nn.Module, fixed: set[nn.Module], trained: set[nn.Module]
) -> set[nn.Module]:
    """Return the modules of all subtrees with frozen weights and no trained weights."""
    below = set(module.modules())
    if below & fixed and not below & trained:
        return below
    parts = (_fixed_subtrees(part, fixed, trained) for part in module.children())
    return set[nn.Module]().union(*parts)


def _has_norms_off_boundaries(module: nn.Module) -> bool:
    """Return whether cuDNN cannot read the tensors of some BatchNorm where they lie."""
    return any(
        tensor.data_ptr() % _BOUNDARY
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
        for tensor in (*layer.parameters(), *layer.buffers())
        if tensor.is_floating_point()
    )


def part_as_tensor(
    part: Tensor, shape: tuple[int, ...], memory_format: MemoryFormat
) -> Tensor:
    """View a part of a vector as a tensor of a shape and memory format."""
    if len(shape) != 4 or memory_format == "contiguous":
        return part.view(shape)
    out_channels, in_channels, height, width = shape
    return part.view(out_channels, height, width, in_channels).permute(0, 3, 1, 2)

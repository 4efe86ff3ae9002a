"""A model whose weights are one flat vector, loaded and read with a single copy."""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from knnper.data.examples import KINDS_OF_INPUT, InputSpec
from knnper.errors import ConfigError, Problem
from knnper.experiment import Settings


@dataclass(frozen=True)
class ModelSettings(Settings):
    """What can be set for every model.

    Attributes
    ----------
    weights
        Path of a local ``.safetensors`` file to start from, its tensors named as in
        the model's ``state_dict``; null starts from random weights. A head for another
        number of classes is left out.
    """

    weights: str | None = None


class EmbeddingModel(nn.Module):
    """A classifier split into φ (the representation) and the head.

    Attributes
    ----------
    embedding_dim
        p, the size of the representation.
    num_classes
        c, the number of labels.
    features
        What `embed` calls, unless a model has another one.
    classifier
        The layers of the head, from (n, p) to logits (n, c). Whatever lies outside
        belongs to φ.
    published_head
        What files from elsewhere may call the head instead of ``classifier``.
    learns_from_embeddings
        Whether `losses` depends on the inputs through φ(x) alone.
    """

    embedding_dim: int
    num_classes: int
    features: nn.Module
    classifier: nn.Module
    published_head: str = "classifier"
    learns_from_embeddings: bool = True

    def embed(self, x: Tensor) -> Tensor:
        """Return φ(x), float32 of shape (n, p); by default what ``features`` returns.

        Parameters
        ----------
        x
            Normalised images, float32 of shape (n, channels, height, width); of text
            ids, int64 of shape (n, T, 1, 1).
        """
        embeddings: Tensor = self.features(x)
        return embeddings

    def head(self, z: Tensor) -> Tensor:
        """Return the logits, float32 of shape (n, c), of representations (n, p)."""
        logits: Tensor = self.classifier(z)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of ``x``, shape (n, c)."""
        return self.head(self.embed(x))

    def losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return what training minimises the mean of, of each example: -log h(x)[y].

        Parameters
        ----------
        inputs
            As `embed` takes them, n of them.
        labels
            int64, shape (n,).

        Returns
        -------
        Tensor
            float32, shape (n,).
        """
        return self.position_losses(inputs, labels).mean(dim=1)

    def position_losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return -log h(x)[y] of each prediction that `losses` is the mean of.

        Returns
        -------
        Tensor
            float32, shape (n, T) for T predictions an example: one, of the label.
        """
        logits = self(inputs).float()
        return functional.cross_entropy(logits, labels, reduction="none")[:, None]


@dataclass(frozen=True)
class Entry:
    """Where one tensor of the model lies in the flat vector.

    Attributes
    ----------
    name
        As in ``state_dict``.
    shape
        Of the tensor.
    start, stop
        Its slice of the flat vector.
    is_parameter
        False for a buffer such as BatchNorm's running mean.
    module
        The module that owns it; methods choose by its type, never by its name.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    is_parameter: bool
    module: nn.Module


class FlatModel:
    """A model that keeps all its weights in one vector, and its gradients in another.

    Parameters come first, in their order in the model, then the floating-point
    buffers. Counters (BatchNorm's ``num_batches_tracked``) are left out: they are not
    averaged between clients. Four-dimensional tensors lie channels-last inside the
    vector, the layout in which convolutions train fastest.
    """

    def __init__(
        self, module: EmbeddingModel, device: torch.device = torch.device("cpu")
    ) -> None:
        self.module = module.to(device)
        self.device = device
        self.entries = _layout(module)
        self.num_parameters = sum(
            entry.stop - entry.start for entry in self.entries if entry.is_parameter
        )
        self._vector = torch.empty(self.entries[-1].stop, device=device)
        self._parameters = nn.Parameter(self._vector[: self.num_parameters])
        self._parameters.grad = torch.zeros(self.num_parameters, device=device)
        self._shown: tuple[Tensor, int] | None = None
        self._tie()

    @property
    def num_weights(self) -> int:
        """d, the length of the flat vector."""
        return int(self._vector.shape[0])

    @property
    def parameters(self) -> nn.Parameter:
        """The trainable part as one parameter of shape (num_parameters,).

        It shares memory with the module, so an optimizer that is given this one
        tensor trains the whole model; ``.grad`` is filled by ``backward``.
        """
        return self._parameters

    @property
    def buffers(self) -> Tensor:
        """The rest of the weights, shape (num_weights - num_parameters,).

        The module's own memory, on `device`.
        """
        return self._vector[self.num_parameters :]

    @property
    def gradient(self) -> Tensor:
        """The gradient of `parameters`, shape (num_parameters,), filled in place.

        It lies on `device`, as `parameters` do.
        """
        gradient = self._parameters.grad
        assert gradient is not None, "set in the constructor and never removed"
        return gradient

    def load(self, weights: Tensor) -> None:
        """Copy ``weights``, shape (num_weights,), into the model, to its device."""
        if weights.shape != self._vector.shape:
            raise ValueError(
                f"expected {self.num_weights} weights for this model, found a tensor "
                f"of shape {tuple(weights.shape)}; it belongs to another architecture"
            )
        self._shown = None
        self._vector.copy_(weights)

    def show(self, weights: Tensor) -> None:
        """Load ``weights`` to be used as they are."""
        # The version is torch's count of the changes that were made in place.
        wanted = (weights, weights._version)
        if self._shown is None or not (
            self._shown[0] is weights and self._shown[1] == weights._version
        ):
            self.load(weights)
            self._shown = wanted

    def read(self) -> Tensor:
        """Return a copy of the weights on the CPU, shape (num_weights,)."""
        return self._vector.to("cpu", copy=True)

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """Return ``weights`` as contiguous tensors by their ``state_dict`` names."""
        return {
            entry.name: _view(weights, entry).contiguous() for entry in self.entries
        }

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the flat vector of named tensors; the inverse of `named`."""
        weights = torch.empty(self.num_weights, dtype=torch.float32)
        for entry in self.entries:
            found = tensors.get(entry.name)
            if found is None or tuple(found.shape) != entry.shape:
                what = "nothing" if found is None else f"shape {tuple(found.shape)}"
                raise ValueError(
                    f"expected {entry.name!r} with shape {entry.shape}, found {what}"
                )
            _view(weights, entry).copy_(found)
        return weights

    def mask(self, chosen: Callable[[nn.Module], bool]) -> Tensor:
        """Return which weights belong to the modules that ``chosen`` accepts.

        Returns
        -------
        Tensor
            bool, shape (num_weights,).
        """
        mask = torch.zeros(self.num_weights, dtype=torch.bool)
        for entry in self.entries:
            mask[entry.start : entry.stop] = chosen(entry.module)
        return mask

    @contextlib.contextmanager
    def freezing(self, trainable: Tensor) -> Iterator[None]:
        """Spare the backward pass what is not trained, inside a ``with`` block.

        Parameters
        ----------
        trainable
            bool, shape (num_weights,). A tensor of which nothing is chosen gets no
            gradient. A module is in evaluation mode if it, and what lies below it, has
            such tensors and no others; then all below it is too, dropout as well.
            Recurrent layers alone stay as they are.
        """
        chosen = [
            bool(trainable[entry.start : entry.stop].any()) for entry in self.entries
        ]
        frozen = list(itertools.compress(self.entries, map(operator.not_, chosen)))
        kept = {entry.module for entry in itertools.compress(self.entries, chosen)}
        owners = dict(self.module.named_modules())
        tensors = [_tensor_of(owners, entry.name) for entry in frozen]
        parameters = [tensor for tensor in tensors if tensor.requires_grad]
        fixed = {entry.module for entry in frozen}
        still = _fixed_subtrees(self.module, fixed, kept)
        # cuDNN has no backward pass through a recurrent layer in evaluation mode.
        modules = [
            module
            for module in still
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

    def _tie(self) -> None:
        """Make every tensor of the module a view into the flat vectors."""
        owners = dict(self.module.named_modules())
        for entry in self.entries:
            tensor = _tensor_of(owners, entry.name)
            view = _view(self._vector, entry)
            with torch.no_grad():
                view.copy_(tensor)
            tensor.data = view
            if entry.is_parameter:
                tensor.grad = _view(self.gradient, entry)


def _tensor_of(owners: Mapping[str, nn.Module], name: str) -> Tensor:
    """Return the tensor of a module that has this ``state_dict`` name."""
    owner_name, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(owners[owner_name], attribute)
    return tensor


def _fixed_subtrees(
    module: nn.Module, fixed: set[nn.Module], trained: set[nn.Module]
) -> set[nn.Module]:
    """Return the modules of all subtrees that have fixed weights and no others."""
    below = set(module.modules())
    if below & fixed and not below & trained:
        return below
    parts = (_fixed_subtrees(part, fixed, trained) for part in module.children())
    return set[nn.Module]().union(*parts)


def _layout(module: nn.Module) -> tuple[Entry, ...]:
    owners = dict(module.named_modules())
    tensors: list[tuple[str, Tensor, bool]] = [
        (name, tensor, True) for name, tensor in module.named_parameters()
    ]
    tensors += [
        (name, tensor, False)
        for name, tensor in module.named_buffers()
        if tensor.is_floating_point()
    ]
    entries, start = [], 0
    for name, tensor, is_parameter in tensors:
        stop = start + tensor.numel()
        owner = owners[name.rpartition(".")[0]]
        shape = tuple(tensor.shape)
        entries.append(Entry(name, shape, start, stop, is_parameter, owner))
        start = stop
    return tuple(entries)


def _view(vector: Tensor, entry: Entry) -> Tensor:
    part = vector[entry.start : entry.stop]
    if len(entry.shape) != 4:
        return part.view(entry.shape)
    out_channels, in_channels, height, width = entry.shape
    return part.view(out_channels, height, width, in_channels).permute(0, 3, 1, 2)


def require_input(spec: InputSpec, model: str, *, holds: bool, expected: str) -> None:
    """Refuse inputs that are not what a model takes."""
    if not holds:
        height, width, channels = spec.image_shape
        found = (
            f"{height}x{width} with {channels} channels, {KINDS_OF_INPUT[spec.dtype]}"
        )
        message = f"{model} takes {expected}, found {found}"
        advice = "choose another model or data set"
        raise ConfigError([Problem("model", f"{message}; {advice}")])


def require_multiple(spec: InputSpec, factor: int, model: str) -> None:
    """Refuse images whose height or width is not a positive multiple of ``factor``."""
    height, width, _ = spec.image_shape
    holds = min(height, width) >= factor and height % factor == width % factor == 0
    expected = f"images whose height and width are multiples of {factor}"
    require_input(spec, model, holds=holds, expected=expected)


def require_channels(spec: InputSpec, model: str) -> None:
    """Refuse images that are neither grey nor of three colours."""
    holds = spec.image_shape[2] in (1, 3)
    require_input(spec, model, holds=holds, expected="images with 1 or 3 channels")

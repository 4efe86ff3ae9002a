"""A network as methods use it: a representation φ and a head, with its settings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from knnper.data.examples import KINDS_OF_INPUT, InputDtype, InputSpec
from knnper.data.normalization import normalizer
from knnper.errors import ConfigError, OwnCodeError, Problem
from knnper.own import explained
from knnper.settings import PositiveFloat, PositiveInt, ProperFraction, Settings

MemoryFormat = Literal["channels_last", "contiguous"]


@dataclass(frozen=True)
class LoraSettings(Settings):
    """Settings of LoRA: W + (α / r) B A replaces W, and only A and B are trained.

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2022.

    Attributes
    ----------
    rank
        r, the number of rows of A.
    alpha
        α; the adapter's output is scaled by α / r.
    dropout
        Probability of dropping an input of A in training.
    targets
        Suffixes of the adapted layers' names, as ``query``; null: every linear layer
        and 1x1 convolution of the representation.
    """

    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    dropout: ProperFraction = 0.0
    targets: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ModelSettings(Settings):
    """Settings of every model.

    Attributes
    ----------
    weights
        Path of a local file with initial weights: of safetensors or ``torch.save``,
        with the names of the model's ``state_dict``, with or without a prefix; or of a
        model that this project wrote: its folder, or the ``model.safetensors`` in it.
        Files in a list are loaded in turn. Null: random weights. A head for another
        number of classes is not loaded.
    trained
        Layers that clients train, send and store: ``all``, the ``head``, the
        ``last_blocks`` with the head, or adapters beside frozen layers (``lora``) with
        the head. Frozen layers stay in evaluation mode.
    num_blocks
        Number of last blocks that ``last_blocks`` trains.
    lora
        See `LoraSettings`; used with ``trained: lora``.
    frozen
        SHA-256 of the frozen weights, which every client must have; a run sets it.
    memory_format
        Layout of images and convolutions in memory, in torch's terms: the faster
        ``channels_last``, or ``contiguous``. A run sets it for networks of users and of
        libraries: ``contiguous`` where the network fails with the other.
    """

    weights: str | tuple[str, ...] | None = None
    trained: Literal["all", "head", "last_blocks", "lora"] = "all"
    num_blocks: PositiveInt = 1
    lora: LoraSettings = LoraSettings()
    frozen: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    memory_format: MemoryFormat | None = None


@dataclass(frozen=True)
class OwnModelSettings(ModelSettings):
    """Settings of your own network beside its own parameters.

    Attributes
    ----------
    representation
        Module with the representation as output, as ``features.18``; null: the input of
        the last linear layer, which is then the head. A map is averaged over its
        positions, and a new linear layer is the head. Layers behind it are removed.
    """

    representation: str | None = None


class Criterion:
    """The training loss: cross-entropy of each example."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example, (n,), from logits (n, c)."""
        return functional.cross_entropy(logits, labels, reduction="none")

    def require_one_each(self) -> None:
        """Raise `OwnCodeError` if the loss cannot be weighted by example."""


class OwnLoss(Criterion):
    """A user's loss ``(logits, labels) ->`` loss of each example, or their mean."""

    def __init__(self, name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._name = name
        self._function = function
        self._is_mean = False

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example, (n,); for a mean, the mean n times."""
        try:
            with explained():
                loss = self._function(logits, labels)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise OwnCodeError(
                f"{self._name} failed on logits {tuple(logits.shape)} and labels "
                f"{tuple(labels.shape)} of {labels.dtype}: {error}"
            ) from error
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss)
        if shape not in ((), tuple(labels.shape)):
            raise OwnCodeError(
                f"{self._name} returned {shape} of logits {tuple(logits.shape)}, "
                f"expected a tensor of shape {tuple(labels.shape)}, or their mean"
            )
        if logits.requires_grad and not loss.requires_grad:
            raise OwnCodeError(
                f"{self._name} returned {loss.dtype} without a gradient, expected a "
                "loss with one: look for a detach(), item() or argmax() on the way"
            )
        self._is_mean = shape == ()
        return loss.expand(len(labels)) if self._is_mean else loss

    @override
    def require_one_each(self) -> None:
        if self._is_mean:
            raise OwnCodeError(
                f"{self._name} returns a mean, but the method or "
                "training.class_weights weights examples; expected the loss of each "
                "example, shape (n,)"
            )


class EmbeddingModel(nn.Module):
    """A classifier split into φ (the representation) and the head.

    Attributes
    ----------
    embedding_dim
        p, the size of the representation.
    num_classes
        c, the number of labels.
    features
        Layers of φ that `embed` calls, unless a subclass overrides it.
    classifier
        The layers of the head, from (n, p) to logits (n, c). All other layers belong
        to φ.
    published_head
        Name of the head in published weight files, where it is not ``classifier``.
    learns_from_embeddings
        Whether `losses` depends on the inputs only through φ(x).
    criterion
        The loss of each example, from logits (n, c) and labels (n,).
    trained
        Modules that own the trained tensors; None: all modules.
    described
        Text that the fingerprint of frozen weights includes, such as the revision of a
        library's network.
    replayable
        Whether a training step runs the same operations for all values, without state
        in Python, so that a GPU may record it once and repeat it.
    memory_format
        Memory layout of four-dimensional inputs and weights.
    """

    embedding_dim: int
    num_classes: int
    features: nn.Module
    classifier: nn.Module
    published_head: str = "classifier"
    learns_from_embeddings: bool = True
    criterion: Criterion = Criterion()
    trained: frozenset[nn.Module] | None = None
    described: str = ""
    replayable: bool = False
    memory_format: MemoryFormat = "channels_last"

    @property
    def body_is_frozen(self) -> bool:
        """Whether only the head is trained, so that φ is the same in every round."""
        return self.trained is not None and self.trained <= {*self.classifier.modules()}

    def normalizer(
        self, spec: InputSpec, device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """Return a function from stored inputs (n, h, w, ch) to inputs of `embed`."""
        return normalizer(spec, device)

    def train(self, mode: bool = True) -> Self:
        """Set training mode, except for frozen modules."""
        super().train(mode)
        if mode and self.trained is not None:
            trained = {
                module
                for module in self.modules()
                if self.trained & {*module.modules()}
            }
            for module in self.modules():
                module.training = module in trained
        return self

    def embed(self, x: Tensor) -> Tensor:
        """Return φ(x), float32 of shape (n, p); by default the output of ``features``.

        ``x`` are normalised images, float32 of shape (n, channels, height, width), or
        ids of text, int64 of shape (n, T, 1, 1).
        """
        embeddings: Tensor = self.features(x)
        return embeddings

    def head(self, z: Tensor) -> Tensor:
        """Return the logits, float32 of shape (n, c), of representations (n, p)."""
        logits: Tensor = self.classifier(z)
        return logits

    def losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example, -log h(x)[y] by default, float32 (n,).

        Training minimises their mean. ``inputs`` as in `embed`, ``labels`` int64 (n,).
        """
        losses = self.position_losses(inputs, labels)
        return losses.mean(dim=1) if losses.shape[1] > 1 else losses.squeeze(1)

    def position_losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each prediction, (n, T) for T predictions per example.

        `losses` is their mean over T. Here T is 1: the prediction of the label.
        """
        return self.criterion(self(inputs).float(), labels)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of ``x``, shape (n, c)."""
        return self.head(self.embed(x))


class Network(EmbeddingModel):
    """Base of the models that can be chosen by name.

    Built from ``(settings, spec)``, with random weights from torch's generator.

    Attributes
    ----------
    name
        Name in experiments.
    title, summary
        Name and description in documentation.
    settings_type
        Settings of the section ``model`` of an experiment.
    takes
        The types of inputs that it accepts.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    settings_type: ClassVar[type[ModelSettings]]
    takes: ClassVar[tuple[InputDtype, ...]] = ("uint8", "float32")

    def __init__(self, settings: Any, spec: InputSpec) -> None:  # noqa: ARG002
        super().__init__()
        self.num_classes = spec.num_classes


def require_input(spec: InputSpec, model: str, *, holds: bool, expected: str) -> None:
    """Raise `ConfigError` unless a model accepts the inputs."""
    if not holds:
        height, width, channels = spec.image_shape
        message = (
            f"{model} takes {expected}, found {height}x{width} with {channels} channels"
            f", {KINDS_OF_INPUT[spec.dtype]}; choose another model or data set"
        )
        raise ConfigError([Problem("model", message)])


def laid_out(inputs: Tensor, memory_format: MemoryFormat) -> Tensor:
    """Return inputs of a model in its memory format.

    A contiguous tensor is rebuilt so that sides of length 1 have canonical strides too:
    torch derives the memory format of results from them.
    """
    if memory_format == "channels_last":
        return inputs
    return inputs.contiguous().flatten().view(inputs.shape)

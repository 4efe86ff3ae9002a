"""Pretrained networks of torchvision, timm and transformers.

Each has its own image size and normalisation. Nothing is downloaded unless
``download`` is true.
"""

import json
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from knnper.data.examples import InputDtype, InputSpec
from knnper.embedding_model import Network, OwnModelSettings
from knnper.errors import ConfigError, Problem
from knnper.process import import_extra, import_torchvision
from knnper.settings import PositiveInt, nearest
from knnper.split_network import NAME_IT, natural, split
from knnper.weight_files import (
    SUFFIXES,
    as_names,
    is_file_name,
    load_tensors,
    load_weights,
)

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Entries of a configuration about its file, not about the network.
_OF_THE_FILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


@dataclass(frozen=True, kw_only=True)
class PretrainedSettings(OwnModelSettings):
    """Settings of every network of a library.

    Attributes
    ----------
    architecture
        The library's name for it.
    image_size
        Height and width to which images are resized, in pixels; null: the size that the
        library states.
    download
        Whether the library may download missing files.
    """

    architecture: str
    image_size: PositiveInt | None = None
    download: bool = False


class Images(NamedTuple):
    """The form of images that a network was trained on."""

    size: int  # height and width, pixels
    mean: tuple[float, ...]  # per colour, of values in [0, 1]
    std: tuple[float, ...]


class Resized:
    """Brings stored images to the size, colours and normalisation of a network."""

    def __init__(self, form: Images, device: torch.device) -> None:
        self._size = form.size, form.size
        self._mean, self._std = (
            torch.tensor(values, device=device).view(1, -1, 1, 1)
            for values in (form.mean, form.std)
        )

    def __call__(self, images: Tensor) -> Tensor:
        """Return float32 (n, 3, size, size) of uint8 (n, height, width, channels)."""
        scaled = images.permute(0, 3, 1, 2).to(torch.float32) / 255
        if scaled.shape[1] == 1:
            scaled = scaled.expand(-1, 3, -1, -1)
        if scaled.shape[2:] != self._size:
            scaled = functional.interpolate(
                scaled, self._size, mode="bilinear", antialias=True
            )
        return (scaled - self._mean) / self._std


class Pretrained(Network):
    """A network of a library, split at its last linear layer."""

    takes: ClassVar[tuple[InputDtype, ...]] = ("uint8",)

    def __init__(self, settings: Any, spec: InputSpec) -> None:
        super().__init__(settings, spec)
        self._form: Images | None = None
        self._config: dict[str, Any] = {}
        network = self.build_network(settings, spec)
        name = f"{self.name} {settings.architecture}"
        sample = self.normalizer(spec, torch.device("cpu"))(
            torch.zeros((2, *spec.image_shape), dtype=spec.torch_dtype)
        )
        model = split(
            network,
            natural(sample),
            num_classes=spec.num_classes,
            representation=settings.representation,
            name=name,
            fix=NAME_IT,
            load=lambda network, head: self.load(network, head, settings),
        )
        self.described = json.dumps([self._form, self._config], sort_keys=True)
        self.memory_format = model.memory_format
        self.features = model.features
        self.classifier = model.classifier
        self.embedding_dim = model.embedding_dim

    def normalizer(
        self, spec: InputSpec, device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that resizes and normalises images for the network."""
        if self._form is None:
            return super().normalizer(spec, device)
        return Resized(self._form, device)

    def embed(self, x: Tensor) -> Tensor:
        """Return φ(x), shape (n, p)."""
        return super().embed(natural(x))

    @abstractmethod
    def build_network(self, settings: Any, spec: InputSpec) -> nn.Module:
        """Build the network, from inputs to logits; set the form of its images."""

    def load(self, network: nn.Module, head: str, settings: Any) -> None:
        """Load the weights into the network; ``head`` is the name of its head."""
        load_weights(network, settings.weights, head)


def _unknown(section: str, name: str, known: list[str], hint: str = "") -> ConfigError:
    guess = nearest(name, known)
    expected = f"found {name!r}, expected one of {len(known)} names"
    message = "; ".join(filter(None, (expected, guess, hint)))
    return ConfigError([Problem(section, message)])


@dataclass(frozen=True, kw_only=True)
class TorchvisionSettings(PretrainedSettings):
    """Settings of `TorchvisionNetwork`.

    Attributes
    ----------
    architecture
        As in ``torchvision.models``: ``mobilenet_v2``, ``resnet18``, ``vit_b_16``.
    weights
        As of `ModelSettings`, where the first may be the name of torchvision's weights,
        such as ``MobileNet_V2_Weights.IMAGENET1K_V2``.
    """

    weights: str | tuple[str, ...] | None = None


class TorchvisionNetwork(Pretrained):
    """Any image classifier of torchvision."""

    name = "torchvision"
    title = "torchvision"
    summary = "Any image classifier of torchvision, with weights of a local file."
    settings_type = TorchvisionSettings

    @override
    def build_network(
        self, settings: TorchvisionSettings, spec: InputSpec
    ) -> nn.Module:
        models = import_torchvision().models
        known = models.list_models(module=models)
        if settings.architecture not in known:
            raise _unknown("model.architecture", settings.architecture, known)
        stated = models.get_model_weights(settings.architecture).DEFAULT.transforms()
        size = settings.image_size or stated.crop_size[0]
        self._form = Images(size, tuple(stated.mean), tuple(stated.std))
        fixed = {"image_size": size} if settings.architecture[:4] == "vit_" else {}
        network: nn.Module = models.get_model(
            settings.architecture, num_classes=spec.num_classes, **fixed
        )
        return network

    @override
    def load(
        self, network: nn.Module, head: str, settings: TorchvisionSettings
    ) -> None:
        first, *others = as_names(settings.weights) or ("",)
        if not first or is_file_name(first):
            super().load(network, head, settings)
            return
        self._load_published(network, head, settings, first)
        super().load(network, head, replace(settings, weights=tuple(others)))

    def _load_published(
        self, network: nn.Module, head: str, settings: TorchvisionSettings, name: str
    ) -> None:
        """Load weights that torchvision knows by name."""
        models = import_torchvision().models
        known = {
            str(published): published
            for published in models.get_model_weights(settings.architecture)
        }
        if name not in known:
            hint = "or give a file that ends in " + ", ".join(SUFFIXES)
            raise _unknown("model.weights", name, list(known), hint)
        url = known[name].url
        file = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
        if not (file.exists() or settings.download):
            message = (
                f"found {name}, which is not in {file.parent}; set model.download: "
                "true to fetch it, or give a local file"
            )
            raise ConfigError([Problem("model.weights", message)])
        tensors = known[name].get_state_dict(progress=False)
        load_tensors(network, tensors, name, head)


class TimmNetwork(Pretrained):
    """Any image classifier of timm."""

    name = "timm"
    title = "timm"
    summary = "Any image classifier of timm, with weights of a local file."
    settings_type = PretrainedSettings

    @override
    def build_network(self, settings: PretrainedSettings, spec: InputSpec) -> nn.Module:
        import_torchvision()  # timm does, in the plain way
        timm = import_extra("timm", "pretrained", "the model timm")
        name, size = settings.architecture, settings.image_size
        if not timm.is_model(name.partition(".")[0]):
            raise _unknown("model.architecture", name, timm.list_models())
        fixed = {"img_size": size} if size and _has_fixed_size(timm, name) else {}
        network: nn.Module = timm.create_model(
            name,
            pretrained=settings.download and settings.weights is None,
            num_classes=spec.num_classes,
            **fixed,
        )
        stated = timm.data.resolve_model_data_config(network)
        self._form = Images(
            size or stated["input_size"][1], stated["mean"], stated["std"]
        )
        return network


def _has_fixed_size(timm: Any, name: str) -> bool:
    stated = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return bool(stated is not None and stated.fixed_input_size)


@dataclass(frozen=True, kw_only=True)
class TransformersSettings(PretrainedSettings):
    """Settings of `TransformersNetwork`.

    Attributes
    ----------
    architecture
        Folder of a model that transformers saved, or its name on the Hugging Face Hub.
    pooling
        What of the last layer is the representation: the ``mean`` over all positions
        that hold something, or the ``first`` one, which some models call CLS.
    """

    pooling: Literal["mean", "first"] = "mean"


class TransformersNetwork(Pretrained):
    """An encoder of images or of text from transformers, and a linear head."""

    name = "transformers"
    title = "Hugging Face transformers"
    summary = "An encoder of images or of tokenised text, from a local folder."
    settings_type = TransformersSettings
    takes = ("uint8", "ids")

    @override
    def build_network(
        self, settings: TransformersSettings, spec: InputSpec
    ) -> nn.Module:
        import_torchvision()  # transformers does, in the plain way
        library = import_extra("transformers", "pretrained", "the model transformers")
        place = str(Path(settings.architecture).expanduser())
        where = {"local_files_only": not settings.download}
        if not settings.download:  # every worker would draw a bar
            library.utils.logging.disable_progress_bar()
        try:
            if settings.weights is None:
                encoder = library.AutoModel.from_pretrained(
                    place, dtype=torch.float32, **where
                )
            else:
                config = library.AutoConfig.from_pretrained(place, **where)
                encoder = library.AutoModel.from_config(config, dtype=torch.float32)
            processor = None
            if spec.dtype == "uint8":
                processor = library.AutoImageProcessor.from_pretrained(
                    place, use_fast=False, **where
                )
        except (OSError, ValueError, KeyError) as error:
            message = (
                f"found {settings.architecture!r}, expected a folder that transformers "
                "saved a model in (config.json, model.safetensors), or a name on the "
                f"hub with model.download: true: {str(error).splitlines()[0]}"
            )
            raise ConfigError([Problem("model.architecture", message)]) from error
        known = encoder.config.to_dict().items()
        self._config = {
            name: value for name, value in known if name not in _OF_THE_FILE
        }
        padding = None if spec.vocabulary is None else spec.vocabulary.padding_id
        if spec.vocabulary is not None:
            _require_vocabulary(encoder, spec.vocabulary.size)
        if processor is not None:
            size = settings.image_size or _size_of(processor.size)
            self._form = Images(size, *_normalisation(processor))
        width = int(encoder.config.hidden_size)
        return Encoder(encoder, padding, settings.pooling, width, spec.num_classes)


def _require_vocabulary(encoder: Any, size: int) -> None:
    most = encoder.get_input_embeddings().num_embeddings
    if size > most:
        message = (
            f"found a model of {most} tokens with data of {size}, expected the "
            "tokenizer of the same folder in data.tokenizer"
        )
        raise ConfigError([Problem("model.architecture", message)])


def _size_of(stated: Any) -> int:
    known = ("shortest_edge", "height")
    return next(int(stated[name]) for name in known if stated.get(name))


def _normalisation(
    processor: Any,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if not getattr(processor, "do_normalize", True):
        return (0.0,) * 3, (1.0,) * 3
    return tuple(processor.image_mean), tuple(processor.image_std)


class Encoder(nn.Module):
    """An encoder of transformers, pooled, with a linear head."""

    def __init__(
        self,
        encoder: nn.Module,
        padding: int | None,
        pooling: str,
        width: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(width, num_classes)
        self._padding = padding
        self._pooling = pooling

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, c) of images (n, 3, h, w) or of ids (n, T)."""
        if self._padding is None:
            states = self.encoder(pixel_values=x).last_hidden_state
            present = torch.ones(1, 1, device=x.device)
        else:
            attended = x != self._padding
            # Not only padding: a text of no tokens attends to its first place.
            attended[:, 0] = True
            longest = int(attended.any(dim=0).nonzero().max()) + 1
            x, attended = x[:, :longest], attended[:, :longest]
            states = self.encoder(input_ids=x, attention_mask=attended.long())
            states = states.last_hidden_state
            present = attended.to(states.dtype)
        if states.dim() == 4:  # a map
            states = states.flatten(start_dim=2).transpose(1, 2)
        if self._pooling == "first":
            pooled = states[:, 0]
        else:
            weights = present.expand(states.shape[:2])[:, :, None]
            pooled = (states * weights).sum(dim=1) / weights.sum(dim=1)
        logits: Tensor = self.classifier(pooled)
        return logits

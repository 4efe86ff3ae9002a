"""Networks and data in plain torch."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.bare_loop import BareImages
from knnper.data.examples import Dataset, InputSpec, LabelledArrays
from knnper.embedding_model import EmbeddingModel
from knnper.models import MODELS
from knnper.process import import_torchvision
from knnper.settings import Choice, Settings


def bare_images(data: Dataset) -> tuple[BareImages, BareImages]:
    """Return the training split and the test split."""
    return _images(data.train, data.spec), _images(data.test, data.spec)


def mobilenet_v2(num_classes: int) -> nn.Module:
    """Return torchvision's model in the fastest memory layout for convolutions."""
    model: nn.Module = import_torchvision().models.mobilenet_v2(num_classes=num_classes)
    return _channels_last(model)


def bare_network(choice: Choice[Settings], spec: InputSpec) -> nn.Module:
    """Build a network of torch's own layers and convolutions.

    Without the changes of `knnper.models.build_model`.
    """
    if choice.name == "mobilenet_v2":
        return mobilenet_v2(spec.num_classes)
    kind = MODELS[choice.name]
    assert isinstance(choice.settings, kind.settings_type), "of the catalogue"
    return _channels_last(kind(choice.settings, spec))


def _channels_last(model: nn.Module) -> nn.Module:
    # torch's type stubs lack `memory_format`.
    changed: nn.Module = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return changed


def halves(
    network: nn.Module,
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Split a network of `bare_network` into embedding function and head."""
    if isinstance(network, EmbeddingModel):
        return network.embed, network.head
    return functools.partial(embed, network), network.get_submodule("classifier")


def embed(model: Any, images: Tensor) -> Tensor:
    """Compute the input of the head of torchvision's MobileNetV2, shape (n, 1280)."""
    features: Tensor = model.features(images)
    return functional.adaptive_avg_pool2d(features, 1).flatten(1)


def _images(split: LabelledArrays, spec: InputSpec) -> BareImages:
    mean, std = torch.tensor(spec.mean), torch.tensor(spec.std)
    return BareImages(
        torch.tensor(split.images),
        torch.tensor(split.labels),
        scale=1 / (255 * std),
        shift=-mean / std,
    )

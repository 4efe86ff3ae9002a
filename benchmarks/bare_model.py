"""MobileNetV2 and its data as plain torch has them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from knnper.data.examples import Dataset, InputSpec, LabelledArrays
from knnper.process import import_torchvision


@dataclass(frozen=True)
class BareImages:
    """Images in one tensor.

    Attributes
    ----------
    pixels
        uint8, shape (n, height, width, channels).
    labels
        int64, shape (n,).
    scale, shift
        Normalise a batch as float32; shape (channels,).
    """

    pixels: Tensor
    labels: Tensor
    scale: Tensor
    shift: Tensor

    def batch(self, positions: Tensor) -> Tensor:
        """Return normalised images, float32 of shape (n, channels, height, width)."""
        pixels = self.pixels[positions].to(torch.float32)
        return pixels.mul_(self.scale).add_(self.shift).permute(0, 3, 1, 2)


def bare_images(data: Dataset) -> tuple[BareImages, BareImages]:
    """Return the training split and the test split."""
    return _images(data.train, data.spec), _images(data.test, data.spec)


def mobilenet_v2(num_classes: int) -> nn.Module:
    """Return torchvision's model, in the layout in which convolutions are fastest."""
    model: nn.Module = import_torchvision().models.mobilenet_v2(num_classes=num_classes)
    # torch's type stubs leave `memory_format` out.
    changed: nn.Module = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return changed


def embed(model: Any, images: Tensor) -> Tensor:
    """Return what torchvision's MobileNetV2 gives its head, shape (n, 1280)."""
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

"""Networks of the experiments that are not models of the package."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from knnper import InputSpec
from knnper.pretrained import IMAGENET
from knnper.process import import_torchvision
from knnper.weight_files import load_weights


class AdaptedMobileNetV2(nn.Module):
    """MobileNetV2 with ImageNet weights and an additional layer before its head.

    With ``trained: last_blocks`` and one block, only this layer and the head are
    trained: the body and the head for methods that divide a network. The output of the
    other layers is computed once per image.

    Parameters
    ----------
    num_classes, spec
        Of the data.
    backbone
        File of weights with torchvision's names.
    image_size
        Height and width in pixels to which images are resized.
    width
        Number of outputs p of the additional layer, the embedding.
    """

    def __init__(
        self,
        num_classes: int,
        spec: InputSpec,
        backbone: str,
        image_size: int = 96,
        width: int = 128,
    ) -> None:
        super().__init__()
        network = import_torchvision().models.mobilenet_v2()
        load_weights(network, backbone, "classifier.1")
        # One chain, in which blocks are counted; the layer is the last block.
        self.features = nn.Sequential(
            *(_Resized(spec, image_size), *network.features),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Sequential(nn.Linear(network.last_channel, width), nn.ReLU()),
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, c) of images (n, channels, height, width)."""
        logits: Tensor = self.head(self.features(x))
        return logits


class _Resized(nn.Module):
    """Converts normalised images to the size, colours and normalisation of ImageNet."""

    def __init__(self, spec: InputSpec, size: int) -> None:
        super().__init__()
        self._size = size, size
        # Normalisation of values in [0, 1], which forward undoes.
        self._own = [
            torch.tensor(values).view(1, -1, 1, 1) for values in (spec.mean, spec.std)
        ]
        self._imagenet = [torch.tensor(values).view(1, -1, 1, 1) for values in IMAGENET]

    def forward(self, x: Tensor) -> Tensor:
        mean, std = self._own
        images = (x * std + mean).expand(-1, 3, -1, -1)
        images = functional.interpolate(
            images, self._size, mode="bilinear", antialias=True
        )
        mean, std = self._imagenet
        return (images - mean) / std

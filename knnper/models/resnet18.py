"""ResNet-18, the network of the experiments on new clients.

He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, as
torchvision builds it; fedbasis-pflbed.txt, section 6.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from knnper.config.torchvision_import import import_torchvision
from knnper.data.examples import InputSpec
from knnper.models.base import EmbeddingModel, ModelSettings
from knnper.models.checks import require_channels
from knnper.models.normalization import NORMS, Norm

_FIRST_WIDTH = 64


@dataclass(frozen=True)
class ResNet18Settings(ModelSettings):
    """Settings of `ResNet18`.

    Attributes
    ----------
    norm
        ``batch`` (BatchNorm, as published) or ``group`` (GroupNorm in 8 groups, which
        keeps no statistics of the data).
    stem
        How the network begins. ``imagenet``, as published: a 7x7 convolution and
        pooling make images four times smaller in height and width, for about 64 to 224
        pixels. ``cifar``: a 3x3 convolution keeps the size, for about 32 pixels.
    """

    norm: Norm = "batch"
    stem: Literal["imagenet", "cifar"] = "imagenet"


class ResNet18(EmbeddingModel):
    """torchvision's ResNet-18; φ is what comes out of the pooling, p = 512.

    The tensors carry torchvision's names, but for the head, which is ``classifier``
    here and ``fc`` there; a file may have either. A grey channel is repeated three
    times.

    Parameters
    ----------
    settings
        Normalisation and stem.
    spec
        Images with 1 or 3 channels.

    Raises
    ------
    ConfigError
        If the images have another number of channels.
    """

    published_head = "fc"

    def __init__(self, settings: ResNet18Settings, spec: InputSpec) -> None:
        super().__init__()
        require_channels(spec, (1, 3), "resnet18")
        network = import_torchvision().models.resnet18(
            num_classes=spec.num_classes, norm_layer=NORMS[settings.norm]
        )
        self.embedding_dim = int(network.fc.in_features)
        self.num_classes = spec.num_classes
        small = settings.stem == "cifar"
        self.conv1: nn.Module = _small_convolution() if small else network.conv1
        self.bn1: nn.Module = network.bn1
        self.maxpool: nn.Module = nn.Identity() if small else network.maxpool
        self.layer1: nn.Module = network.layer1
        self.layer2: nn.Module = network.layer2
        self.layer3: nn.Module = network.layer3
        self.layer4: nn.Module = network.layer4
        self.classifier = network.fc

    def embed(self, x: Tensor) -> Tensor:
        """Return the pooled features, shape (n, 512)."""
        if x.shape[1] == 1:
            x = x.repeat(1, 3, 1, 1)
        features = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            features = layer(features)
        return functional.adaptive_avg_pool2d(features, 1).flatten(1)


def _small_convolution() -> nn.Conv2d:
    """Return the 3x3 convolution of the stem for small images, drawn as the others."""
    convolution = nn.Conv2d(3, _FIRST_WIDTH, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution

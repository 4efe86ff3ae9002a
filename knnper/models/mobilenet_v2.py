"""MobileNetV2, the network of the paper's CIFAR experiments.

Sandler, Howard, Zhu, Zhmoginov, Chen, "MobileNetV2: Inverted Residuals and Linear
Bottlenecks", CVPR 2018, as torchvision builds it; knn-per.txt, section 5.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from knnper.config.ranges import ProperFraction
from knnper.config.torchvision_import import import_torchvision
from knnper.data.examples import InputSpec
from knnper.models.base import EmbeddingModel, ModelSettings
from knnper.models.checks import require_channels
from knnper.models.normalization import NORMS, Norm


@dataclass(frozen=True)
class MobileNetV2Settings(ModelSettings):
    """Settings of `MobileNetV2`.

    Attributes
    ----------
    norm
        ``batch`` (BatchNorm, as published) or ``group`` (GroupNorm in 8 groups, which
        keeps no statistics of the data).
    dropout
        Probability of dropping a feature before the head, [0, 1).
    """

    norm: Norm = "batch"
    dropout: ProperFraction = 0.2


class MobileNetV2(EmbeddingModel):
    """torchvision's MobileNetV2; φ is what comes out of the pooling, p = 1280.

    The tensors carry torchvision's names. A grey channel is repeated three times.

    Parameters
    ----------
    settings
        Normalisation and dropout.
    spec
        Images with 1 or 3 channels.

    Raises
    ------
    ConfigError
        If the images have another number of channels.
    """

    def __init__(self, settings: MobileNetV2Settings, spec: InputSpec) -> None:
        super().__init__()
        require_channels(spec, (1, 3), "mobilenet_v2")
        network = import_torchvision().models.mobilenet_v2(
            num_classes=spec.num_classes,
            dropout=settings.dropout,
            norm_layer=NORMS[settings.norm],
        )
        self.embedding_dim = int(network.last_channel)
        self.num_classes = spec.num_classes
        self.features: nn.Module = network.features
        self.classifier = network.classifier

    def embed(self, x: Tensor) -> Tensor:
        """Return the pooled features, shape (n, 1280)."""
        if x.shape[1] == 1:
            x = x.repeat(1, 3, 1, 1)
        return functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1)

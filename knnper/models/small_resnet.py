"""A residual network for small photographs that is trained from scratch on CPUs.

One residual block (He, Zhang, Ren, Sun, "Deep Residual Learning for Image
Recognition", CVPR 2016) between convolutions that each halve the image, so that hardly
any work is done at full size: an image of 32x32 pixels takes about as long as with
`LeafCnn`.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from knnper.data.examples import InputSpec
from knnper.models.base import EmbeddingModel, ModelSettings
from knnper.models.checks import require_size
from knnper.models.normalization import NORMS, Norm

_WIDTHS = (32, 64, 128)
_SMALLEST = 16


@dataclass(frozen=True)
class SmallResNetSettings(ModelSettings):
    """Settings of `SmallResNet`.

    Attributes
    ----------
    embedding_dim
        p, the channels of the last convolution.
    norm
        What stands behind each convolution: ``group`` is GroupNorm in 8 groups, which
        keeps no statistics of the data, ``batch`` is BatchNorm.
    """

    embedding_dim: Literal[128, 256, 512] = 256
    norm: Norm = "group"


class SmallResNet(EmbeddingModel):
    """Four 3x3 convolutions with pooling, and a residual block before the last one.

    φ is the largest activation of each channel, so images may have any size from 16x16
    on.

    Parameters
    ----------
    settings
        Width of the last convolution, and the normalisation.
    spec
        Images with height and width of 16 or more.

    Raises
    ------
    ConfigError
        If the images are smaller.
    """

    def __init__(self, settings: SmallResNetSettings, spec: InputSpec) -> None:
        super().__init__()
        require_size(spec, _SMALLEST, "small_resnet")
        channels = spec.image_shape[2]
        self.embedding_dim = settings.embedding_dim
        self.num_classes = spec.num_classes
        first, second, third = _WIDTHS
        self.features = nn.Sequential(
            _halving(channels, first, settings.norm),
            _halving(first, second, settings.norm),
            _halving(second, third, settings.norm),
            _Residual(third, settings.norm),
            _halving(third, settings.embedding_dim, settings.norm),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(settings.embedding_dim, spec.num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the pooled activations of the last convolution, shape (n, p)."""
        embeddings: Tensor = self.features(x)
        return embeddings


class _Residual(nn.Module):
    """x + F(x) with two convolutions in F."""

    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _convolution(width, width),
            NORMS[norm](width),
            nn.ReLU(),
            _convolution(width, width),
            NORMS[norm](width),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x + F(x), of the shape of ``x``."""
        result: Tensor = x + self.residual(x)
        return result


def _halving(channels: int, width: int, norm: Norm) -> nn.Sequential:
    # Pooled before it is normalised: a quarter of the values are left then.
    return nn.Sequential(
        _convolution(channels, width), nn.MaxPool2d(2), NORMS[norm](width), nn.ReLU()
    )


def _convolution(channels: int, width: int) -> nn.Conv2d:
    # The normalisation behind it has a bias of its own.
    return nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)

"""A network for 8x8 digits that trains in milliseconds."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from knnper.config.ranges import PositiveInt
from knnper.data.examples import InputSpec
from knnper.models.base import EmbeddingModel, ModelSettings
from knnper.models.checks import require_multiple
from knnper.models.normalization import OptionalNorm, norm_layers

_WIDTHS = (16, 32)


@dataclass(frozen=True)
class TinyCnnSettings(ModelSettings):
    """Settings of `TinyCnn`.

    Attributes
    ----------
    embedding_dim
        p, the width of the last hidden layer.
    norm
        What stands behind each convolution: ``batch`` is BatchNorm, ``group`` is
        GroupNorm in 8 groups.
    num_poolings
        How many of the convolutions a 2x2 pooling follows: the last one alone, which
        suits 8x8 images, or both, with which 32x32 images train in a third of the time.
    """

    embedding_dim: PositiveInt = 64
    norm: OptionalNorm = "none"
    num_poolings: Literal[1, 2] = 1


class TinyCnn(EmbeddingModel):
    """Two 3x3 convolutions with pooling, one hidden layer.

    Parameters
    ----------
    settings
        Width of the hidden layer and number of poolings.
    spec
        Images with height and width that every pooling can halve.

    Raises
    ------
    ConfigError
        If height or width cannot be halved as often.
    """

    def __init__(self, settings: TinyCnnSettings, spec: InputSpec) -> None:
        super().__init__()
        reduction = 2**settings.num_poolings
        require_multiple(spec, reduction, "tiny_cnn")
        height, width, channels = spec.image_shape
        self.embedding_dim = settings.embedding_dim
        self.num_classes = spec.num_classes
        first, second = _WIDTHS
        self.features = nn.Sequential(
            nn.Conv2d(channels, first, kernel_size=3, padding=1),
            *norm_layers(settings.norm, first),
            nn.ReLU(),
            *[nn.MaxPool2d(2)] * (settings.num_poolings - 1),
            nn.Conv2d(first, second, kernel_size=3, padding=1),
            *norm_layers(settings.norm, second),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(
                second * (height // reduction) * (width // reduction),
                settings.embedding_dim,
            ),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(settings.embedding_dim, spec.num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the hidden layer's activations, shape (n, p)."""
        embeddings: Tensor = self.features(x)
        return embeddings
